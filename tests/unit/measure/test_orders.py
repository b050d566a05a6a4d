"""Orders of rounds: what one contender leaves behind meets all others alike."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import pytest

from autotune.measure.timing.timer import balanced


@pytest.mark.parametrize("count", range(1, 10))
def test_each_has_every_place_and_follows_every_other_equally_often(count: int) -> None:
    rounds = list(islice(balanced(range(count)), count if count % 2 == 0 else 2 * count))
    assert all(sorted(order) == list(range(count)) for order in rounds)
    places = Counter((place, who) for order in rounds for place, who in enumerate(order))
    assert len(places) == count**2
    assert len(set(places.values())) == 1
    followed = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(followed) == count * (count - 1)
    assert len(set(followed.values())) <= 1


def test_it_goes_on_for_as_long_as_asked() -> None:
    orders = list(islice(balanced("abc"), 13))
    assert orders[12] == orders[6] == orders[0]
    assert list(islice(balanced([]), 2)) == [[], []]
