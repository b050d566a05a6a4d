"""Sorts of random programs, and the program of a seed."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tests.support.random_programs import layouts, steps
from tests.support.random_programs.maker import Maker, Skip, Val, shape_of
from tests.support.random_programs.programs import FLOATS, INTEGERS, Program
from tests.support.random_programs.steps import Step

ALL = "[True, True, True]"


@dataclass(frozen=True)
class Family:
    """A sort of program: its share, and the function that makes it."""

    weight: int
    make: Callable[[Maker], None]


_POINTWISE: dict[Step, int] = {
    steps.unary: 6,
    steps.binary: 6,
    steps.scalar: 2,
    steps.ternary: 1,
    steps.cast: 2,
    steps.condition: 1,
    steps.where: 1,
    steps.moved: 1,
    steps.jump: 1,
}
_MIXED: dict[Step, int] = _POINTWISE | {
    steps.reduction: 6,
    steps.softmax: 2,
    steps.norm: 2,
    layouts.view: 3,
    layouts.copy: 2,
    layouts.gather: 1,
    steps.whole: 1,
    steps.narrow: 1,
    steps.to_float: 1,
    steps.to_whole: 1,
    steps.counting: 1,
    steps.product: 1,
    layouts.opaque: 1,
}
_ROWS: dict[Step, int] = _POINTWISE | {steps.reduction: 6, steps.softmax: 3, steps.norm: 5}
_LAYOUT: dict[Step, int] = _POINTWISE | {layouts.view: 14, layouts.copy: 12, steps.reduction: 2}
_GATHER: dict[Step, int] = _POINTWISE | {layouts.gather: 12, steps.reduction: 4, steps.norm: 2}
_WHOLE: dict[Step, int] = {
    steps.whole: 8,
    steps.condition: 3,
    steps.where: 3,
    steps.counting: 5,
    steps.narrow: 3,
    steps.to_float: 2,
    steps.to_whole: 1,
    layouts.view: 2,
    layouts.copy: 1,
    steps.binary: 2,
}


def walk(m: Maker, weights: Mapping[Step, int], count: int) -> None:
    """``count`` steps drawn by weight; those that do not apply are drawn again."""
    tried = done = 0
    while done < count and tried < 20 * count:
        tried += 1
        before = len(m.lines)
        try:
            m.rng.choices(list(weights), list(weights.values()))[0](m)
        except Skip:
            continue
        done += len(m.lines) > before


def base(m: Maker, ndim: int | None = None, dtype: str | None = None) -> Val:
    return m.input(shape_of(m.rng, m.largest, ndim), dtype or m.rng.choice(["float32", *FLOATS]))


def _mixed(m: Maker) -> None:
    base(m)
    walk(m, _MIXED, m.rng.randint(2, 10))


def _rows(m: Maker) -> None:
    base(m)
    walk(m, _ROWS, m.rng.randint(2, 7))


def _layout(m: Maker) -> None:
    base(m, dtype=m.rng.choice(["float32", "bfloat16", "float16", "int32", "float32"]))
    walk(m, _LAYOUT, m.rng.randint(2, 7))


def _gathers(m: Maker) -> None:
    base(m, 2)
    walk(m, _GATHER, m.rng.randint(2, 6))


def _whole(m: Maker) -> None:
    base(m, dtype=m.rng.choice([*INTEGERS, *INTEGERS, "bool"]))
    walk(m, _WHOLE, m.rng.randint(2, 7))


def _two_axes(m: Maker) -> None:
    """Reductions over rows and over columns of one tensor, and operators behind them."""
    x = base(m, 2 if m.rng.random() < 0.7 else 3)
    if 0 in x.shape:
        raise Skip
    y = m.add(f"{m.rng.choice(['F.relu', 'torch.tanh', 'F.gelu', 'torch.sin'])}({m.scaled(x, 8)})", 8)
    for _ in range(m.rng.randint(2, 5)):
        d = m.rng.choice([0, 0, y.ndim - 1, m.rng.randrange(y.ndim), "all"])
        dims = tuple(k for k in range(y.ndim) if k != y.ndim - 1) if d == "all" and y.ndim > 1 else d
        keep = m.rng.random() < 0.6
        kind = m.rng.choice(["sum", "mean", "amax", "amin", "var"])
        tail = f"dim={dims if dims != 'all' else 0}, keepdim={keep}"
        r = m.add(f"{y.name}.{kind}({tail}{', correction=0' if kind == 'var' else ''})", 64)
        if keep and m.rng.random() < 0.6:
            m.add(f"{y.name} {m.rng.choice(['+', '*'])} {r.name}", 512)
    if m.rng.random() < 0.4:
        m.add(f"torch.softmax({y.name}, {m.rng.randrange(y.ndim)})", 1, centred=True)
    walk(m, _POINTWISE, m.rng.randint(0, 3))


def _scales(m: Maker) -> None:
    """Largest absolute values of blocks in one or both directions, and division by them."""
    block = m.rng.choice([2, 4, 8, 16, 32])
    rows = block * m.rng.randint(1, max(1, min(8, m.largest // (block * block))))
    cols = block * m.rng.randint(1, max(1, min(40, m.largest // (block * rows))))
    dtype = m.rng.choice(FLOATS)
    x = m.input([rows, cols], dtype)
    for axis in m.rng.choice([(0, 1), (0, 1), (1,), (0,)]):
        shape = [rows, cols // block, block] if axis else [rows // block, block, cols]
        b = m.add(f"{x.name}.float().reshape({shape})", 32)
        s = m.add(f"{b.name}.abs().amax({2 if axis else 1}, keepdim=True) / 448.0 + 0.0625", 32)
        m.add(f"({b.name} / {s.name}).reshape({[rows, cols]}).to(torch.{dtype})", 512)
        if m.rng.random() < 0.7:
            m.add(f"{s.name}.squeeze({2 if axis else 1})", 32)


def _backward(m: Maker) -> None:
    """A backward pass: the gradient of an input and the gradients of weights, sums over the other axis."""
    cols = m.rng.choice([1, 3, 8, 16, 17, 33, 64, 96, 127, 128, 256, 300, 512, 768, 1000, 1024])
    rows = m.rng.choice([n for n in (1, 2, 3, 7, 16, 31, 64, 100, 255, 512, 2048) if n * cols <= m.largest] or [1])
    dtype = m.rng.choice(["float32", *FLOATS])
    kind = m.rng.choice(
        ["layer", "layer_formula", "rms", "softmax", "gelu", "group", "batch", "log_softmax", "dropout"]
    )
    x, g = m.input([rows, cols], dtype), m.input([rows, cols], dtype)
    a = "torch.ops.aten"
    if kind == "layer":
        w, b = (m.input([cols], dtype, plain=True) for _ in range(2))
        _, mean, rstd = m.add_several(
            f"{a}.native_layer_norm({x.name}, [{cols}], {w.name}, {b.name}, 0.25)", [256, 32, 2], keep=False
        )
        m.add_several(
            f"{a}.native_layer_norm_backward({g.name}, {x.name}, [{cols}], {mean.name}, {rstd.name}, {w.name},"
            f" {b.name}, {ALL})",
            [256, 256, 256],
        )
    elif kind == "layer_formula":
        w = m.input([cols], dtype, plain=True)
        c = m.add(f"{x.name} - {x.name}.mean(-1, keepdim=True)", 64, keep=False)
        r = m.add(f"torch.rsqrt({c.name}.pow(2).mean(-1, keepdim=True) + 0.25)", 2, keep=False)
        h = m.add(f"{c.name} * {r.name}", 64, keep=False)
        gw = m.add(f"{g.name} * {w.name}", 1024, keep=False)
        m.add(
            f"({gw.name} - {gw.name}.mean(-1, keepdim=True) - {h.name} * ({gw.name} * {h.name}).mean(-1, keepdim=True))"
            f" * {r.name}",
            4096,
        )
        m.add(f"({g.name} * {h.name}).sum(0)", 4096)
        m.add(f"{g.name}.sum(0)", 256)
    elif kind == "rms":
        w = m.input([cols], dtype, plain=True)
        h = m.add(f"{x.name}.float()", 32, keep=False)
        r = m.add(f"torch.rsqrt({h.name}.pow(2).mean(-1, keepdim=True) + 0.25)", 2, keep=False)
        n = m.add(f"{h.name} * {r.name}", 64, keep=False)
        gw = m.add(f"{g.name}.float() * {w.name}", 1024, keep=False)
        m.add(
            f"({r.name} * ({gw.name} - {n.name} * ({gw.name} * {n.name}).mean(-1, keepdim=True))).to(torch.{dtype})",
            4096,
        )
        m.add(f"({g.name} * {n.name}).sum(0)", 4096)
    elif kind in ("softmax", "log_softmax"):
        y = m.add(f"torch.{kind}({x.name}, -1)", 80, keep=False)
        m.add(f"{a}._{kind}_backward_data({g.name}, {y.name}, -1, torch.{dtype})", 2048)
        if m.rng.random() < 0.5:
            m.add(f"{m.pool[-1].name} * 0.125 + {x.name}", 64)
            m.add(f"{m.pool[-1].name}.sum(0)", 2048)
    elif kind == "gelu":
        b = m.input([cols], dtype, plain=True)
        h = m.add(f"{x.name} + {b.name}", 64, keep=False)
        how = m.rng.choice(["none", "tanh"])
        d = m.add(f'{a}.gelu_backward({g.name}, {h.name}, approximate="{how}")', 64)
        m.add(f"{d.name}.sum(0)", 2048)
    elif kind == "dropout":
        keep = m.input([rows, cols], "bool")
        d = m.add(f"{g.name} * {keep.name} * 1.25", 64)
        m.add(f"torch.where({x.name} > 0, {d.name}, 0.0).sum(0)", 2048)
        m.add(f"{d.name}.sum(-1)", 2048)
    else:
        _channels(m, kind)
        return
    if m.rng.random() < 0.4:
        walk(m, _POINTWISE, m.rng.randint(1, 3))


def _channels(m: Maker, kind: str) -> None:
    """The backward of a group or batch norm of an image."""
    n, c, p = m.rng.choice([1, 2, 4]), m.rng.choice([2, 4, 6, 8]), m.rng.choice([4, 9, 49, 64])
    if n * c * p > m.largest:
        raise Skip
    m.inputs.clear()
    m.pool.clear()
    x, g = m.input([n, c, p], "float32", plain=True), m.input([n, c, p], "float32", plain=True)
    w = m.input([c], "float32", plain=True)
    a = "torch.ops.aten"
    if kind == "group":
        _, mean, rstd = m.add_several(
            f"{a}.native_group_norm({x.name}, {w.name}, None, {n}, {c}, {p}, 2, 0.25)", [256, 32, 2]
        )
        m.add_several(
            f"{a}.native_group_norm_backward({g.name}, {x.name}, {mean.name}, {rstd.name}, {w.name}, {n}, {c}, {p}, 2,"
            f" {ALL})",
            [256, 256, 256],
        )
        return
    _, mean, rstd = m.add_several(
        f"{a}._native_batch_norm_legit.no_stats({x.name}, {w.name}, None, True, 0.1, 0.25)", [256, 32, 2]
    )
    m.add_several(
        f"{a}.native_batch_norm_backward({g.name}, {x.name}, {w.name}, None, None, {mean.name}, {rstd.name}, True,"
        f" 0.25, {ALL})",
        [256, 256, 256],
    )


def _packed(m: Maker) -> None:
    """Several small computations that have nothing to do with one another."""
    for _ in range(m.rng.randint(2, 5)):
        m.pool.clear()
        shape = shape_of(m.rng, max(1, m.largest // 8))
        m.input(shape, m.rng.choice(FLOATS))
        walk(m, m.rng.choice([_POINTWISE, _ROWS]), m.rng.randint(1, 3))
        m.finished.extend(v for v in m.pool if v.name.startswith("v"))
    m.pool[:] = m.finished


def _transposed(m: Maker) -> None:
    """Tensors that have their neighbours along different axes, combined, and written either way round."""
    batch = m.rng.choice([[], [], [2], [3]])
    room = m.largest // math.prod(batch)
    if room < 16 * 16:
        raise Skip
    rows = m.rng.choice([n for n in (16, 17, 24, 32, 50, 64, 96, 128) if n * 16 <= room])
    cols = m.rng.choice([n for n in (16, 19, 32, 40, 64, 72, 100, 128, 250) if n * rows <= room])
    x = m.input([*batch, rows, cols], m.rng.choice(["float32", *FLOATS]))
    y = m.input([*batch, cols, rows], m.rng.choice(["float32", *FLOATS]))
    m.add(f"{m.scaled(x, 8)} {m.rng.choice(['+', '-', '*'])} {m.scaled(y, 8)}.transpose(-1, -2)", 64)
    walk(m, _POINTWISE, m.rng.randint(0, 3))
    last = m.pick(lambda v: v.ndim >= 2 and v.name.startswith("v"))
    if m.rng.random() < 0.6:
        m.add(f"{last.name}.transpose(-1, -2).contiguous()", last.bound, exact=last.exact)


def _optimizer(m: Maker) -> None:
    """A step of Adam over tensors of odd sizes, one of them a scalar now and then."""
    dtype = m.rng.choice(["float32", "float32", "bfloat16"])
    rate = m.input([], "float32") if m.rng.random() < 0.3 else None
    for _ in range(m.rng.randint(1, 6)):
        shape = [m.rng.choice([1, 2, 3, 17, 64, 101, 768, 1009, 4097])]
        if m.rng.random() < 0.3:
            shape = [m.rng.choice([1, 5, 16]), m.rng.choice([1, 7, 64])]
        if math.prod(shape) > m.largest:
            continue
        p, g = m.input(shape, dtype), m.input(shape, dtype)
        m1, m2 = m.input(shape, "float32"), m.input(shape, "float32")
        a = m.add(f"{m1.name} * 0.875 + {g.name} * 0.125", 32)
        b = m.add(f"{m2.name}.abs() * 0.96875 + {g.name} * {g.name} * 0.03125", 64)
        lr = f"{rate.name}.abs()" if rate else "0.0625"
        m.add(
            f"({p.name} - {lr} * {a.name} / (b.sqrt() + 0.125)).to(torch.{dtype})".replace("b.sqrt", f"{b.name}.sqrt"),
            128,
        )


FAMILIES: Mapping[str, Family] = {
    "mixed": Family(10, _mixed),
    "rows": Family(6, _rows),
    "backward": Family(5, _backward),
    "two_axes": Family(4, _two_axes),
    "layout": Family(4, _layout),
    "packed": Family(3, _packed),
    "optimizer": Family(2, _optimizer),
    "gathers": Family(3, _gathers),
    "whole": Family(3, _whole),
    "scales": Family(1, _scales),
    "transposed": Family(2, _transposed),
}


def program(seed: int, largest: int = 20_000) -> Program:
    """The program of ``seed``. ``largest`` bounds the elements of each tensor; another bound gives another program."""
    rng = random.Random(f"{seed}/{largest}")
    family = rng.choices(list(FAMILIES), [f.weight for f in FAMILIES.values()])[0]
    made = _made(seed, family, FAMILIES[family].make, rng, largest)
    return replace(made, train=family in ("rows", "mixed") and rng.random() < 0.2)


def long_program(seed: int, largest: int = 4000) -> Program:
    """A program of 10 to 40 steps of all sorts, without autograd."""

    def make(m: Maker) -> None:
        base(m)
        walk(m, m.rng.choice([_MIXED, _MIXED, _ROWS, _LAYOUT]), m.rng.randint(10, 40))

    return _made(seed, "long", make, random.Random(f"long {seed}/{largest}"), largest)


def _made(seed: int, family: str, make: Callable[[Maker], None], rng: random.Random, largest: int) -> Program:
    while True:
        maker = Maker(rng, largest)
        try:
            make(maker)
        except Skip:
            continue
        results = _results(maker)
        if results:
            return _pruned(Program(seed, family, tuple(maker.inputs), tuple(maker.lines), results))


def _results(m: Maker) -> tuple[str, ...]:
    """The program's results: values that nothing else uses, and some of the others."""
    made = [v.name for v in m.pool if v.name.startswith("v")]
    used = set().union(*(_names(line.partition(" = ")[2]) for line in m.lines)) if m.lines else set()
    last = [n for n in made if n not in used]
    m.rng.shuffle(last)
    return tuple(last[:8] + [n for n in made if n in used and m.rng.random() < 0.2][:2])


def _pruned(p: Program) -> Program:
    """Without the lines and inputs that no result needs."""
    needed = set(p.results)
    lines: list[str] = []
    for line in reversed(p.lines):
        left, _, right = line.partition(" = ")
        if needed & _names(left):
            lines.insert(0, line)
            needed |= _names(right)
    inputs = tuple(i for i in p.inputs if i.name in needed)
    return Program(p.seed, p.family, inputs, tuple(lines), p.results, p.train)


def _names(text: str) -> set[str]:
    return set(re.findall(r"\b[vx]\d+\b", text))
