"""Outputs of a graph that may share an input's memory, in a kernel that reads each element before it writes it."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.compiler.program.program import Program
from autotune.ir.graph import REDUCTIONS, Graph, Output, Value


def overwritable(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Pairs of an input slot and an output that may share memory.

    Every load of the slot reads the address that the output writes at the same index, and the output needs all of these
    loads. So a thread that computes an element of the output has read that of the slot, in any instruction order. The
    kernel's scheme must guarantee that no other thread needs it.
    """
    reads: dict[int, list[int]] = {}
    for i in graph.live:
        if graph.values[i].op in ("load", "gather"):
            reads.setdefault(graph.values[i].slot, []).append(i)
    places = [_place(graph, o) for o in graph.outputs]
    needed = [set(graph.making([o.value])) for o in graph.outputs]

    def reads_at(i: int, place: _Place) -> bool:
        v = graph.values[i]
        return v.op == "load" and not v.guards and _place(graph, v) == place

    return tuple(
        (slot, k)
        for slot, loads in sorted(reads.items())
        for k, output in enumerate(graph.outputs)
        if output.dtype == graph.inputs[slot] and needed[k].issuperset(loads)
        if all(reads_at(i, places[k]) for i in loads)
    )


def overwritable_rows(program: Program) -> tuple[tuple[int, int], ...]:
    """The pairs of :func:`overwritable` for a row-wise kernel, in which one thread has the same elements in all passes.

    The compiler may reorder loads like arithmetic, so the stored value must depend on each of them. It does directly if
    the load's pass stores, else through one of the pass's reductions. It does not for a load of a later pass.
    """
    graph = program.graph
    passes = program.passes
    written = {} if program.columns else {k: q for q, p in enumerate(program.passes) for k in p.stores}

    def straight(q: int, roots: Iterable[int]) -> list[int]:
        return graph.making(roots, ends=lambda i: graph.values[i].op in REDUCTIONS or i in passes[q].kept_in)

    def safe(slot: int, k: int) -> bool:
        value = graph.outputs[k].value
        needed = set(graph.making([value]))
        reads = [(q, {i for i in p.compute if graph.values[i].slot == slot}) for q, p in enumerate(passes)]

        def goes_in(q: int, loads: set[int]) -> bool:
            p = passes[q]
            pairs = [*(o.reductions for o in p.online), *(m.reductions for m in p.moments)]
            reduced = {*p.reduce, *(i for pair in pairs for i in pair)}
            joined = [a for i in reduced if i in needed for a in graph.values[i].args]
            return loads.issubset(straight(q, [value] if q == written[k] else joined))

        return all(goes_in(q, loads) for q, loads in reads if loads)

    return tuple(pair for pair in overwritable(graph) if pair[1] in written and safe(*pair))


_Place = tuple[int, frozenset[tuple[int, int]]]
"""The offset of a tensor, and its axes with their strides. Axes of one element are left out, except axis 0, whose
extent may vary."""


def _place(graph: Graph, tensor: Value | Output) -> _Place:
    strides = zip(tensor.axes, tensor.strides, strict=True)
    return tensor.offset, frozenset((a, s) for a, s in strides if a == 0 or graph.extents[a] > 1)
