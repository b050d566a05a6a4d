"""Addresses of a kernel's tensors: a base from fixed axes, and offsets along moving axes.

:class:`Tensors` also has the operations on a pack of elements that row-wise kernels (``rows``) and kernels of lanes
(``outer``) share: naming its lanes, gathering, storing, keeping and reading it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Expr,
    Load,
    Pointer,
    Stmt,
    Store,
    Tuple,
    Unpack,
    Var,
    conjunction,
    sum_of,
    when,
)
from autotune.compiler.program.program import Program, read_once
from autotune.compiler.targets.cuda.device import Counts
from autotune.compiler.targets.cuda.source import CudaSchedule
from autotune.ir.graph import SHORT, STORAGE_BYTES, Output, Value


def fixed_index(axis: int) -> Var:
    """The index along an axis that makes the base."""
    return Var(f"i{axis}", "int64")


def moving_index(axis: int) -> Var:
    """The index along an axis that a walk moves on."""
    return Var(f"j{axis}")


class Access:
    """The addresses of one load, gather or output.

    Args:
        along: the axis of a vector's lanes; -1 for none.
        lanes: the number of a vector's lanes.
        fixed: the axes of the base.
        moving: the axes whose offsets are added to it.

    Attributes:
        step: elements from one lane to the next.
        vector: True if all lanes are adjacent and aligned, so that one instruction accesses them.
    """

    def __init__(
        self, tensor: Value | Output, along: int, lanes: int, fixed: Collection[int], moving: Collection[int]
    ) -> None:
        strides = dict(zip(tensor.axes, tensor.strides, strict=True))
        self.offset, self.step = tensor.offset, strides.get(along, 0)
        self.fixed = [(fixed_index(a), s) for a, s in strides.items() if a in fixed and s]
        # The axis of the lanes last, next to the number of the lane.
        ordered = sorted(strides, key=lambda a: a == along)
        self.moving = [(moving_index(a), strides[a]) for a in ordered if a in moving]
        aligned = self.offset % lanes == 0 and all(s % lanes == 0 for a, s in strides.items() if a != along)
        self.vector = lanes > 1 and self.step == 1 and aligned

    def base(self) -> Expr:
        """Element offset that the fixed axes make."""
        return sum_of(self.fixed, self.offset)

    def at(self, base: Expr, lane: int = 0) -> Expr:
        """The element of one lane."""
        return sum_of([(base, 1), *self.moving], lane * self.step)


class Tensors:
    """The tensors of one program as a kernel reads and writes them; arguments as of :class:`Access`.

    Attributes:
        vec: lanes of a vector.
        access: the access of every load and gather, by number.
        out_access: the access of every output.
        overwritten: slots whose memory an output may share.
    """

    def __init__(
        self,
        program: Program,
        schedule: CudaSchedule,
        along: int,
        lanes: int,
        fixed: Sequence[int],
        overwritten: Collection[int] = (),
    ) -> None:
        self.program, self.schedule, self.graph, self.vec = program, schedule, program.graph, lanes
        self.axes = (*fixed, *program.cols)

        def of(tensor: Value | Output) -> Access:
            return Access(tensor, along, lanes, fixed, program.cols)

        self.access = {i: of(v) for i, v in enumerate(self.graph.values) if v.op in ("load", "gather")}
        self.out_access = [of(o) for o in self.graph.outputs]
        self.overwritten = frozenset(overwritten)

    def base(self, i: int) -> Var:
        """The first element of load or gather ``i`` at the fixed indices."""
        return Var(f"b{i}", "int64")

    def out_base(self, k: int) -> Var:
        """The same of output ``k``."""
        return Var(f"o{k}", "int64")

    def out_pointer(self, k: int) -> Pointer:
        return Pointer(len(self.graph.inputs) + k)

    def raw(self, i: int) -> Var:
        """The raw words of a pack of load ``i``."""
        return Var(f"u{i}")

    # ---- values by lanes --------------------------------------------------------------------------------------------

    def varies(self, i: int) -> bool:
        """True if value ``i`` has a number for each lane of a pack."""
        raise NotImplementedError

    def variable(self, i: int, lane: int = 0) -> Var:
        return Var(f"v{i}_{lane}" if self.varies(i) else f"v{i}", self.graph.values[i].dtype)

    def variables(self, i: int) -> list[Var]:
        """Value ``i`` of a pack, lane by lane."""
        return [self.variable(i, lane) for lane in range(self.vec if self.varies(i) else 1)]

    def name(self, i: int, lane: int = 0) -> Expr:
        """Value ``i`` in a lane; constants inline."""
        v = self.graph.values[i]
        return Const(v.number, v.dtype) if v.op == "const" else self.variable(i, lane)

    def assigned(self, i: int, values: Sequence[Expr]) -> list[Stmt]:
        """Gives value ``i`` its lanes."""
        return [Assign(x, value) for x, value in zip(self.variables(i), values, strict=True)]

    def spread(self, i: int, values: Expr, first: int = 0) -> list[Stmt]:
        """The same from items of a tuple."""
        return self.assigned(i, items(values, len(self.variables(i)), first))

    # ---- what passes keep -------------------------------------------------------------------------------------------

    def kept_words(self, i: int) -> int:
        """Items that a kept value takes in the tuple that its pass returns."""
        return self.vec // 2 if self.packed(i) else len(self.variables(i))

    def left(self, i: int) -> list[Expr]:
        """These items: the lanes of the value, or its raw words."""
        return items(self.raw(i), self.kept_words(i)) if self.packed(i) else [*self.variables(i)]

    def taken_up(self, i: int, result: Expr, first: int) -> list[Stmt]:
        """A kept value from the items of ``result`` from number ``first`` on."""
        if not self.packed(i):
            return self.spread(i, result, first)
        words = Tuple(tuple(items(result, self.kept_words(i), first)))
        return [Assign(self.raw(i), Unpack(self.storage(i), self.vec, words)), *self.spread(i, self.raw(i))]

    # ---- loads and stores -------------------------------------------------------------------------------------------

    def guard(self, v: Value, lane: int) -> Expr | None:
        """Condition under which a guarded load may touch memory in one lane."""
        raise NotImplementedError

    def gather_each(self, i: int) -> list[Stmt]:
        """Gather ``i`` lane by lane: zero where its index or its guards are outside."""
        v = self.graph.values[i]
        out: list[Stmt] = []
        for lane, x in enumerate(self.variables(i)):
            index = self.name(v.args[0], lane)
            inside = conjunction(index >= 0, index < v.bound, self.guard(v, lane))
            at = self.access[i].at(self.base(i), lane) + Cast("int64", index) * v.index_stride
            load = Load(self.storage(i), 1, "default", Pointer(v.slot), at, "fixed")
            out += [Assign(x, Const(0, v.dtype)), when(inside, [Assign(x, load)])]
        return out

    def stored(self, k: int, lanes: int) -> list[Expr]:
        """The lanes of output ``k`` in the arithmetic type that its storage takes."""
        o = self.graph.outputs[k]
        return [lower.stored(self.name(o.value, lane), o.dtype) for lane in range(lanes)]

    def store_pack(self, k: int, hint: str, lanes: int, guard: Expr | None = None) -> list[Stmt]:
        """Stores the lanes of output ``k``, by one instruction if they are adjacent."""
        o, access, values = self.graph.outputs[k], self.out_access[k], self.stored(k, lanes)
        pointer, base, step = self.out_pointer(k), self.out_base(k), self.vec if access.vector else 1
        parts = [(access.at(base, e), tuple(values[e : e + step])) for e in range(0, lanes, step)]
        return [Store(o.dtype, hint, pointer, at, xs, guard) for at, xs in parts]

    # ---- layouts --------------------------------------------------------------------------------------------

    def storage(self, i: int) -> str:
        """Storage type of load or gather ``i``."""
        return self.graph.inputs[self.graph.values[i].slot]

    def packed(self, i: int) -> bool:
        """True if a kept value stays as loaded: 16-bit elements, two to a register."""
        v = self.graph.values[i]
        return v.op == "load" and not v.guards and STORAGE_BYTES[self.storage(i)] == 2 and self.access[i].vector

    def load_hint(self, i: int) -> str:
        """The cache hint of a load: only loads that vary over rows and columns, and so are read once, have one.

        A tensor that the kernel may overwrite is not read-only data.
        """
        if self.graph.values[i].slot in self.overwritten:
            return "coherent"
        return self.schedule.load_hint if read_once(self.graph, i, self.axes) else "default"

    def gathers_packs(self, i: int) -> bool:
        """True if gather ``i`` takes a whole pack by one index."""
        return False

    def params(self) -> tuple[str, ...]:
        """Short type names of the kernel's pointers."""
        return tuple(SHORT[d] for d in (*self.graph.inputs, *(o.dtype for o in self.graph.outputs)))

    def alignments(self) -> list[int]:
        """Bytes every pointer must be aligned to, inputs first."""
        need = [STORAGE_BYTES[d] for d in (*self.graph.inputs, *(o.dtype for o in self.graph.outputs))]
        values, n_inputs = self.graph.values, len(self.graph.inputs)
        whole = [i for i, access in self.access.items() if access.vector]
        slots = {values[i].slot for i in whole if values[i].op == "load" or self.gathers_packs(i)}
        slots |= {n_inputs + k for k, access in enumerate(self.out_access) if access.vector}
        return [min(16, self.vec * size) if k in slots else size for k, size in enumerate(need)]


def items(values: Expr, count: int, first: int = 0) -> list[Expr]:
    return [values[first + n] for n in range(count)]


def within(
    guards: Iterable[tuple[int, int, int]], extents: Sequence[int], open_axis: int, index: Callable[[int], Expr]
) -> Expr | None:
    """True where ``index(axis)`` is within each guard; ``open_axis`` may be longer than its extent."""
    tests: list[Expr] = []
    for axis, low, high in guards:
        tests += [index(axis) >= low] if low > 0 else []
        tests += [index(axis) < high] if high < extents[axis] or axis == open_axis else []
    return conjunction(*tests)


def unravel_index(
    number: Expr, axes: Sequence[int], extents: Sequence[int], counts: Counts, index: Callable[[int], Var]
) -> list[Stmt]:
    """Set ``index(axis)`` of each axis from a flat index, as ``numpy.unravel_index`` does.

    The first axis gets the last quotient, since its extent may be open.
    """
    out: list[Stmt] = []
    for a in reversed(axes[1:]):
        rest = Var(f"rest_{index(a).name}", counts.type)
        out += [_set(index(a), counts.remainder(number, extents[a])), Assign(rest, counts.quotient(number, extents[a]))]
        number = rest
    return [*out, *(_set(index(a), number) for a in axes[:1])]


def _set(index: Var, x: Expr) -> Assign:
    return Assign(index, Cast("int64", x) if index.dtype else x)
