"""Built-in targets and users' names of targets, with one clear line for every mistake."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from autotune.domains.fusion.builtin import BUILTIN, Size
from autotune.domains.fusion.program_spec import captured, resolve, with_rows
from autotune.errors import UserError
from tests.support.capture_helpers import check, regions_of

SMALL = {
    "layer_norm": (6, 32),
    "rms_norm": (6, 32),
    "softmax_mask": (3, 4, 8),
    "bias_gelu_residual_layer_norm": (6, 32),
    "bias_gelu_residual_layer_norm_f32": (6, 32),
    "swiglu_rms_norm": (6, 32),
    "cross_entropy": (6, 50),
    "bert_layer": (2, 8, 96),
}


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_builtin_is_translated_in_full(name: str, preset: str) -> None:
    target = BUILTIN[name]
    size = Size(SMALL[name], target.sizes[preset].dtype)
    regions = regions_of(target.make(size, "cpu"), *target.inputs(size, "cpu"))
    assert regions
    assert all(r.workload is not None for r in regions), [r.reason for r in regions]
    assert len(regions) == (4 if name == "bert_layer" else 1)
    for r in regions:
        check(r)


def test_builtin_inputs_are_the_same_every_time() -> None:
    for name, target in BUILTIN.items():
        size = Size(SMALL[name], torch.float32)
        for a, b in zip(target.inputs(size, "cpu"), target.inputs(size, "cpu"), strict=True):
            assert torch.equal(a, b)


def test_bert_weights_leave_the_callers_random_state_alone() -> None:
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    BUILTIN["bert_layer"].make(Size((1, 4, 96), torch.float32), "cpu")
    assert torch.equal(torch.rand(2), want)


def test_the_name_of_a_builtin_is_its_label() -> None:
    ((workload, count),) = captured("softmax_mask", None, "cpu").workloads
    assert workload.label == "softmax_mask f32 12x256x256"
    assert count == 1


USER = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
    def forward(self, x, scale=1.0):
        for _ in range(3):
            x = self.norm(F.silu(x) * scale) @ torch.ones(16, 16, device=x.device)
        return x

frozen = Block().requires_grad_(False)
number = 3
def scaled(x, *, s): return torch.softmax(x * s, -1)
def tensor(): return torch.ones(4, 16)
def positional(): return [torch.ones(4, 16)]
def keywords(): return {"x": torch.ones(4, 16), "s": torch.ones(4, 1)}
def both(device): return (torch.ones(4, 16, device=device),), {"scale": 2.0}
def nothing(): return ()
def wrong(): return 3
def broken(): return 1 / 0
def mismatched(): return torch.ones(4, 17)

calls = []
def make(kind="scaled", *, width=16, layers=1):
    calls.append((kind, width, layers))
    if kind == "block":
        return nn.Sequential(*[Block() for _ in range(layers)])
    return {"scaled": scaled, "class": Block, "dict": {}}[kind]
def rows(n, device, width=16): return torch.ones(n, width, device=device)
class Zoo:
    @staticmethod
    def small(): return Block()
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_module_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(USER)
    (tmp_path / f"{name}_bad.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("inputs", ["tensor", "positional", "both"])
def test_a_class_of_ones_own(user: str, inputs: str) -> None:
    found = captured(f"{user}:Block", f"{user}:{inputs}", "cpu").workloads
    assert found
    # Parameters require grad: inference and training regions both, the three equal layers counted once.
    assert any("backward" in w.label for w, _ in found)
    assert max(count for _, count in found) == 3


def test_inference_only_where_nothing_requires_grad(user: str) -> None:
    found = captured(f"{user}:frozen", f"{user}:tensor", "cpu").workloads
    assert [(w.label, count) for w, count in found] == [("silu+layer_norm f32 4x16", 3)]


def test_other_numbers_of_rows_are_other_workloads_of_the_family(user: str) -> None:
    ((own, _),) = captured(f"{user}:frozen", f"{user}:tensor", "cpu").workloads
    ((same, _),) = captured(f"{user}:frozen", f"{user}:tensor", "cpu", rows=4).workloads
    assert same == own
    for rows in (6, 64):
        ((other, count),) = captured(f"{user}:frozen", f"{user}:tensor", "cpu", rows=rows).workloads
        assert (other.extent, other.family, count) == (rows, own.family, 3)
        assert other != own


def test_which_inputs_have_rows() -> None:
    table, index = torch.randn(8, 4, requires_grad=True), torch.tensor([5, 2, 7])
    bias, mask, scalar = torch.randn(4), torch.tensor([True, False, True]), torch.tensor(2.0)
    (wide, moved, kept, masked, number), more = with_rows(((torch.randn(3, 4), index, bias, mask, scalar),
                                                           {"table": table, "n": 3}), 5)  # fmt: skip
    assert (wide.shape, moved.tolist(), masked.tolist()) == ((5, 4), [5, 2, 7, 5, 2], [True, False, True, True, False])
    assert kept is bias
    assert number is scalar
    assert more == {"table": table, "n": 3}
    ((grown,), _) = with_rows(((table,), {}), 2)
    for many in (1 << 62, 10**30):
        with pytest.raises(UserError, match=f"--rows {many}: cannot make inputs with this number of rows"):
            with_rows(((table,), {}), many)
    assert (grown.requires_grad, grown.is_leaf) == (True, True)
    with pytest.raises(UserError, match="--rows needs an input of two axes"):
        with_rows(((bias, 3), {}), 5)


def test_functions_and_keyword_inputs(user: str) -> None:
    fn, (args, kwargs), label = resolve(f"{user}:scaled", f"{user}:keywords", "cpu")
    assert (args, sorted(kwargs), label) == ((), ["s", "x"], f"{user}:scaled")
    assert fn(**kwargs).shape == (4, 16)


@pytest.mark.parametrize(
    ("target", "inputs", "modules"),
    [
        ("make('block', layers=2)", "rows(4)", 2),
        ('make("block", width=-16, layers = 1)', "rows(n=2 , width=16)", 1),
        ("make('class')", "both()", 0),
        ("Zoo.small()", "tensor()", 0),
        ("Block()", "positional", 0),
    ],
)
def test_factories_make_targets_and_inputs(user: str, target: str, inputs: str, modules: int) -> None:
    fn, (args, _), label = resolve(f"{user}:{target}", f"{user}:{inputs}", "cpu")
    assert len(list(fn.children())) == (modules or 1)
    assert fn(*args).shape == args[0].shape
    assert label == f"{user}:{target}"


def test_a_factory_gets_the_arguments_of_its_call_once(user: str) -> None:
    assert captured(f"{user}:make()", f"{user}:keywords", "cpu").workloads
    assert importlib.import_module(user).calls == [("scaled", 16, 1)]


MISTAKES = [
    ("{user}:make('dict')", "{user}:tensor", "gave a dict, which cannot be called"),
    ("{user}:make('none such')", "{user}:tensor", "failed: KeyError: 'none such'"),
    ("{user}:make(wdth=3)", "{user}:tensor", "unexpected keyword argument 'wdth'"),
    ("{user}:make(Block)", "{user}:tensor", "Block is not a literal"),
    ("{user}:make(__import__('os').getcwd())", "{user}:tensor", "is not a literal"),
    ("{user}:make(**{{'width': 3}})", "{user}:tensor", "name each argument"),
    ("{user}:make(", "{user}:tensor", "is not a call of one function"),
    ("{user}:make()()", "{user}:tensor", "is not a call of one function"),
    ("{user}:make() + 1", "{user}:tensor", "is not a call of one function"),
    ("{user}:(3)", "{user}:tensor", "is not a call of one function"),
    ("{user}:mke()", "{user}:tensor", "did you mean 'make'"),
    ("{user}:number()", "{user}:tensor", "cannot be called: leave out the parentheses"),
    ("{user}:make()", None, "needs --inputs"),
    ("{user}:Block", "{user}:rows()", "missing 1 required positional argument"),
    ("{user}:Block", "{user}:rows(n)", "n is not a literal"),
    (":make()", "{user}:tensor", "must be package.module:callable"),
    ("layernorm", None, "did you mean 'layer_norm'"),
    ("layer_norm", "a:b", "brings its own"),
    ("{user}:Block", None, "needs --inputs"),
    ("{user}:Blok", "{user}:tensor", "did you mean 'Block'"),
    ("{user}:Block", "{user}:tensr", "did you mean 'tensor'"),
    ("{user}:", "{user}:tensor", "must be package.module:callable"),
    ("{user}:Block", "tensor", "must be package.module:callable"),
    ("no_such_package_x.y:f", "{user}:tensor", "no module 'no_such_package_x'"),
    ("{user}_bad:f", "{user}:tensor", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
    ("{user}:number", "{user}:tensor", "cannot be called"),
    ("{user}:Block", "{user}:nothing", "returned no tensors"),
    ("{user}:Block", "{user}:wrong", "returned a int"),
    ("{user}:Block", "{user}:broken", "ZeroDivisionError"),
    ("{user}:frozen", "{user}:mismatched", "failed on its inputs"),
    ("{user}:nothing", "{user}:tensor", "where it makes the model, write '{user}:nothing()'"),
]


@pytest.mark.parametrize(("target", "inputs", "says"), MISTAKES)
def test_mistakes_are_one_clear_line(user: str, target: str, inputs: str | None, says: str) -> None:
    with pytest.raises(UserError) as caught:
        captured(target.format(user=user), inputs and inputs.format(user=user), "cpu")
    assert says.format(user=user) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:99"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(UserError):
        captured("layer_norm", None, device)
