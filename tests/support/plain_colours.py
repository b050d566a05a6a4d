"""A round of the colouring as it is meant. ``autotune.ir.canonical`` does it in less time, to the letter: what is
hashed is in every fingerprint that is stored."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.ir.canonical import Colour, _Colours, _commutes, _mix, _positions
from autotune.ir.graph import Value


class PlainColours(_Colours):
    def _round(self) -> None:
        g, value, axis, slot, output = self.graph, self.value, self.axis, self.slot, self.output
        stores: list[list[Colour]] = [[] for _ in g.values]
        on_axis: list[list[Colour]] = [[] for _ in g.extents]
        new_output = []
        for k, o in enumerate(g.outputs):
            where = sorted((axis[a], s) for a, s in zip(o.axes, o.strides, strict=True))
            new_output.append(_mix(output[k], value[o.value], where))
            stores[o.value].append(_mix(output[k], where))
            for a, s in zip(o.axes, o.strides, strict=True):
                on_axis[a].append(_mix("stored", output[k], s))
        new_value = []
        for i, v in enumerate(g.values):
            args = [value[a] for a in v.args]
            if _commutes(v):
                args.sort()
            new_value.append(
                _mix(
                    value[i],
                    args,
                    sorted(_mix(value[u], _positions(g.values[u], i)) for u in self.users[i]),
                    _walk(v, axis),
                    sorted((axis[a], lo, hi) for a, lo, hi in v.guards),
                    sorted(axis[a] for a in v.over),
                    slot[v.slot] if v.slot >= 0 else "",
                    sorted(stores[i]),
                )
            )
            for k, a in enumerate(v.axes):
                on_axis[a].append(_mix("in", value[i], v.strides[k] if v.strides else 0))
            for a in v.over:
                on_axis[a].append(_mix("over", value[i]))
            for a, lo, hi in v.guards:
                on_axis[a].append(_mix("guard", value[i], lo, hi))
        self.axis = [_mix(axis[a], sorted(on_axis[a])) for a in range(len(axis))]
        self.slot = [_mix(slot[s], sorted(value[i] for i in self.reads[s])) for s in range(len(slot))]
        self.value, self.output = new_value, new_output


def _walk(v: Value, axis: Sequence[Colour]) -> list[tuple[Colour, int]]:
    strides = v.strides or (0,) * len(v.axes)
    return sorted((axis[a], s) for a, s in zip(v.axes, strides, strict=True))
