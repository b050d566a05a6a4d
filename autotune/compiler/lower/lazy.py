"""Lazy tensors over the region graph: a tensor is a function from an index to a value.

A :class:`Lazy` has a shape, a storage type and one operation, :meth:`Lazy.at`. Given one affine :class:`Index` per
dimension, it emits, or reuses, the graph value of the tensor's element at that index. Views then cost nothing. A
transpose permutes the indices, a slice shifts them, a reshape splits them, and a load finally turns them into strides.
The graph is built by evaluating each output at plain axes (:mod:`autotune.compiler.lower.translate`).

:class:`Names` assigns an axis to each dimension and each reduction. Corresponding dimensions of an operator's operands
share a name, and all dimensions with that name use its axis. Names are hints only. They make the mean in a layer norm
use the axis of the elements it is subtracted from. A wrong hint costs a value that is computed twice, never a wrong
result: ``x + x.T`` is right although its two dimensions share a name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from autotune.errors import Unreachable, Unsupported
from autotune.ir.build import Builder, in_memory, position_type, within
from autotune.ir.graph import EIGHT_BIT_FLOATS, STORAGE_BYTES, compute_type

NARROW = (torch.uint8, torch.int8, torch.int16)
"""Integer types whose arithmetic uses a wider type."""
Dims = tuple[int, ...]
Guards = tuple[tuple[int, int, int], ...]


def storage_name(dtype: torch.dtype) -> str:
    """The name of a torch type in graphs. Raises Unsupported for types that a region cannot hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in STORAGE_BYTES:
        raise Unsupported(f"tensors of type {name} are not supported")
    return name


def kind(dtype: torch.dtype) -> str:
    """The arithmetic type in which elements of ``dtype`` are computed."""
    return compute_type(storage_name(dtype))


@dataclass(frozen=True)
class Index:
    """An index along one dimension: ``offset + sum(coefficient * axis) + coefficient * value``.

    ``terms`` are sorted pairs (axis, coefficient) with nonzero coefficients. ``pick`` is None or one triple (value,
    coefficient, bound) with an integer value of the graph in ``[0, bound)``; it turns a load into a gather.
    """

    terms: tuple[tuple[int, int], ...] = ()
    offset: int = 0
    pick: tuple[int, int, int] | None = None

    def scaled(self, step: int, shift: int = 0) -> Index:
        if step == 0:
            return Index((), shift)
        pick = self.pick and (self.pick[0], self.pick[1] * step, self.pick[2])
        return Index(tuple((a, c * step) for a, c in self.terms), self.offset * step + shift, pick)

    def plus(self, other: Index) -> Index:
        terms = dict(self.terms)
        for a, c in other.terms:
            terms[a] = terms.get(a, 0) + c
        if self.pick and other.pick:
            raise Unreachable("a tensor indexed by two tensors is not supported")
        kept = tuple(sorted((a, c) for a, c in terms.items() if c))
        return Index(kept, self.offset + other.offset, self.pick or other.pick)


class Names:
    """Union-find over the dimensions of a region, with splits: a name of extent 768 may become names of 12 and 64."""

    def __init__(self) -> None:
        self.extent: list[int] = []
        self._parent: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def new(self, extent: int) -> Dims:
        """A fresh name; () for extent 1, which needs no axis."""
        if extent == 1:
            return ()
        self.extent.append(extent)
        self._parent.append(len(self._parent))
        return (len(self._parent) - 1,)

    def leaves(self, dims: Iterable[int]) -> Dims:
        """The current names: representatives, with split names replaced by their parts (outer first)."""
        out: list[int] = []
        for n in dims:
            while self._parent[n] != n:
                n = self._parent[n]
            out.extend(self.leaves(self._parts[n]) if n in self._parts else (n,))
        return tuple(out)

    def unify(self, left: Iterable[int], right: Iterable[int]) -> bool:
        """Unify two sequences of names of equal total extent, splitting aligned names; return False if unaligned."""
        a, b = list(self.leaves(left)), list(self.leaves(right))
        while a and b:
            x, y = a.pop(), b.pop()
            ex, ey = self.extent[x], self.extent[y]
            if ex == ey:
                if x != y:
                    self._parent[max(x, y)] = min(x, y)
            elif ex > ey and ex % ey == 0:
                outer, inner = self._split(x, ey)
                a, b = [*a, outer, inner], [*b, y]
            elif ey > ex and ey % ex == 0:
                outer, inner = self._split(y, ex)
                a, b = [*a, x], [*b, outer, inner]
            else:
                return False
            # A split or a union may have changed the representatives of the rest.
            a, b = list(self.leaves(a)), list(self.leaves(b))
        return True

    def _split(self, name: int, inner: int) -> tuple[int, int]:
        parts = (self.new(self.extent[name] // inner)[0], self.new(inner)[0])
        self._parts[name] = parts
        return parts


_DEPTH = 32
"""Operators of a chain that one thread evaluates. Each thread has a stack and limits of its own; Python 3.12 and 3.13
also limit calls from C, which every call under Dynamo is, and no program can raise that limit."""


@dataclass
class Repeats:
    """The terms that a region adds for one sum.

    Attributes:
        once: their number if each is added once.
        nodes: the nodes to blame.
        terms: their number for each index that the sum is read at.
    """

    once: int
    nodes: dict[object, None] = field(default_factory=dict)
    terms: dict[tuple[tuple[Index, ...], Guards], int] = field(default_factory=dict)

    def add(self, node: object, index: tuple[Index, ...], guards: Guards, terms: int) -> None:
        """Record the terms at one index."""
        self.nodes[node] = None
        self.terms[index, guards] = terms

    @property
    def total(self) -> int:
        return sum(self.terms.values())


class Region:
    """Shared state of the lazy tensors of one translation: the graph under construction, names and their axes."""

    def __init__(self) -> None:
        self.build = Builder()
        self.names = Names()
        self._axes: dict[tuple[int, int], int] = {}
        self.origin: object = None
        """The fx node under translation; recorded in the tensors made for it, so that a failure names its node."""
        self.out: list[tuple[tuple[int, ...], torch.dtype]] = []
        """Shape and storage type of each result of the node under translation."""
        self.sums: dict[object, Repeats] = {}
        """The terms of each sum, where they may be added several times: of products, and of index-adds."""
        self.picked: dict[object, Repeats] = {}
        """The same of other reductions that are read at computed indices."""
        self.readers: list[object] = []
        """The nodes that read tensors at computed indices, whose elements are evaluated at the moment."""
        self.depth = 0
        """Tensors that are evaluated for a consumer at the moment, one for each operator of a chain."""

    @contextlib.contextmanager
    def reading(self, node: object) -> Iterator[None]:
        """While open, tensors are evaluated at indices that ``node`` computes."""
        self.readers.append(node)
        try:
            yield
        finally:
            self.readers.pop()

    def elements(self, index: tuple[Index, ...], guards: Guards) -> int:
        """The number of elements that an index covers, within its guards."""
        picked = [a for i in index if i.pick for a in self.build.values[i.pick[0]].axes]
        axes = {a: self.build.extents[a] for a in (*picked, *(a for i in index for a, _ in i.terms))}
        for a, lo, hi in guards:
            if a in axes:
                axes[a] = min(axes[a], hi - lo)
        return math.prod(axes.values())

    def run_over(self, dims: Dims, used: set[int]) -> Index:
        """An index over a dimension named ``dims``, by axes not in ``used``, to which they are added.

        Names that occur several times take their axes from the outermost on, whether they are one dimension or several.
        """
        terms: list[tuple[int, int]] = []
        step, leaves = 1, self.names.leaves(dims)
        for place in reversed(range(len(leaves))):
            name, turn = leaves[place], 0
            outside = leaves[:place].count(name)
            while (axis := self._axis(name, turn)) in used or outside:
                outside -= axis not in used
                turn += 1
            used.add(axis)
            terms.append((axis, step))
            step *= self.names.extent[name]
        return Index(tuple(sorted(terms)))

    def _axis(self, name: int, turn: int) -> int:
        key = (name, turn)
        if key not in self._axes:
            self._axes[key] = self.build.axis(self.names.extent[name])
        return self._axes[key]

    def join(self, a: Index, b: Index) -> Index:
        """The sum of two indices; two picks become one value."""
        if a.pick is None or b.pick is None:
            return a.plus(b)
        (_, c, m), (_, d, n) = a.pick, b.pick
        step = math.gcd(c, d)
        if c <= 0 or d <= 0:
            raise Unreachable("a gather with a stride that is not positive")
        bound = c // step * (m - 1) + d // step * (n - 1) + 1
        whole, build = position_type(bound), self.build
        parts = []
        for value, k, n in (
            a.pick,
            b.pick,
        ):  # the sum's bound does not imply these bounds
            limited = build.pointwise("minimum", [value, build.const(n - 1, build.values[value].dtype)])
            parts.append(build.pointwise("mul", [build.cast(limited, whole), build.const(k // step, whole)]))
        rest = replace(a, pick=None).plus(replace(b, pick=None))
        return replace(rest, pick=(build.pointwise("add", parts), step, bound))

    def split_index(self, index: Index, inner: int) -> tuple[Index, Index]:
        """``(index // inner, index % inner)``. Raises Unsupported if these are not affine."""
        extents = self.build.extents
        high = tuple((a, c // inner) for a, c in index.terms if c % inner == 0)
        low = tuple((a, c) for a, c in index.terms if c % inner)
        quotient, remainder = divmod(index.offset, inner)
        top = remainder + sum(c * (extents[a] - 1) for a, c in low)
        pick_high = pick_low = None
        if index.pick is not None:
            value, c, bound = index.pick
            if c % inner == 0:
                pick_high = (value, c // inner, bound)
            else:
                pick_low, top = index.pick, top + c * (bound - 1)
        if top >= inner or any(c < 0 for _, c in low):
            raise Unsupported("a reshape that is not aligned with the dimensions it takes apart")
        return Index(high, quotient, pick_high), Index(low, remainder, pick_low)


At = Callable[[tuple[Index, ...], Guards], int]


class Lazy:
    """A tensor of a region, not yet indexed.

    Attributes:
        shape: extents, all positive.
        dtype: the type in which torch stores the tensor; values are computed in ``kind(dtype)``.
        names: for each dimension, the names whose row-major product it is.
    """

    def __init__(self, region: Region, shape: Sequence[int], dtype: torch.dtype, names: Sequence[Dims], at: At) -> None:
        self.region = region
        self.shape = tuple(shape)
        self.dtype = dtype
        self.names = tuple(names)
        self.origin = region.origin
        self._at = at
        self._memo: dict[tuple[tuple[Index, ...], Guards], int] = {}
        storage_name(dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def kind(self) -> str:
        return kind(self.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def at(self, index: tuple[Index, ...], guards: Guards = ()) -> int:
        """The value of the element at ``index``.

        ``guards`` are (axis, lo, hi) bounds outside which the caller ignores the value, and the index may point outside
        the tensor. Raises Unsupported, with the responsible ``origin`` as attribute ``node``. The operator that made an
        index is responsible for it, not the operators that pass it on.
        """
        key = (index, guards)
        found = self._memo.get(key)
        if found is None:
            self.region.depth += 1
            try:
                if self.region.depth % _DEPTH:
                    found = self._at(index, guards)
                else:
                    with ThreadPoolExecutor(1) as thread:
                        found = thread.submit(self._at, index, guards).result()
            except Unsupported as error:
                picks = [i.pick for i in index if i.pick is not None]
                steps = [c for i in index for _, c in i.terms] + [c for _, c, _ in picks]
                beyond = len(picks) > 1 or any(c < 0 for c in steps)  # a load may not be able to follow such an index
                if error.node is None and not (beyond and isinstance(error, Unreachable)):
                    error.node = self.origin
                raise
            finally:
                self.region.depth -= 1
            self._memo[key] = found
        return found

    def dim(self, d: int) -> int:
        """A dimension counted from the front. Raises Unsupported if it is out of range."""
        if not -max(self.ndim, 1) <= d < max(self.ndim, 1):
            raise Unsupported(f"dimension {d} of a tensor with {self.ndim}")
        return d % max(self.ndim, 1)

    # Operators for the composites; floats only, scalars included.
    def __add__(self, other: Operand) -> Lazy:
        return pointwise("add", self, other)

    def __sub__(self, other: Operand) -> Lazy:
        return pointwise("sub", self, other)

    def __mul__(self, other: Operand) -> Lazy:
        return pointwise("mul", self, other)


Number = int | float | bool
Operand = Lazy | Number
Given = TypeVar("Given", bound=Operand)


def source(region: Region, slot: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Lazy:
    """Input ``slot`` as a tensor of ``shape`` with ``strides`` in elements."""
    if any(s < 0 for s in strides):
        raise Unsupported("an input with negative strides")

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        where = Index()
        for i, s in zip(index, strides, strict=True):
            where = region.join(where, i.scaled(s))
        return region.build.load(slot, kind(dtype), where.terms, where.offset, where.pick, guards)

    made = Lazy(region, shape, dtype, [region.names.new(e) for e in shape], at)
    made.origin = None  # an unsupported read is the reader's fault, not the input's
    return made


def scalar(region: Region, number: Number, dtype: torch.dtype) -> Lazy:
    """A constant as a tensor without dimensions."""
    fitting(number, dtype)
    return Lazy(region, (), dtype, (), lambda _i, _g: region.build.const(number, kind(dtype)))


def fitting(number: Number, dtype: torch.dtype) -> None:
    """Raises Unsupported for a number outside the range of ``dtype``, if that is a narrow integer type.

    torch converts the number to that type first and wraps (-5 is 251 as uint8); in a graph it would stay -5 in int32.
    """
    if dtype not in NARROW or not math.isfinite(number):  # a non-finite number is no integer constant
        return
    info = torch.iinfo(dtype)
    if not info.min <= int(number) <= info.max:
        raise Unsupported(f"the constant {number} does not fit {storage_name(dtype)}")


def held(operand: Given, dtype: torch.dtype) -> Given | float:
    """A number as ``dtype`` holds it, for operators before which torch converts it: 0.1 is 0.09998 as float16.

    A tensor does not change. Sums and products take numbers in float32, in eager mode and in graphs.
    """
    if not isinstance(operand, float) or not dtype.is_floating_point or dtype.itemsize > 2:
        return operand
    return float(torch.tensor(operand, dtype=dtype, device="cpu"))


def iota(region: Region, extent: int, dtype: torch.dtype, step: int = 1, start: int = 0) -> Lazy:
    """``start + step * i`` as a tensor [extent]. Raises Unsupported if a number does not fit a narrow ``dtype``."""
    for number in (start, start + step * (extent - 1)):
        fitting(number, dtype)

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        i = index[0].scaled(step, start)
        if kind(dtype) == "float32":
            whole = position_type(start, start + step * extent)
            return region.build.cast(region.build.index(i.terms, i.offset, i.pick, whole), "float32")
        return region.build.index(i.terms, i.offset, i.pick, kind(dtype))

    return Lazy(region, (extent,), dtype, [region.names.new(extent)], at)


def cast(x: Lazy, dtype: torch.dtype) -> Lazy:
    """``x`` stored as ``dtype``.

    NaN as a narrow integer is 0. Arithmetic of narrow integers has 32 bits, and NaN as int32 may be the smallest
    number, whose low bits alone are 0.

    Raises Unsupported if torch might wrap into a narrow integer type. Also raises it for an 8-bit float that is not
    read from memory: a value in a register would not have been rounded to 8 bits.
    """
    if dtype == torch.float64:  # between two casts, where regions have it (autotune.compiler.lower.facts)
        dtype = torch.float32
    if x.dtype == dtype:
        return x
    target = kind(dtype)
    narrow = dtype in NARROW
    fits = x.dtype == torch.bool or (x.dtype in (torch.uint8, torch.int8) and dtype == torch.int16)

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        value = x.at(index, guards)
        if narrow and not fits and not within(x.region.build.values, value, dtype):
            raise Unsupported(f"conversion from {storage_name(x.dtype)} to {storage_name(dtype)} (it may wrap)")
        if storage_name(x.dtype) in EIGHT_BIT_FLOATS and not in_memory(x.region.build.values, value):
            raise Unsupported("a float of eight bits that is read again where it is made")
        whole = x.region.build.cast(value, target)
        return x.region.build.unless_nan(value, whole) if narrow and x.kind == "float32" else whole

    return Lazy(x.region, x.shape, dtype, x.names, at)


_ZERO = Index()


def broadcast_index(index: tuple[Index, ...], shape: Sequence[int]) -> tuple[Index, ...]:
    """The index into a tensor of ``shape`` under broadcasting: trailing dimensions align, extent 1 is index 0."""
    tail = index[len(index) - len(shape) :]
    return tuple([_ZERO if e == 1 else i for i, e in zip(tail, shape, strict=True)])


def broadcast_names(region: Region, shape: Sequence[int], operands: Sequence[Lazy]) -> list[Dims]:
    """Unify the names of the operands' corresponding dimensions, and return the result's names."""
    out: list[Dims] = []
    for back, extent in zip(range(len(shape), 0, -1), shape, strict=True):  # dimensions counted from the end
        found = [x.names[-back] for x in operands if back <= x.ndim and x.shape[-back] != 1 and extent != 1]
        for other in found[1:]:
            region.names.unify(found[0], other)
        out.append(found[0] if found else region.names.new(extent))
    return out


def pointwise(op: str, *operands: Operand, dtype: torch.dtype | None = None) -> Lazy:
    """An operator of :data:`autotune.ir.nodes.POINTWISE` with broadcasting.

    Numbers become constants of the first tensor's type. The caller has cast the tensors to one arithmetic type;
    ``dtype`` is the result's storage type, by default that of the first tensor.
    """
    first = next(x for x in operands if isinstance(x, Lazy))
    region = first.region
    like = torch.float32 if first.kind == "float32" else first.dtype
    if like != torch.float32 and any(isinstance(x, float) and not x.is_integer() for x in operands):
        raise Unsupported(f"{op} of {storage_name(like)} and a number that is not whole")
    tensors = [x if isinstance(x, Lazy) else scalar(region, x, like) for x in operands]
    try:
        shape = torch.broadcast_shapes(*[x.shape for x in tensors])  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise Unsupported(str(error)) from None

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        args = [x.at(broadcast_index(index, x.shape), guards) for x in tensors]
        return region.build.pointwise(op, args)

    return Lazy(region, shape, dtype or first.dtype, broadcast_names(region, shape, tensors), at)


def reduce(op: str, x: Lazy, dims: Iterable[int], keepdim: bool = False, dtype: torch.dtype | None = None) -> Lazy:
    """``sum``, ``max``, ``min`` or ``prod`` over ``dims``."""
    region = x.region
    over = sorted({x.dim(d) for d in dims}) if x.ndim else []
    kept = [d for d in range(x.ndim) if d not in over]
    shape = [1 if d in over else x.shape[d] for d in range(x.ndim) if keepdim or d not in over]
    names = [() if d in over else x.names[d] for d in range(x.ndim) if keepdim or d not in over]

    def at(index: tuple[Index, ...], guards: Guards) -> int:
        full: list[Index] = [_ZERO] * x.ndim
        used: set[int] = {a for a, _, _ in guards}
        for d, i in zip(range(x.ndim) if keepdim else kept, index, strict=True):
            if d in over:
                continue
            full[d] = i
            used.update(a for a, _ in i.terms)
            if i.pick is not None:
                used.update(region.build.values[i.pick[0]].axes)
        axes: list[int] = []
        for d in over:
            full[d] = region.run_over(x.names[d], used)
            axes.extend(a for a, _ in full[d].terms)
        if region.readers and any(i.pick for i in index):
            terms = region.elements(tuple(full), guards)
            region.picked.setdefault(made, Repeats(x.numel)).add(region.readers[-1], index, guards, terms)
        return region.build.reduce(op, x.at(tuple(full), guards), axes)

    made = Lazy(region, shape, dtype or x.dtype, names, at)
    return made
