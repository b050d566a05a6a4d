"""The transpose scheme: tiles through shared memory compute what the oracle does, coalesced both ways and compiled."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.kernel.nodes import Var
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.schedules.cuda.pointwise import LEAST_BYTES, TRANSPOSE
from autotune.compiler.targets.cuda.compile import build, compile_ptx
from autotune.compiler.targets.cuda.device import BARRIER, Counts
from autotune.compiler.targets.cuda.printer import CudaPrinter
from autotune.compiler.targets.cuda.transpose import TransposeKernel
from autotune.errors import Superseded, Unsupported
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.space import load_space
from autotune.task import Config
from tests.simulated.compiler.test_cuda_outer import Case, graphs_of
from tests.support.many_parts import beside, run_packed, task_of, update
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import check_group, run_group
from tests.support.simulator.machine import Machine
from tests.support.simulator.shared import Words
from tests.support.zoo import BF16, BOOL, F16, I8, I64, T, drawn, nhwc


def with_transposed(x: Tensor) -> Tensor:
    return x + x.t()


def both_outputs(x: Tensor, y: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Outputs of either orientation, and a broadcast along each axis."""
    h = F.gelu(x + y.t() * b)
    return h, (h * c[:, None]).t().contiguous(), h > c[:, None]


def several(x: Tensor, y: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    """Types of every width through the tile, a mask among them."""
    h = torch.where(m.t(), x * 2, y.t().float())
    return h, (n.t() + h.long()).t().contiguous(), (h > 0).t().contiguous()


def key_transposed(q: Tensor, k: Tensor) -> Tensor:
    """Heads in the middle, keys with the head's dimension in front."""
    return (q.transpose(1, 2) * 0.125 + k.transpose(2, 3)).contiguous()


def guarded(x: Tensor, y: Tensor) -> Tensor:
    """Two windows side by side, transposed: guarded loads through the tile."""
    return (torch.cat((x[:, 4:36], y), 1).t() * 2 + 1).contiguous()


def stacked(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Parts of a stack, read across."""
    return torch.stack((x.t(), y.t(), z.t())) + w + w.exp()


def stacked_along(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Parts of a stack, read along the rows, with tensors read across them."""
    return torch.stack((x, y)) * z.t()


def looked_up(table: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return F.embedding(ids, table) + x.t()


def positions(x: Tensor) -> Tensor:
    """Indices of both axes: a triangle of the transposed."""
    return (x.t() * 1.5).tril(-1).contiguous()


CASES = (
    Case("square", with_transposed, (T(68, 68),)),
    Case("odd", with_transposed, (T(37, 37),)),
    Case("batch", lambda x: x + x.transpose(1, 2), (T(2, 36, 36),)),
    Case("odd_bf16", lambda x, y: x * 2 + y.t(), (T(35, 50, d=BF16), T(50, 35, d=BF16))),
    Case("mixed", lambda x, y: x * 2 + y.t(), (T(48, 80, d=F16), T(80, 48))),
    Case("copy", lambda x: x.t().contiguous(), (T(40, 72, d=BF16),)),
    Case("both_outputs", both_outputs, (T(40, 72), T(72, 40), T(72), T(40))),
    Case("several", several, (T(40, 24), T(24, 40, d=I8), T(24, 40, d=BOOL), T(24, 40, d=I64))),
    Case("nhwc", nhwc, (T(2, 40, 6, 6, d=F16), T(40, d=F16))),
    Case("heads", key_transposed, (T(2, 33, 3, 16, d=BF16), T(2, 3, 16, 33, d=BF16))),
    Case("guarded", guarded, (T(20, 40), T(20, 8))),
    Case("guarded_rows", lambda x, y, z: torch.cat((x, y), 0) + z.t(), (T(20, 32), T(24, 32), T(32, 44))),
    Case("stacked", lambda x, y, z: torch.stack((x, y)) + z.mT, (T(36, 40), T(36, 40), T(2, 40, 36))),
    Case("stacked_tiles", lambda x, y, z: torch.stack((x.t(), y.t())) + z, (T(36, 40), T(36, 40), T(2, 40, 36))),
    Case("stacked_three", stacked, (T(40, 36), T(40, 36), T(40, 36), T(3, 36, 40))),
    Case("stacked_both", lambda x, y: torch.stack((x.t(), y)), (T(40, 36), T(36, 40))),
    Case("stacked_along", stacked_along, (T(36, 40), T(36, 40), T(40, 36))),
    Case("looked_up", looked_up, (T(50, 40), T(24, d=I64), T(40, 24))),
    Case("positions", positions, (T(44, 44),)),
    Case("offset", lambda x, y: x + y[1:].t(), (T(32, 40), T(41, 32))),
    Case("strided", lambda x, y: x + y.t(), (T(32, 40, strides=(80, 2)), T(40, 32, strides=(36, 1)))),
)
BY_NAME = {c.name: c for c in CASES}


@functools.cache
def graph(name: str) -> Graph:
    (only,) = graphs_of(BY_NAME[name].fn, BY_NAME[name].inputs)
    return only


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_agree_with_the_oracle(case: Case) -> None:
    g = graph(case.name)
    configs = [TRANSPOSE.default(g), *TRANSPOSE.seeds(g), *drawn(TRANSPOSE, g, 1, 3, lambda config: config["tile"])]
    space = TRANSPOSE.space_of(g, load_space("fusion", "cuda"))
    assert space.contains(configs[0])
    assert {32, 64} == {c["tile"] for c in configs}
    for n, config in enumerate(configs):
        assert TRANSPOSE.normalize(g, config) == config
        assert TRANSPOSE.reject(g, config) is None
        check_group(g, TRANSPOSE.emit(g, config, 3), seed=n, special=bool(n % 2))


@pytest.mark.parametrize("name", ["several", "guarded", "stacked_along"])
def test_kernels_compile(name: str) -> None:
    g = graph(name)
    default = TRANSPOSE.default(g)
    for config in (default, TRANSPOSE.normalize(g, default | {"tile": 64, "blocks_per_sm": 2})):
        (source,) = TRANSPOSE.emit(g, config, 132).sources
        kernel = build(source)
        assert kernel.resources["stack"] == 0
        assert kernel.resources["registers"] <= (96 if config == default else 200)


LARGE = (
    Case("f32", with_transposed, (T(8192, 8192),)),
    Case("bf16", lambda x, y: x * 2 + y.t(), (T(4096, 8192, d=BF16), T(8192, 4096, d=BF16))),
    Case("nhwc", nhwc, (T(16, 320, 64, 64, d=F16), T(320, d=F16))),
)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_tensors_are_read_and_written_in_whole_vectors(case: Case) -> None:
    (g,) = graphs_of(case.fn, case.inputs)
    assert scheme_of(g) is TRANSPOSE
    config = TRANSPOSE.default(g)
    (source,) = TRANSPOSE.emit(g, config, 132).sources
    text = compile_ptx(source, "sm_90")[0]
    widths = Counter(re.findall(r"(?:ld|st)\.global\S*?\.(v4\.u32|[a-z]\d+) ", text))
    assert set(widths) == {"v4.u32"}
    kernel = build(source)
    assert kernel.resources["stack"] == 0
    assert kernel.resources["blocks_per_sm"] * source.block >= 768
    assert TRANSPOSE.reject(g, config | {"threads_per_row": 96}) == "96 threads do not divide a tile of " + str(
        config["tile"]
    )


class _Banks(Words):
    """Notes the word that each access of a thread touches, in order."""

    seen: dict[int, list[int]] = {}

    def touch(self, place: int, write: bool) -> None:
        super().touch(place, write)
        self.seen.setdefault(self.machine.now.number, []).append(place)


ALIGNED = Case("aligned", both_outputs, (T(64, 64), T(64, 64), T(64), T(64)))


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("vector_bytes", [4, 8, 16])
@pytest.mark.parametrize("case", [ALIGNED, BY_NAME["nhwc"], BY_NAME["copy"]], ids=str)
def test_a_warp_touches_every_bank_once(
    case: Case, vector_bytes: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (g,) = graphs_of(case.fn, case.inputs)
    changed: Config = {"threads_per_row": 128, "vector_bytes": vector_bytes, "tile": tile}
    config = TRANSPOSE.normalize(g, TRANSPOSE.default(g) | changed)
    assert config["tile"] == tile
    monkeypatch.setattr(Machine, "words", _Banks)
    monkeypatch.setattr(_Banks, "seen", {})
    made = TRANSPOSE.emit(g, config, 3)
    run_group(g, made, make_inputs(g, seed=0))
    block = made.sources[0].block
    assert min(map(len, _Banks.seen.values())) >= 2 * tile * tile // block
    for warp in range(block // 32):
        threads = [_Banks.seen[t] for t in range(32 * warp, 32 * warp + 32)]
        for words in zip(*threads, strict=True):
            assert len({w % 32 for w in words}) == 32


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9])
def test_mirror_images_follow_each_other_and_every_tile_comes_once(n: int) -> None:
    kernel: Any = SimpleNamespace(t=SimpleNamespace(x=1, y=0), e=SimpleNamespace(side=n + n % 2, lines={1: n}))
    kernel.__dict__.update(count=Counts(), tile=1, first=lambda axis: Var(f"g{axis}"))
    kernel.__dict__.update(in_plane=TransposeKernel.in_plane, live=TransposeKernel.live)
    lines = CudaPrinter().block(TransposeKernel.pair(kernel))
    found: list[tuple[int, int] | None] = []
    for place in range((n + n % 2) * (n + n % 2 + 1)):
        names: dict[str, Any] = {"place": place, "int32": int, "sel": lambda c, a, b: a if c else b}
        exec("\n".join(lines), {"udiv": lambda a, b: a // b}, names)
        found.append((names["g0"], names["g1"]) if names["live"] else None)
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert all(b == a[::-1] for a, b in pairs if a and b)
    assert sorted(t for t in found if t) == [(a, b) for a in range(n) for b in range(n)]
    assert sum(t is None for t in found) == len(found) - n * n


def test_a_missing_barrier_is_found() -> None:
    g = graph("both_outputs")
    made = TRANSPOSE.emit(g, TRANSPOSE.default(g), 3)
    (good,) = made.sources
    barriers = [n for n, s in enumerate(good.body) if s == BARRIER]
    assert len(barriers) == 2
    for n in barriers:
        bad = replace(good, body=good.body[:n] + good.body[n + 1 :])
        with pytest.raises(KernelError, match="race"):
            check_group(g, type(made)((bad,), made.args))


def test_tiles_share_a_launch_with_other_groups() -> None:
    (g,) = graphs_of(with_transposed, (T(64, 64),))
    assert scheme_of(g) is TRANSPOSE
    task = task_of(beside(g, update(37), update(1301)))
    (grid,) = run_packed(task)
    assert grid >= 4


def test_transpose_scheme_refuses_stored_configurations_without_tiles() -> None:
    g = graph("square")
    default = TRANSPOSE.default(g)
    for old in (default | {"tile": 0}, {k: v for k, v in default.items() if k != "tile"}):
        assert TRANSPOSE.normalize(g, old)["tile"] == 32
        with pytest.raises(Superseded, match="which this autotune lacks"):
            TRANSPOSE.emit(g, old, 3)


def test_an_axis_across_the_tiles_may_be_open() -> None:
    g = graph("nhwc")
    (source,) = TRANSPOSE.emit(g, TRANSPOSE.default(g), 3).sources
    assert source.launch["dynamic"]
    (fixed,) = TRANSPOSE.emit(graph("square"), TRANSPOSE.default(graph("square")), 3).sources
    assert not fixed.launch["dynamic"]


@pytest.mark.parametrize(
    ("name", "fn", "inputs"),
    [
        ("one orientation", lambda x, y: x + y, (T(128, 128), T(128, 128))),
        ("merged heads", lambda x: x.transpose(1, 2).contiguous(), (T(4, 8, 32, 16),)),
        ("a narrow axis", lambda x: x.t().contiguous(), (T(2048, 8),)),
        ("small", with_transposed, (T(40, 40),)),
        ("reductions", lambda x: torch.softmax(x + x.t(), -1), (T(128, 128),)),
        ("a transposed vector", lambda x, b: x + b[:, None], (T(128, 128), T(128))),
    ],
)
def test_groups_that_other_schemes_run_as_fast_are_left_to_them(name: str, fn: Any, inputs: Any) -> None:
    for g in graphs_of(fn, inputs):
        with pytest.raises(Unsupported):
            TRANSPOSE.check(g)
        assert scheme_of(g) is not TRANSPOSE
    assert LEAST_BYTES == 1 << 15


@pytest.mark.parametrize(("channels", "side"), [(32, 32), (64, 64)])
def test_a_default_tile_is_no_longer_than_an_axis(channels: int, side: int) -> None:
    (g,) = graphs_of(nhwc, (T(16, channels, 64, 64, d=F16), T(channels, d=F16)))
    assert TRANSPOSE.default(g)["tile"] == side
