"""In which order contenders take their turns in the rounds of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def balanced(contenders: Sequence[T]) -> Iterator[list[T]]:
    """One order for each round, without end: each has every contender once.

    Over as many rounds as there are contenders (twice as many, where their number is odd) every contender has each
    place equally often, and follows every other one equally often within a round. What a contender leaves behind, such
    as a lower clock after a large GEMM, then meets all others alike. An order that only rotates leaves each contender
    behind the same other one. Orders are those of a Latin square after E. J. Williams, "Experimental designs balanced
    for the estimation of residual effects of treatments" (1949).
    """
    count = len(contenders)
    zigzag = [k // 2 if k % 2 == 0 else count - (k + 1) // 2 for k in range(count)]
    while True:
        for backwards in (False, True) if count % 2 else (False,):
            for shift in range(count):
                order = [contenders[(k + shift) % count] for k in zigzag]
                yield order[::-1] if backwards else order
        if not count:
            yield []


__all__ = ["balanced"]
