"""Peers, ablations, and the process that profiles them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autotune.errors import UserError
from autotune.space import load_space
from autotune.tuner.options import SearchOptions
from benchmarks.fusion import ablation, peers
from benchmarks.fusion.instrument import Instrument


def test_option_sets_have_options_of_this_torch_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import list_options

    invented = {"new": {"max_autotune": True, "no_such_option": 1}, "same": {"max_autotune": True}, "none": {"nope": 1}}
    monkeypatch.setattr(peers, "_CUDA_SETS", {**peers._CUDA_SETS, **invented})
    sets = peers.option_sets("cuda:0")
    assert sets["new"] == {"max_autotune": True}
    assert "same" not in sets
    assert "none" not in sets
    assert {"max_autotune", "pointwise", "combo", "cooperative"} <= set(sets)
    assert all(option in list_options() for options in sets.values() for option in options)
    for options in sets.values():  # torch itself takes them
        torch.compile(lambda x: x, options=options)


def test_peers_are_chosen_by_name() -> None:
    groups, sets = peers.wanted(["eager", "cooperative"], "cuda:0")
    assert groups == {"eager"}
    assert list(sets) == ["cooperative"]
    groups, sets = peers.wanted(["inductor-best"], "cuda:0")
    assert sets == peers.option_sets("cuda:0")
    assert peers.wanted(None, "cpu") == (set(peers.GROUPS), {})
    with pytest.raises(UserError, match=r"no peer 'tvm'.*eager, inductor"):
        peers.wanted(["tvm"], "cpu")


def test_contenders_do_not_evict_each_other() -> None:
    traced: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        traced.append(1)
        return gm.forward

    x = (torch.ones(4),)
    calls = [peers.compiled(torch.neg, x, backend=backend) for _ in range(20)]
    assert len(traced) == 20
    for call in calls:
        assert torch.equal(call(), -x[0])  # type: ignore[arg-type]
        assert torch.equal(call((torch.full((4,), 3.0),)), torch.full((4,), -3.0))  # type: ignore[arg-type]
    assert len(traced) == 20  # nothing was compiled again
    assert torch.equal(peers.eager(torch.neg, x)((torch.zeros(4),)), torch.zeros(4))  # type: ignore[arg-type]


def test_an_ablation_narrows_the_space_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    less = ablation.Ablation("less", space={"cuda.keep": ["reload"], "cuda.online": [False], "cpu.row_block": [1, 2]})
    monkeypatch.setitem(ablation.ABLATIONS, "less", less)
    assert ablation.choose(["less"]) == ["full", "less"]
    with ablation.search_options("less", "cuda:1") as options:
        space = load_space("fusion", "cuda", options["space_file"])
        choices = {p.name: p.choices for p in space}
        assert choices["keep"] == ("reload",)
        assert choices["online"] == (False,)
        assert len(choices["unroll"]) > 1
    with ablation.search_options("less", "cpu") as options:
        space = load_space("fusion", "cpu", options["space_file"])
        assert next(p.choices for p in space if p.name == "row_block") == (1, 2)
    with ablation.search_options("full", "cpu") as options:
        assert options == {}


def test_a_mistake_in_ablations_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="did you mean 'greedy'"):
        ablation.choose(["gredy"])
    monkeypatch.setitem(ablation.ABLATIONS, "odd", replace(ablation.ABLATIONS["full"], search={"no_such": 1}))
    with pytest.raises(UserError, match="'odd' sets no_such"):
        ablation.choose(["odd"])
    for db in (None, "postgresql://host/db"):
        with pytest.raises(UserError, match="--db FILE"):
            ablation.database(db, "greedy")
    assert ablation.database("a/b.db", "greedy") == "a/b.greedy.db"
    assert ablation.database(None, "full") is None
    assert SearchOptions().trials is None


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it answers with figures")
def test_the_profiling_process_tells_why_it_has_no_figures_and_lives_on() -> None:
    with Instrument("cuda:0", None, timeout=550) as instrument:
        answer = instrument.ask("rope", "cpu", ["eager", "xla"], {})
        assert answer["times"] == {}
        assert "Error" in answer["errors"]["eager"]
        first = instrument._process
        assert first is not None
        assert first.poll() is None
        first.kill()
        first.wait()
        again = instrument.ask("rope", "cpu", ["eager"], {})
        assert "Error" in again["errors"]["eager"]
        assert instrument._process is not first
        instrument.close()
        instrument.timeout = 0.01  # less than a start takes
        assert "did not answer" in instrument.ask("rope", "cpu", ["eager"], {})["errors"]["eager"]
        assert instrument._process is None
