"""The toy domain of tests/tuner, whose bad candidates are what the worker has to survive."""

from __future__ import annotations

from tuner.conftest import policy, toy

__all__ = ["policy", "toy"]
