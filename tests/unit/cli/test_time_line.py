"""The line of a search's seconds names what --timeout does not limit."""

from __future__ import annotations

import pytest

from autotune.cli.commands.search import time_line


@pytest.mark.parametrize(
    ("parts", "baselines", "line"),
    [
        ((0.2, 0.9, 0.0), [], ""),
        ((0.2, 30.4, 0.0), [0.3], "autotune: time: kernels 30 s"),
        (
            (17.0, 30.0, 12.0),
            [],
            (
                "autotune: time: capture 17 s, kernels 30 s, the rest 12 s; --timeout does not limit torch's"
                " compilation in capture and the rest"
            ),
        ),
        (
            (0.0, 89.0, 0.0),
            [21.0, 20.4, 0.1],
            (
                "autotune: time: kernels 89 s; --timeout does not limit torch's compilation for the baselines of"
                " 2 workloads (41 s of kernels)"
            ),
        ),
        (
            (17.0, 89.0, 32.0),
            [41.0],
            (
                "autotune: time: capture 17 s, kernels 89 s, the rest 32 s; --timeout does not limit torch's"
                " compilation in capture and the rest and for the baselines of 1 workload (41 s of kernels)"
            ),
        ),
    ],
)
def test_the_line(parts: tuple[float, float, float], baselines: list[float], line: str) -> None:
    assert time_line(*parts, baselines) == line
