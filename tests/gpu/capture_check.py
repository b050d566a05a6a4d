"""Calls that a CUDA graph cannot capture run uncaptured, and the process continues: random numbers, other captures.

python tests/gpu/capture_check.py
"""

from __future__ import annotations

import torch

from autotune.measure.timer import capture


def main() -> None:
    x = torch.randn(4, device="cuda")
    asked = []

    def reads() -> None:
        asked.append((torch.randn(4, device="cuda") + x).sum().item())

    refused = capture(reads)
    assert refused is reads, "a function that synchronises was captured"
    assert asked, "it did not run"
    torch.manual_seed(0)
    first = torch.randn(3, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(3, device="cuda")), "the generator no longer follows its seed"

    y = torch.zeros(64, device="cuda")
    drawn = capture(lambda: y.copy_(torch.rand(64, device="cuda")))
    assert not isinstance(drawn, type(reads)), "what can be captured was not, after a capture that was refused"
    drawn()
    one = y.clone()
    drawn()
    assert not torch.equal(one, y), "a captured graph draws the same numbers every time"
    print("capture: all right")


if __name__ == "__main__":
    main()
