"""Which compositions there is time for, and how what is left is divided among their parts."""

from __future__ import annotations

import pytest

from autotune.task import Composition
from autotune.tuner.options import Pace
from autotune.tuner.phases.compose import LEAST_CANDIDATES, LEAST_S, Means, Parts
from autotune.workload import Workload


def part(name: str) -> Workload:
    return Workload("toy", {"name": name}, label=name)


def made(names: str, *weights: float) -> Composition:
    """A composition of parts of one letter each."""
    given = weights or (1.0,) * len(names)
    return Composition(names, tuple(part(n) for n in names), given, sum(given), lambda choices: [])


def found(**us: float | None) -> Parts:
    """Parts that take so many microseconds; None for those without a kernel."""
    ranked = {part(n).fingerprint: [] if t is None else [({"n": n}, t)] for n, t in us.items()}
    return Parts(dict(ranked))


ALL = [made("a"), made("bc"), made("cb"), made("de"), made("ab")]


def names(compositions: list[Composition]) -> list[str]:
    return [c.name for c in compositions]


def test_without_a_limit_all_are_followed_up() -> None:
    assert Parts().affordable(ALL, Means()) == ALL
    assert Parts().affordable(ALL, Means(pace=1e6)) == ALL


@pytest.mark.parametrize(
    ("parts", "chosen"),
    [
        (0.0, ["a"]),  # something has to be done
        (1.0, ["a"]),
        (2.9, ["a"]),  # "ab" would take one more alone, but "bc" promises more
        (3.0, ["a", "bc", "cb", "ab"]),  # what takes no further part is free
        (4.9, ["a", "bc", "cb", "ab"]),
        (5.0, ["a", "bc", "cb", "de", "ab"]),
    ],
)
def test_a_part_gets_enough_to_tell_something(parts: float, chosen: list[str]) -> None:
    by_seconds = Means(seconds=parts * LEAST_S)
    by_trials = Means(trials=int(parts * LEAST_CANDIDATES))
    slow = Means(seconds=parts * LEAST_CANDIDATES * 1.0, pace=1.0)
    quick = Means(seconds=parts * LEAST_S, pace=0.01)
    both = Means(seconds=1e6, trials=int(parts * LEAST_CANDIDATES))
    for means in (by_seconds, by_trials, slow, quick, both):
        assert names(Parts().affordable(ALL, means, first=True)) == chosen


def test_compose_charges_no_time_for_known_parts() -> None:
    one = Means(seconds=LEAST_S)
    assert names(Parts().affordable(ALL[1:], one)) == []
    assert names(found(b=3.0).affordable(ALL[1:], one)) == ["bc", "cb"]
    assert names(found(a=3.0, b=3.0).affordable(ALL, one)) == ["a", "bc", "cb", "ab"]
    assert names(found(a=3.0, b=3.0).affordable(ALL, Means(seconds=0.0))) == ["a", "ab"]


def test_compose_drops_compositions_expected_to_be_slower() -> None:
    two = [made("a", 10.0), made("b", 12.0), made("c", 14.0)]
    assert all(Parts().promising(c, two) for c in two)
    known = found(a=20.0)  # twice the model's prediction, as will be the others
    assert [known.promising(c, two) for c in two] == [True, True, False]
    assert not found(b=None).promising(two[1], two)


def test_the_leading_one_is_complete() -> None:
    assert Parts().leading(ALL) is None
    assert found(a=4.0, b=1.0).leading(ALL) is ALL[0]  # "ab" takes both
    assert found(a=4.0, b=1.0, c=2.0).leading(ALL) is ALL[1]
    assert found(a=4.0, b=1.0, c=None).leading(ALL) is ALL[0]


def test_a_part_shares_with_those_that_are_followed_up_only() -> None:
    three = [made("a", 6.0), made("bc", 4.0, 4.0), made("d", 6.0)]
    shares = [Parts().share(part(n), three) for n in "abcd"]
    assert shares == pytest.approx([6 / 12, 2 / 12, 2 / 12, 2 / 12])
    assert Parts().share(part("a"), three[:1]) == 1.0
    assert found(a=1.0).share(part("b"), three[:2]) == 0.5


def test_pace_is_that_of_many() -> None:
    pace = Pace()
    pace.add(4.0, 2)
    assert pace.each is None
    pace.add(6.0, 18)
    assert pace.each == 0.5
