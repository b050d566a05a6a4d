"""Values that several threads need are computed once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from autotune.tuner.threads import Memory, Shared


def test_two_threads_that_ask_for_one_value_get_it_from_one_making() -> None:
    memory, begun, go, made = Memory[str, int](4), threading.Event(), threading.Event(), list[str]()

    def slow() -> int:
        made.append("slow")
        begun.set()
        go.wait()
        return 1

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(memory.get, "a", slow)
        begun.wait()
        second = pool.submit(memory.get, "a", slow)
        assert memory.get("b", lambda: 2) == 2, "another value does not wait for it"
        go.set()
        assert (first.result(), second.result()) == (1, 1)
    assert made == ["slow"]


def test_a_failure_is_reported_and_tried_again() -> None:
    memory = Memory[str, int](4)
    with pytest.raises(ValueError, match="no plan"):
        memory.get("a", lambda: int("no plan"))
    assert memory.get("a", lambda: 3) == 3


def test_the_oldest_are_forgotten() -> None:
    memory = Memory[int, str](2)
    for key in range(3):
        memory.get(key, lambda: "first")
    assert [memory.get(key, lambda: "again") for key in (2, 1, 0)] == ["first", "first", "again"]


def test_items_are_computed_once_and_only_when_a_thread_needs_them() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for n in range(4):
            made.append(n)
            yield n

    shared = Shared(items())
    assert list(itertools.islice(shared, 2)) == [0, 1]
    assert made == [0, 1]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(list, [shared] * 4)) == [[0, 1, 2, 3]] * 4
    assert made == [0, 1, 2, 3]


def test_each_reader_meets_the_error_of_an_item() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("no item")

    shared = Shared(items())
    for _ in range(2):
        reader = iter(shared)
        assert next(reader) == 0
        with pytest.raises(ValueError, match="no item"):
            next(reader)
