"""Accumulators over the rows in a row-wise kernel: what a pass adds to them, how a block joins and stores them.

Each thread holds, for every pack of columns it owns, one accumulator a lane (two for running moments) over all the rows
its block walks; they travel through the pass functions as a tuple ``g<pass>``. The parts of a block's row groups meet
in shared memory at the end, and one row of partials a block, or a cluster of them, goes to scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.nodes import Assign, Const, Select, Stmt, Var
from autotune.compiler.program.program import Pass
from autotune.compiler.targets.cuda.access import OK
from autotune.compiler.targets.cuda.names import tuple_of
from autotune.compiler.targets.cuda.operators import accumulator, combine
from autotune.compiler.targets.cuda.rows import legacy

if TYPE_CHECKING:
    from autotune.compiler.program.one_pass import Column
    from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
    from autotune.compiler.targets.cuda.rows.kernel import Rows

SHORT = {"float32": "f32", "int32": "i32", "int64": "i64"}


def lanes(e: CudaEmitter, q: int) -> list[tuple[int, str, int]]:
    """The accumulators of pass ``q`` in the order of their tuple: (column, "" or "m" or "s", lane)."""
    out = []
    for n in e.all_passes[q].columns:
        for part in ("m", "s") if e.program.columns[n].kind == "moments" else ("",):
            out += [(n, part, lane) for lane in range(e.vec)]
    return out


def beginning(c: Column) -> Const:
    return Const(0, "float32") if c.kind == "moments" else lower.identity(c.kind, c.dtype)


def beginnings(e: CudaEmitter, q: int) -> list[Const]:
    """What the tuple of pass ``q`` begins with."""
    return [beginning(e.program.columns[n]) for n, _, _ in lanes(e, q)]


def add_columns(e: CudaEmitter, q: int, pas: Pass, body: list[Stmt]) -> list[Var]:
    """Adds one pack to the accumulators ``g<q>``; answers what a pass function returns of them."""
    order = lanes(e, q)
    held = {at: Var(f"g{q}")[k] for k, at in enumerate(order)}
    new = {(n, part, lane): Var(f"k{n}{part}_{lane}") for n, part, lane in order}
    for n in pas.columns:
        c = e.program.columns[n]
        for lane in range(e.vec):
            x = lower.term(e.name(c.value, lane), c.dtype)
            if c.kind == "moments":
                mean, square = held[n, "m", lane], held[n, "s", lane]
                away = Var(f"d{n}", "float32")
                body.append(Assign(away, x - mean))
                body.append(Assign(new[n, "m", lane], mean + away * Var("rn", "float32")))
                body.append(Assign(new[n, "s", lane], square + away * (x - new[n, "m", lane])))
            else:
                body.append(Assign(new[n, "", lane], lower.combine(c.kind, c.dtype, held[n, "", lane], x)))
            if e.ok_needed:
                here = [at for at in order if (at[0], at[2]) == (n, lane)]
                body += [Assign(new[at], Select(OK, new[at], held[at])) for at in here]
    return [new[at] for at in order]


@dataclass(frozen=True)
class Unit:
    """What is joined and stored at a time: one accumulator of one pack of columns, or one of a number a row.

    Attributes:
        column: which of the program's accumulators.
        number: of the pass that adds to it.
        pack: of the thread's packs; None for one number a row.
        names: of each of its parts ("", or "m" and "s"), a name a lane.
    """

    column: int
    number: int
    pack: int | None
    names: dict[str, list[str]]


class Accumulators:
    """The lines around the row loop of one kernel. ``rows`` is the skeleton that is being printed."""

    def __init__(self, rows: Rows) -> None:
        self.r, self.e, self.p = rows, rows.e, rows.p
        self.moments = any(c.kind == "moments" for c in self.p.columns)
        self.first = len(self.e.graph.inputs) + len(self.e.graph.outputs)  # pointer of the first plane
        self.planes: dict[int, int] = {}
        at = self.first + (1 if self.moments else 0)
        for n, c in enumerate(self.p.columns):
            self.planes[n] = at
            at += c.planes
        self.pointers = at - self.first

    def params(self) -> tuple[str, ...]:
        """Short types of the planes, the counts of rows first where there are moments."""
        out = ["f32"] if self.moments else []
        for c in self.p.columns:
            out += [SHORT[c.storage]] * c.planes
        return tuple(out)

    def begin(self) -> list[str]:
        """Before the row loop."""
        out = ["cnt = float32(0)"] if self.moments else []
        for q, pas in enumerate(self.p.passes):
            values = [legacy.text(x) for x in beginnings(self.e, q)]
            if values:
                out += [f"g{q}_{k} = {tuple_of(values)}" for k in range(self.r.packs)]
            for n in pas.row_columns:
                out += [f"{name} = {legacy.text(beginning(self.p.columns[n]))}" for name in self.row_names(n)]
        return out

    def row_names(self, n: int) -> list[str]:
        return [f"k{n}m", f"k{n}s"] if self.p.columns[n].kind == "moments" else [f"k{n}"]

    def each_row(self) -> list[str]:
        """At the beginning of a row."""
        if not self.moments:
            return []
        count = "cnt + sel(ok, float32(1), float32(0))" if self.e.ok_needed else "cnt + float32(1)"
        return [f"cnt = {count}", "rn = rcp(cnt)"]

    def add_row(self, pas: Pass) -> list[str]:
        """Accumulators of one number a row, which all threads of the row carry alike."""
        out = []
        for n in pas.row_columns:
            c = self.p.columns[n]
            x = legacy.text(self.e.name(c.value, 0))
            have = self.e.graph.values[c.value].dtype
            if have == "bool":
                x = f"sel({x}, int32(1), int32(0))"
            elif have != c.dtype:
                x = f"{c.dtype}({x})"
            if c.kind == "moments":
                new = [f"k{n}m + d{n} * rn", f"k{n}s + d{n} * ({x} - y{n}m)"]
                out.append(f"d{n} = {x} - k{n}m")
            else:
                new = [combine(c.kind, c.dtype, f"k{n}", x)]
            for name, value in zip(self.row_names(n), new, strict=True):
                out.append(f"y{name[1:]} = {value}")
            for name in self.row_names(n):
                y = f"y{name[1:]}"
                out.append(f"{name} = sel(ok, {y}, {name})" if self.e.ok_needed else f"{name} = {y}")
        return out

    # ---- after the row loop -----------------------------------------------------------------------------------------

    def units(self) -> list[Unit]:
        """What is joined and stored at a time, in the order of the passes."""
        out = []
        for q, pas in enumerate(self.p.passes):
            for k in range(self.r.packs):
                for n in pas.columns:
                    parts = ("m", "s") if self.p.columns[n].kind == "moments" else ("",)
                    names = {part: [f"x{n}{part}_{lane}" for lane in range(self.e.vec)] for part in parts}
                    out.append(Unit(n, q, k, names))
            for n in pas.row_columns:
                parts = ("m", "s") if self.p.columns[n].kind == "moments" else ("",)
                out.append(Unit(n, q, None, {part: [f"k{n}{part}"] for part in parts}))
        return out

    def end(self) -> tuple[list[str], list[str], int]:
        """(lines before everything: shared arrays; lines after the row loop; bytes of static shared memory)."""
        pre: list[str] = []
        out: list[str] = []
        groups, span = self.r.R, self.r.T * (self.r.R - 1)  # threads of all groups but the first
        size = 0
        if groups > 1:
            kinds = {accumulator(c.dtype) for c in self.p.columns}
            for t in sorted(kinds):
                both = 2 if t == "float32" and self.moments else 1
                pre.append(f"h{t} = cuda.shared.array({both * span * self.e.vec}, {t})")
                size += both * span * self.e.vec * (8 if t == "int64" else 4)
            if self.moments:
                pre.append(f"hc = cuda.shared.array({groups}, float32)")
                size += 4 * groups
                out += ["if t == 0:", "    hc[rb] = cnt"]
        if self.r.joined > 1:
            from autotune.compiler.targets.cuda.rows.cluster_partials import Joint

            shared, after, more = Joint(self, size).lines()
            return pre + shared, out + after, size + more
        for unit in self.units():
            out += self.gather(unit) + self.store(unit)
        if self.moments:
            out += self.total_count()
            out += [f"if tid == 0 and {self.r.first_tile}:", f"    st_f32_1_d(p{self.first}, int64(chunk), total)"]
        return pre, out, size

    def gather(self, unit: Unit) -> list[str]:
        """Lines after which the threads of row group 0 hold a unit of their block under its names."""
        out = []
        if unit.pack is not None:
            order = {at: k for k, at in enumerate(lanes(self.e, unit.number))}
            for part, names in unit.names.items():
                for lane, name in enumerate(names):
                    out.append(f"{name} = g{unit.number}_{unit.pack}[{order[unit.column, part, lane]}]")
        return out + self.join(unit.column, unit.names, self.r.T * (self.r.R - 1))

    def total_count(self) -> list[str]:
        """Rows of this block, as ``total``."""
        if self.r.R == 1:
            return ["total = cnt"]
        return ["cuda.syncthreads()", f"total = {' + '.join(f'hc[{j}]' for j in range(self.r.R))}"]

    def join(self, n: int, names: dict[str, list[str]], span: int) -> list[str]:
        """Bring the parts of a block's row groups together in the threads of group 0."""
        if self.r.R == 1:
            return []
        c = self.p.columns[n]
        t = accumulator(c.dtype)
        width = len(next(iter(names.values())))
        out = ["cuda.syncthreads()", "if rb > 0:"]
        for p, part in enumerate(names):
            for lane, x in enumerate(names[part]):
                out.append(f"    h{t}[uint32({(p * width + lane) * span} + tid - {self.r.T})] = {x}")
        out += ["cuda.syncthreads()", "if rb == 0:"]
        body: list[str] = []
        for lane in range(width):
            at = {
                part: f"h{t}[uint32({(p * width + lane) * span} + (j - 1) * {self.r.T} + t)]"
                for p, part in enumerate(names)
            }
            if c.kind == "moments":
                body += join_moments(names["m"][lane], names["s"][lane], at["m"], at["s"])
            else:
                x = names[""][lane]
                body.append(f"{x} = {combine(c.kind, c.dtype, x, at[''])}")
        if c.kind == "moments":
            out.append("    na = hc[0]")
            body = ["nb = hc[j]", "nt = na + nb", "wb = sel(nt > float32(0), nb / nt, float32(0))", *body, "na = nt"]
        out.append(f"    for j in range(1, {self.r.R}):")
        out += ["        " + x for x in body]
        return out

    def store(self, unit: Unit) -> list[str]:
        """Lines that store a unit in this block's row of partials."""
        short = SHORT[self.p.columns[unit.column].storage]
        if unit.pack is None:
            out, at = [f"if tid == 0 and {self.r.first_tile}:"], "int64(chunk)"
        else:
            guard = ["rb == 0"] if self.r.R > 1 else []
            guard.append(f"cp < {self.p.n_cols}")
            out = [f"cp = {self.r.count}(({unit.pack} * {self.r.TT} + tg) * {self.e.vec} + c0)"]
            out.append(f"if {' and '.join(guard)}:")
            at = f"int64(chunk) * {self.p.n_cols} + cp"
        for p, xs in enumerate(unit.names.values()):
            value = xs[0] if len(xs) == 1 else f"({', '.join(xs)})"
            out.append(f"    st_{short}_{len(xs)}_d(p{self.planes[unit.column] + p}, {at}, {value})")
        return out


def join_moments(mean: str, square: str, other_mean: str, other_square: str) -> list[str]:
    """Chan, Golub and LeVeque: two sets of ``na`` and ``nb`` numbers as one; ``wb`` is nb / (na + nb)."""
    return [
        f"dm = {other_mean} - {mean}",
        f"{square} = {square} + {other_square} + dm * dm * na * wb",
        f"{mean} = {mean} + dm * wb",
    ]
