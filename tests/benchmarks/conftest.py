"""What tests of benchmarks share."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch


@pytest.fixture
def threads() -> Any:
    """Who measures pins the process; other tests get their threads back."""
    cpus, count = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(count)
