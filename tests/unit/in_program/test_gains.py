"""The seconds of a search in the program, and the regions that it goes on with after a few candidates of each."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from autotune.domain import domain_of
from autotune.in_program import backend as in_program
from autotune.in_program import search
from autotune.in_program.options import forget_breaks, more_follow, share_of
from autotune.in_program.search import LEAST_S, granted_s
from autotune.in_program.turns import first_candidates, gains_left, shares
from autotune.tuner.result import Result
from autotune.workload import PRODUCT, Workload
from tests.support import zoo
from tests.support.hostile import workload_of


def workload(name: str) -> Workload:
    return Workload("toy", {"name": name}, label=name)


def result(of: Workload, best_us: float | None, moved: int, deployed_us: float | None = None) -> Result:
    named = of.fingerprint, of.label, of.kind, "cuda:0", "policy"
    return Result(*named, best_us=best_us, bytes_moved=moved, deployed_us=deployed_us)


def test_the_region_goes_first_that_a_step_may_gain_most_of() -> None:
    fast, slow, often, failed, unknown = (workload(name) for name in ("fast", "slow", "often", "failed", "unknown"))
    product = Workload(PRODUCT, {})
    results = [result(fast, 10.0, 1000), result(slow, 100.0, 5000), result(often, 20.0, 1000), result(failed, None, 9)]
    results.append(result(product, 500.0, 1000))
    counted = [(fast, 3), (slow, 1), (often, 6), (failed, 1), (unknown, 1), (product, 1)]
    found = [(w.label, round(gain)) for w, gain in gains_left(counted, results)]
    assert found == [("often", 60), ("slow", 50)], "the fastest moves 100 bytes a microsecond, and has nothing to gain"


def test_a_region_that_inductor_computes_much_faster_has_no_second_turn() -> None:
    near, far, fastest = (workload(name) for name in ("near", "far", "fastest"))
    results = [result(fastest, 10.0, 1000), result(near, 60.0, 1000, 50.0), result(far, 89.0, 1000, 35.0)]
    assert [w.label for w, _ in gains_left([(near, 1), (far, 9), (fastest, 1)], results)] == ["near"]


def test_nothing_may_be_gained_where_nothing_was_timed() -> None:
    assert gains_left([(workload("a"), 1)], []) == []


def test_the_first_pass_reaches_as_many_regions_as_it_can() -> None:
    assert [first_candidates(40.0, n) for n in (1, 20, 26, 41, 184)] == [8, 8, 7, 4, 4]


def test_short_search_begins_with_the_largest_expected_savings() -> None:
    """For each byte, most is saved of sums over rows and columns, less of one reduction, least of a copy."""
    found = [zoo.workload(name) for name in ("layer_norm_backward", "rms_bf16", "rope")]
    domain = domain_of("fusion")
    shared = [domain.bytes_saved(w) / domain.bytes_moved(w) for w in found]
    assert shared == sorted(shared, reverse=True)
    assert len(set(shared)) == 3
    one, several = shares([(found[0], 1)]), shares([(found[0], 7)])
    assert several == pytest.approx({name: 7 * share for name, share in one.items()})


def test_epilogue_is_searched_before_its_region_and_a_bare_product_last() -> None:
    product, fusion = domain_of("product"), domain_of("fusion")
    sizes = {"m": 16384, "n": 3072, "k": 768, "dtype": "bfloat16"}
    alone, trained, inferred = (
        product.bytes_saved(Workload("product", {**sizes, "epilogue": name})) for name in ("", "gelu_aux", "gelu")
    )
    gelu = workload_of(lambda x: F.gelu(x, approximate="tanh"), torch.empty(16384, 3072, dtype=torch.bfloat16))
    assert alone < fusion.bytes_saved(gelu) < trained < inferred


@pytest.mark.parametrize(
    ("left", "again_s", "before", "granted"),
    [
        (60.0, 10.0, 0.0, 44.0),
        (60.0, 24.0, 0.0, 30.0),
        (60.0, 90.0, 0.0, 30.0),
        (60.0, 90.0, 20.0, 10.0),
        (60.0, 24.0, 20.0, 30.0),
        (60.0, 90.0, 70.0, LEAST_S),
        (6.0, 90.0, 0.0, LEAST_S),
    ],
)
def test_a_search_gets_half_of_the_budget_however_long_compiling_takes(
    left: float, again_s: float, before: float, granted: float
) -> None:
    """Its time during the first compilation counts."""
    assert granted_s(left, again_s, before) == pytest.approx(granted)


def test_graphs_of_a_function_with_breaks_share_the_budget() -> None:
    """Dynamo's reasons are the real ones: a break in the function, one in a function that it calls, and the ends."""
    shares: list[float] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        y = y.cos()
        torch._dynamo.graph_break()
        return y + 1

    whole = torch._dynamo.disable(lambda x: torch.compile(lambda y: y.exp(), backend=backend)(x))

    def outer(x: torch.Tensor) -> torch.Tensor:
        return whole(inner(x.cos()) * 2).tan()

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        shares.append(share_of(more_follow(gm), inputs))
        return gm.forward

    torch._dynamo.reset()
    forget_breaks()
    torch.compile(outer, backend=backend)(torch.ones(3))
    parts = "the first part of outer, three of inner, the next part of outer, a function that it calls, its last part"
    assert shares == [*[0.5] * 6, 0.9], parts
    torch.compile(lambda x: x.tan(), backend=backend)(torch.ones(3))
    assert shares[7:] == [0.9]
    assert granted_s(80.0, 10.0, 0.0, 0.5) == 30.0


def test_a_graph_with_most_of_the_parameters_gets_most_of_the_budget() -> None:
    """A body of many weights before a break and a small head behind it, and the other way round."""
    shares: list[float] = []

    class Parts(torch.nn.Module):
        def __init__(self, *widths: int) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Linear(8, width) for width in widths)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            torch._dynamo.graph_break()
            found: torch.Tensor = y.sum() + self.second(x)
            return found

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        shares.append(share_of(more_follow(gm), inputs))
        return gm.forward

    for widths, first in (((95, 5), 0.9 * 0.95), ((5, 95), 0.5)):
        torch._dynamo.reset()
        forget_breaks()
        torch.compile(Parts(*widths), backend=backend)(torch.ones(3, 8))
        assert shares == [pytest.approx(first), 0.9]
        shares.clear()


def test_a_function_whose_rest_is_not_compiled_is_finished_when_it_returns() -> None:
    """The rest of the first has no operators, and Dynamo compiles no loop with a graph break."""
    more: list[bool] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        more.append(more_follow(gm))
        return gm.forward

    def checked(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y

    def looped(x: torch.Tensor) -> torch.Tensor:
        y = checked(x.cos()) + 1
        for _ in range(3):
            y = y * 2
            torch._dynamo.graph_break()
        return y

    torch._dynamo.reset()
    for function in (checked, looped, lambda x: x.tan()):
        torch.compile(function, backend=backend)(torch.ones(3))
    assert more == [True, True, False], "checked, looped until its call of checked, the last function"
    threads: list[bool] = []

    def other() -> None:
        torch.compile(lambda x: x.exp(), backend=backend)(torch.ones(3))
        threads.append(more[-1])

    @torch._dynamo.disable
    def in_a_thread() -> None:
        thread = Thread(target=other)
        thread.start()
        thread.join()

    def starts(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        in_a_thread()
        return y.cos()

    torch.compile(starts, backend=backend)(torch.ones(3))
    assert threads == [False]
    assert more[-1] is False


def test_graphs_whose_code_is_stored_count_as_ends_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two graphs of a function come from the code of an earlier process; the others are searched."""
    stored = [SimpleNamespace(budget_s=60.0, name="earlier", load=list) for _ in range(2)]
    more: list[bool] = []

    def searched(gm: torch.fx.GraphModule, *args: object, **options: bool) -> object:
        more.append(options["more"])
        return gm.forward

    monkeypatch.setattr("autotune.runtime.inductor.code.earlier", lambda *args: stored.pop() if stored else None)
    monkeypatch.setattr(in_program, "compile_graph", lambda gm, *args, **options: gm.forward)
    monkeypatch.setattr(search, "compiled", searched)

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        x = x.cos()
        torch._dynamo.graph_break()
        x = x.tan()
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    torch.compile(function, backend="autotune", options={"search": 60})(torch.ones(3))
    assert more == [True, False]
    assert not stored
