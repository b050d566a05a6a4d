"""The steps of random programs that move elements: views, copies with another layout, gathers, and opaque ones."""

from __future__ import annotations

import math

from tests.support.random_programs.maker import Maker, Skip
from tests.support.random_programs.programs import FLOATS, NARROW


def view(m: Maker) -> None:
    v = m.pick(lambda v: v.ndim > 0 and 0 not in v.shape)
    keeps = {"exact": v.exact, "centred": v.centred}
    d = m.rng.randrange(v.ndim)
    n = v.shape[d]
    kind = m.rng.choice(
        ["transpose", "transpose", "permute", "flatten", "split", "slice", "slice", "select", "unsqueeze", "expand"]
    )
    if kind == "transpose" and v.ndim > 1:
        m.add(f"{v.name}.transpose({d}, {m.rng.randrange(v.ndim)})", v.bound, **keeps)
    elif kind == "permute" and v.ndim > 2:
        m.add(f"{v.name}.permute({m.rng.sample(range(v.ndim), v.ndim)})", v.bound, **keeps)
    elif kind == "flatten" and v.ndim > 1:
        d = m.rng.randrange(v.ndim - 1)
        m.add(f"{v.name}.reshape({[*v.shape[:d], v.shape[d] * v.shape[d + 1], *v.shape[d + 2 :]]})", v.bound, **keeps)
    elif kind == "split":
        k = m.rng.choice([k for k in (1, 2, 3, 4, 5, 8, 16, 32) if n % k == 0])
        m.add(f"{v.name}.reshape({[*v.shape[:d], n // k, k, *v.shape[d + 1 :]]})", v.bound, **keeps)
    elif kind == "slice" and n > 1:
        start = m.rng.randrange(n - 1)
        stop = m.rng.randint(start + 1, n)
        step = m.rng.choice([1, 1, 1, 2, 3])
        m.add(f"{v.name}[{':, ' * d}{start}:{stop}:{step}]", v.bound, exact=v.exact)
    elif kind == "select":
        m.add(f"{v.name}.select({d}, {m.rng.randrange(n)})", v.bound, exact=v.exact)
    elif kind == "unsqueeze" and v.ndim < 5:
        m.add(f"{v.name}.unsqueeze({d})", v.bound, **keeps)
    elif kind == "expand" and v.ndim < 5:
        m.add(
            f"{v.name}.unsqueeze({d}).expand({[*v.shape[:d], m.rng.choice([2, 3, 5]), *v.shape[d:]]})",
            v.bound,
            exact=v.exact,
        )
    else:
        raise Skip


def copy(m: Maker) -> None:
    """Copies of elements: concatenations, padding, repetition, triangles, diagonals."""
    v = m.pick(lambda v: v.ndim > 0 and 0 not in v.shape and v.dtype not in NARROW)
    d = m.rng.randrange(v.ndim)
    n = v.shape[d]
    keeps = {"exact": v.exact}
    kind = m.rng.choice(["cat", "cat", "stack", "repeat", "pad", "tril", "diagonal", "rotate", "contiguous"])
    if kind == "cat":
        w = m.input([m.rng.choice([1, 2, 5, n]) if k == d else e for k, e in enumerate(v.shape)], v.dtype)
        parts = [v.name, w.name] if m.rng.random() < 0.5 else [w.name, v.name]
        m.add(f"torch.cat([{', '.join(parts)}], {d})", max(v.bound, w.bound), **keeps)
    elif kind == "rotate" and n > 1 and v.floating:
        at = m.rng.randint(1, n - 1)
        whole, rest = f"{v.name}.narrow({d}, {at}, {n - at})", f"{v.name}.narrow({d}, 0, {at})"
        m.add(f"torch.cat([-{whole}, {rest}], {d})", v.bound, **keeps)
    elif kind == "stack" and v.ndim < 4:
        w = m.input(v.shape, v.dtype)
        m.add(f"torch.stack([{v.name}, {w.name}], {d})", max(v.bound, w.bound), **keeps)
    elif kind == "repeat":
        m.add(f"{v.name}.repeat({[m.rng.choice([1, 1, 2, 3]) for _ in v.shape]})", v.bound, **keeps)
    elif kind == "pad" and v.floating:
        before, after, fill = m.rng.choice([0, 1, 3]), m.rng.choice([0, 1, 2]), m.rng.choice([0.0, 0.5])
        m.add(f"F.pad({v.name}, ({before}, {after}), value={fill})", v.bound, **keeps)
    elif kind == "tril" and v.ndim > 1 and v.floating:
        m.add(f"{v.name}.{m.rng.choice(['tril', 'triu'])}({m.rng.choice([-1, 0, 2])})", v.bound, **keeps)
    elif kind == "diagonal" and v.ndim > 1:
        m.add(f"{v.name}.diagonal(0, 0, 1)", v.bound, **keeps)
    elif kind == "contiguous" and v.ndim > 1:
        m.add(f"{v.name}.transpose(0, -1).contiguous()", v.bound, **keeps)
    else:
        raise Skip


def gather(m: Maker) -> None:
    """Look-ups by integer tensors: embedding, rows, by two at once, one element a row, its inverse."""
    kind = m.rng.choice(["embedding", "index_select", "rows", "gather", "one_hot", "nll"])
    if kind == "embedding":
        table = m.input([m.rng.choice([3, 10, 100]), m.rng.choice([1, 7, 32, 64])], m.rng.choice(FLOATS), plain=True)
        ids = m.input([m.rng.choice([1, 3, 8, 17]) for _ in range(m.rng.randint(1, 2))], "int64", bound=table.shape[0])
        m.add(f"F.embedding({ids.name}, {table.name})", table.bound, exact=True)
        return
    v = m.pick(lambda v: v.floating and v.ndim > 0 and 0 not in v.shape)
    wide = [d for d in range(v.ndim) if v.shape[d] > 1]
    if kind == "rows" and len(wide) > 1 and m.rng.random() < 0.5:
        places = [":"] * v.ndim
        for d, shape in zip(sorted(m.rng.sample(wide, 2)), ([m.rng.choice([1, 2, 5]), 1], [3]), strict=True):
            places[d] = m.input(shape, "int64", bound=v.shape[d]).name
        m.add(f"{v.name}[{', '.join(places)}]", v.bound, exact=v.exact)
        return
    d = m.rng.randrange(v.ndim)
    if v.shape[d] == 1:
        raise Skip  # the only index is 0, which random inputs of workloads never contain
    if kind in ("index_select", "rows"):
        ids = m.input([m.rng.choice([1, 2, 5, 9])], m.rng.choice(["int64", "int64", "int32"]), bound=v.shape[d])
        text = (
            f"torch.index_select({v.name}, {d}, {ids.name})"
            if kind == "index_select"
            else f"{v.name}[{':, ' * d}{ids.name}]"
        )
        m.add(text, v.bound, exact=v.exact)
        return
    if kind == "gather":
        ids = m.input(
            [m.rng.choice([1, 1, 4]) if k == d else e for k, e in enumerate(v.shape)], "int64", bound=v.shape[d]
        )
        m.add(f"torch.gather({v.name}, {d}, {ids.name})", v.bound, exact=v.exact)
        return
    if v.ndim != 2 or v.shape[1] == 1:
        raise Skip
    ids = m.input([v.shape[0]], "int64", bound=v.shape[1])
    if kind == "one_hot":
        m.add(f"torch.zeros_like({v.name}).scatter(1, {ids.name}[:, None], 1.0)", 1)
    else:
        how = m.rng.choice(["mean", "sum", "none"])
        m.add(f'F.cross_entropy({m.scaled(v, 32)}.float(), {ids.name}, reduction="{how}")', 64 * v.shape[0])


def opaque(m: Maker) -> None:
    """Operators without a rule: regions form around them."""
    v = m.pick(lambda v: v.floating and v.ndim > 0 and 0 not in v.shape)
    d = m.rng.randrange(v.ndim)
    if m.rng.random() < 0.5:
        m.add(f"{v.name}.flip({d})", v.bound, exact=v.exact)
    else:
        m.add(f"{m.scaled(v, 8)}.cumsum({d})", 8 * math.sqrt(v.shape[d]))
