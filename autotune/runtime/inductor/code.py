"""Code of a Dynamo graph in torch's caches, under a name that later processes find.

torch computes the keys of its caches before a graph has regions. So the key of a compilation without a search depends
on the whole database. A compilation for a search has a random name in its key instead. A file in Inductor's cache
folder has the name, what the code's look-ups depend on, the regions of the graph, and the kernels. Later processes
compile under that name, while these look-ups have the same results. They read no kernel from the database and plan
none, and they may search the regions without compiling them first. A process that finds other results compiles under a
new name. The file is as trusted as torch's caches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import operator
import os
import pickle
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autotune.device import identify
from autotune.errors import UserError
from autotune.files import whole_file
from autotune.ir.nodes import asked
from autotune.runtime.deployment import deployment
from autotune.runtime.inductor.region_call import WRITTEN
from autotune.runtime.inductor.verdict import Surveyed
from autotune.runtime.ladder import Level, Match
from autotune.store.opening import sqlite_file
from autotune.store.reading import Scope, state_of_file
from autotune.workload import PRODUCT, Workload

if TYPE_CHECKING:
    from autotune.runtime.launch.prepared import Prepared

log = logging.getLogger("autotune")


def device_of(inputs: Sequence[Any]) -> str | None:
    """The device of a graph's inputs: a GPU if any input is on one, since CPU scalars may be among the inputs."""
    found = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    gpus = sorted(device.index or 0 for device in found if device.type == "cuda")
    if gpus:
        return f"cuda:{gpus[0]}"
    return "cpu" if any(device.type == "cpu" for device in found) else None


def name_of(gm: fx.GraphModule, device: str) -> str:
    """Return the SHA-256 of a Dynamo graph: its calls, the layouts of its inputs, and the kind of device.

    The graph lacks the modes around its call: a validation under ``torch.no_grad()`` has the graph of the training. The
    settings on which its regions depend are in the name too.

    Args:
        device: "cpu" or "cuda:N"; its index does not matter.
    """
    text = _UNNAMED.sub(lambda found: found[1] or "", "\n".join(_lines(gm)))
    return hashlib.sha256(f"{text}{_modes(device)}{identify(device).fingerprint}".encode()).hexdigest()


def _modes(device: str) -> str:
    """The modes around a call, and the settings, on which the traced operators and the regions depend."""
    kind = torch.device(device).type
    casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    try:
        settings = f"{deployment().settings.attention} {deployment().settings.products} {asked()}"
    except UserError:  # an invalid variable, which the look-up reports
        settings = ""
    return f"{torch.is_grad_enabled()} {casts} {settings}"


_UNNAMED = re.compile(r"(cuda):\d+| at 0x[0-9a-f]+")
"""The parts of a graph's text that differ between processes: indices of devices, and addresses."""


def _lines(gm: fx.GraphModule) -> Iterator[str]:
    """A line for each node of a graph and of the graphs that it calls.

    It is faster than the graph's Python code, and does not change the graph's key in torch's caches, as
    ``gm.code`` would.
    """
    targets: dict[Any, str] = {}
    for node in gm.graph.nodes:
        target = targets.get(node.target)
        if target is None:
            target = targets[node.target] = node._pretty_print_target(node.target)
        yield f"{node.name} {node.op} {target} {node.args} {node.kwargs}"
        if node.op == "placeholder":
            yield _layout(node.meta.get("example_value"))
        elif node.op in ("get_attr", "call_module"):
            called = operator.attrgetter(target)(gm)
            if isinstance(called, fx.GraphModule):
                yield from _lines(called)


def _layout(value: Any) -> str:
    """The part of an input that its regions depend on: channels last are other regions, and so are shards."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    strides = value.stride() if value.layout is torch.strided else value.layout
    return f"{value.dtype}{tuple(value.shape)}{strides}{value.requires_grad}{getattr(value, 'placements', '')}"


def new_name() -> str:
    """A name that no code has."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Code:
    """Code in torch's caches.

    Attributes:
        name: a part of the caches' keys.
        state: of the database in ``scope``, when the code was compiled or chosen.
        scope: what the code's look-ups depend on; None for the whole database.
        graphs: the post-grad graphs.
        compile_s: seconds that Inductor took without caches.
        budget_s: seconds of the search that chose it; 0 if it was not searched.
        matches: the schedules of its kernels, with the devices.
        launches: the prepared launches, as in :attr:`autotune.runtime.deployment.Deployment.prepared`.
    """

    name: str
    state: str
    scope: Scope | None
    graphs: tuple[Surveyed, ...]
    compile_s: float
    budget_s: float
    matches: tuple[tuple[str, Match], ...] = ()
    launches: Mapping[Any, Prepared] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, graphs: Sequence[Surveyed], scope: Scope | None, *, compile_s: float, budget_s: float
    ) -> Code:
        """The code of a Dynamo graph with these post-grad graphs, valid for the database's present state.

        It has the kernels that this process has loaded for the graphs.
        """
        own = deployment()
        every = {w.fingerprint: w for graph in graphs for _, w in _known(graph)}
        names = {name for w in every.values() for name in (w.fingerprint, w.family) if name}
        # A pickle has an object once; equal regions have equal workloads.
        whole = tuple(replace(g, regions=tuple((d, every[w.fingerprint]) for d, w in _known(g))) for g in graphs)
        matches = [(device, m) for (_, device), m in own.kept_matches().items() if _is_of(m, names)]
        tuned = {m.tuned.fingerprint for _, m in matches if m.tuned is not None}
        launches = {key: replace(made, plan=None) for key, made in own.prepared.items() if key[0] in tuned}
        return cls(name, _state(scope), scope, whole, compile_s, budget_s, tuple(matches), launches)

    def write(self, graph: str, mode: str) -> None:
        """Store it as the code of a Dynamo graph; arguments as of :func:`stored_code`."""
        path = _path(graph, mode)
        if path in _forgotten:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            pickle.dump(self, file)

    def load(self) -> None:
        """Use its kernels for the code that this process is about to load."""
        for device, found in self.matches:
            deployment().keep_match(device, found)
        deployment().prepared.update(self.launches)


def earlier(gm: fx.GraphModule, inputs: Sequence[Any], mode: str) -> Code | None:
    """The code of a graph from an earlier process that searched, if it is still valid.

    Args:
        mode: as of :func:`stored_code`.
    """
    device = device_of(inputs) if _folder().is_dir() else None
    return None if device is None else stored_code(name_of(gm, device), mode)


def path_of(gm: fx.GraphModule, inputs: Sequence[Any], mode: str) -> Path | None:
    """The file of a graph's code; None without a device. Arguments as of :func:`earlier`."""
    device = device_of(inputs)
    return None if device is None else _path(name_of(gm, device), mode)


_forgotten: set[Path] = set()
"""Files of code that this process must not store."""


def forget(path: Path | None) -> None:
    """Replace stored code by an empty file, in this process for good. Never raises."""
    if path is not None:
        _forgotten.add(path)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")


def is_forgotten(graph: str, mode: str) -> bool:
    """True if a process has used :func:`forget`; arguments as of :func:`stored_code`."""
    try:
        return _path(graph, mode).stat().st_size == 0
    except OSError:
        return False


def stored_code(graph: str, mode: str) -> Code | None:
    """The code of a Dynamo graph that is still valid; None without one. Never raises.

    Args:
        graph: of :func:`name_of`.
        mode: of :func:`autotune.runtime.inductor.verdict.base_mode`.
    """
    try:
        if not (written := _path(graph, mode).read_bytes()):
            return None
        code: Code = pickle.loads(written)
        return code if code.state and _state(code.scope) == code.state else None
    except FileNotFoundError:
        return None
    except Exception:
        log.debug("code in caches that is not used", exc_info=True)
        return None


def _state(scope: Scope | None) -> str:
    """A digest of a part of the database. An SQLite file is read without SQLAlchemy, whose import takes longer."""
    if deployment().is_loaded:
        return ""
    file = sqlite_file()
    if file is not None and scope is not None:
        return state_of_file(file, scope)
    store = deployment().store()
    return "" if store is None else store.state(scope)


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "autotune"


def _path(graph: str, mode: str) -> Path:
    where = [os.environ.get(name, "") for name in ("AUTOTUNE_DB", "AUTOTUNE_DB_READ")]
    key = json.dumps([graph, mode, str(sqlite_file() or where), WRITTEN.decode()])
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.pickle"


def _known(graph: Surveyed) -> list[tuple[str, Workload]]:
    return [(device, workload) for device, workload in graph.regions if workload is not None]


def _is_of(found: Match, names: set[str]) -> bool:
    return found.tuned is not None and not names.isdisjoint((found.tuned.fingerprint, found.tuned.family))


def scope_of(graphs: Sequence[Surveyed]) -> Scope | None:
    """The scope of the look-ups of graphs: for a missed workload, all schedules of its family."""
    from autotune.runtime.match import look_up

    found = {(device, w.fingerprint): w for graph in graphs for device, w in _known(graph)}
    if any(w.kind == PRODUCT for w in found.values()):
        return None  # the regions around a product are not known before it is replaced
    exact = {key for key, w in found.items() if look_up(w, key[0], packaged=False).level is Level.EXACT}
    names = {w.fingerprint for w in found.values()} | {w.family for key, w in found.items() if key not in exact}
    return Scope(tuple(sorted(names - {""})), tuple(sorted({graph.fingerprint for graph in graphs})))
