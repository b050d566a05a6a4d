"""Strict precision through deployment: what was found under one precision is never run under another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autotune
from autotune.domains.fusion.inspection import check_source
from autotune.domains.fusion.program_spec import captured, workloads_of
from autotune.errors import UserError
from autotune.ir.nodes import VARIABLE, asked, asking
from autotune.runtime.deployment import deployment
from autotune.runtime.lookup import lookup
from autotune.store import Store
from autotune.workload import Workload
from tests.support.deployment import Tune


def scaled(x: Tensor) -> Tensor:
    return x / x.abs().amax(-1, keepdim=True)


X = torch.randn(64, 256)


def counted() -> tuple[int, int]:
    """Hits and misses of one compilation."""
    torch._dynamo.reset()
    deployment().reset_counters()
    got = torch.compile(scaled, backend="autotune")(X)
    torch.testing.assert_close(got, scaled(X))
    found = autotune.counters()
    return found["hits"], found["misses"]


@pytest.mark.parametrize(("searched", "deployed"), [("default", "strict"), ("strict", "default")])
def test_a_deployment_finds_schedules_of_its_precision(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, searched: str, deployed: str
) -> None:
    with asking(searched):
        (work,) = tune(scaled, (X,))
    monkeypatch.setenv(VARIABLE, searched)
    assert counted() == (1, 0)
    assert lookup(scaled, X).level == "exact"
    monkeypatch.setenv(VARIABLE, deployed)
    assert counted() == (0, 1)
    assert lookup(scaled, X).level == "none"
    assert work.label.endswith(" strict") is (searched == "strict")


def test_other_rows_are_of_the_same_precision(tune: Tune) -> None:
    with asking("strict"):
        tune(scaled, (torch.randn(128, 256),))
        assert lookup(scaled, X).level == "other_rows"
    assert lookup(scaled, X).level == "none"


def test_a_strict_deployment_gives_eager_s_digits(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """x / y, and not x times 1 / y."""
    monkeypatch.setenv(VARIABLE, "strict")
    tune(scaled, (X,))
    assert torch.equal(torch.compile(scaled, backend="autotune")(X), scaled(X))


def test_missed_workloads_are_searched_as_they_were_missed(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "strict")
    assert counted() == (0, 1)
    monkeypatch.delenv(VARIABLE)
    with Store.open(db) as store:
        from autotune.device import identify

        (miss,) = store.misses(identify("cpu").fingerprint)
        work = store.get_workload(miss.workload)
    assert work is not None
    assert work.spec["precision"] == "strict"
    assert not check_source(work), "a program is rederived under its workload's precision, whatever is asked for now"


def test_the_keys_of_inductors_caches_have_the_precision(db: str, tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(scaled, (X,))
    plain = deployment().state()
    monkeypatch.setenv(VARIABLE, "strict")
    assert deployment().state() != plain


def test_a_search_is_of_the_precision_asked_for(tmp_path: Path) -> None:
    """And a deployment under the same finds what it stored."""
    db = str(tmp_path / "searched.db")
    (result,) = autotune.search(scaled, X, device="cpu", db=db, precision="strict", trials=1, timeout=20)
    assert result.label.endswith(" strict")
    assert asked() == ""
    assert lookup(scaled, X, db=db).level == "none"
    with asking("strict"):
        assert lookup(scaled, X, db=db).level == "exact"


def test_a_known_capture_is_of_its_precision() -> None:
    """The signature, by which a search finds an earlier capture, differs."""
    target = ("torch.nn:Softmax(-1)", "tests.endtoend.runtime.test_precision:inputs", "cpu")
    signed = []
    for name in ("default", "strict"):
        with asking(name):
            signed.append(captured(*target).signature)
    assert None not in signed
    assert signed[0] != signed[1]


def inputs() -> Tensor:
    return X


def test_a_workload_has_its_precision_once() -> None:
    ((plain, _),) = workloads_of(scaled, (X,))
    with asking("strict"):
        ((strict, _),) = workloads_of(scaled, (X,))
    assert "precision" not in plain.spec, "databases of earlier versions are found again"
    assert strict.spec == {**plain.spec, "precision": "strict"}
    assert strict.fingerprint != plain.fingerprint
    assert strict.family != plain.family
    assert Workload.from_json(json.loads(json.dumps(strict.to_json()))) == strict
    with pytest.raises(UserError, match="`precision` goes with a program"):
        autotune.search(strict, device="cpu", precision="strict")


def test_a_wrong_precision_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown precision 'exact': use default or strict"), asking("exact"):
        pass
    monkeypatch.setenv(VARIABLE, "exact")
    with pytest.raises(UserError, match="AUTOTUNE_PRECISION='exact': use default or strict"):
        workloads_of(scaled, (X,))


def test_a_wrong_variable_leaves_a_model_as_it_was(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "exact")
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(scaled, backend="autotune")(X), scaled(X))
    assert autotune.counters()["hits"] == 0


def divided(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x / (1 + x.abs().amax(-1, keepdim=True))
    return x


def scaled_by_extremes(x: Tensor) -> Tensor:
    y = F.gelu(x)
    return y / (1 + y.abs().amax(-1, keepdim=True)) * y.amin(-1, keepdim=True) * F.silu(x).max()


def largest_norm(x: Tensor) -> Tensor:
    y = F.gelu(x)
    return y / (1 + torch.linalg.vector_norm(y, torch.inf, -1, keepdim=True))


def largest_of_groups(x: Tensor) -> Tensor:
    y, group = F.gelu(x), (torch.arange(32) % 7).expand(64, 32)
    return y * y.new_zeros(64, 7).scatter_reduce(1, group, y, "amax", include_self=False).gather(1, group)


def computed_twice(x: Tensor) -> Tensor:
    return (
        F.gelu(x) / (1 + torch.linalg.vector_norm(F.gelu(x), torch.inf)) * torch.aminmax(F.gelu(x), dim=-1).max[:, None]
    )


def in_parts(x: Tensor) -> Tensor:
    return torch.cat([part / (1 + part.amax(-1, keepdim=True)) for part in (F.gelu(x) * x.exp()).chunk(2, -1)], -1)


def _is_backward(workload: Workload) -> bool:
    return "neg" in workload.label or "backward" in workload.label


@pytest.mark.parametrize("fn", [divided, scaled_by_extremes, largest_norm, largest_of_groups, computed_twice, in_parts])
@pytest.mark.parametrize("part", ["", "forward", "backward"])
def test_gradients_of_extremes_find_their_elements(tune: Tune, fn: Callable[[Tensor], Tensor], part: str) -> None:
    """Where only one of both passes has stored kernels, the other one rounds functions otherwise."""

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        x = given.clone().requires_grad_()
        (run(x) * weight).sum().backward()
        assert x.grad is not None
        return x.grad

    given, weight = torch.randn(64, 32), torch.randn(64, 32)
    back = part == "backward"
    stored = tune(fn, (given.clone().requires_grad_(),), select=lambda w: not part or _is_backward(w) == back)
    assert stored
    torch.testing.assert_close(gradient(torch.compile(fn, backend="autotune")), gradient(fn))
    assert autotune.counters().hits
