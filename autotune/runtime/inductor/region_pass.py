"""The pass that puts stored kernels into Inductor's post-grad graphs: a region with a winner becomes one node.

:func:`replace_regions` computes the facts about a graph's nodes (:mod:`autotune.compiler.lower.facts`), then regions
and their workloads (:mod:`autotune.compiler.regions.find`). It looks up a match for each workload, and replaces a
matched region by a call.

Everything else is left to Inductor, which then fuses, allocates and generates code as for any other graph.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from autotune import numerics
from autotune.compiler.assemble import kernel_name, program_ops
from autotune.compiler.capture.hooks import takes_bias_apart
from autotune.compiler.capture.options import requirements
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions import aten
from autotune.compiler.regions.aten import symbols_of
from autotune.compiler.regions.epilogues import Product
from autotune.compiler.regions.find import Region, regions_from
from autotune.compiler.regions.symbols import concrete, is_symbolic, places_of, symbolic_program
from autotune.compiler.targets.cuda import PREFIX
from autotune.errors import Unsupported
from autotune.runtime.coverage import covered
from autotune.runtime.deployment import deployment
from autotune.runtime.inductor.index_check import add_check, indices_of, together
from autotune.runtime.inductor.product_call import ProductCall, is_faster, searched_products
from autotune.runtime.inductor.region_call import RegionCall, at_these, permitted
from autotune.runtime.inductor.region_cpp import prepared
from autotune.runtime.inductor.region_op import memory_of, readers, region_node
from autotune.runtime.inductor.saved import keep_strides
from autotune.runtime.inductor.verdict import Left, Surveyed, Trial, graph_fingerprint, note, ranks_agree, stored_left
from autotune.runtime.ladder import Level, Match
from autotune.runtime.launch.prepared import TensorSpec
from autotune.runtime.match import look_up
from autotune.store.records import Schedule
from autotune.workload import Workload

log = logging.getLogger("autotune")

DEVICES = ("cpu", "cuda")

LEFT = "the whole step was faster so"
_OPTION = "an option of Inductor's requires other results"
NO_FASTER = "the search found nothing faster"


def replace_regions(
    graph: fx.Graph,
    mode: str = "default",
    trial: Trial | None = None,
    verify: str = "",
    *,
    cpp: bool = False,
    bare: bool = False,
) -> None:
    """Replace the regions of a post-grad graph that have stored kernels. Never raises: errors are logged once.

    Args:
        graph: with fake tensors in ``meta["val"]``, changed in place.
        mode: applies the verdict of this mode, from :func:`autotune.runtime.inductor.verdict.base_mode`.
        trial: determines the regions left to Inductor, in place of a verdict.
        verify: replaces the setting, if not empty.
        cpp: Inductor generates C++, which launches the kernels without Python.
        bare: leave every region to Inductor, and only survey the graph.
    """
    gm = graph.owning_module
    assert gm is not None
    from torch._inductor.pattern_matcher import stable_topological_sort

    deployment().count("graphs")
    try:
        takes_bias_apart(graph)
        # Regions are found with concrete sizes: those of the first inputs, for a graph with symbolic sizes.
        numbers, origin = concrete(gm) if is_symbolic(graph) else (gm, {})
        facts = GraphFacts(numbers.graph)
        every = regions_from(facts)
        if not origin:  # Inductor pads no symbolic sizes
            keep_strides(facts, every)
        devices = [device for device in map(device_of, every) if device is not None]
        name = graph_fingerprint(numbers.graph, every, numerics.read(devices))
    except Exception as e:
        deployment().warn_once(
            f"regions {type(e).__name__}", f"autotune: a graph was not looked up: {type(e).__name__}: {e}"
        )
        log.debug("the graph that was not looked up: %s", graph, exc_info=True)
        return
    # Shipped schedules are not added to a step with a verdict or in a trial: it must stay as measured.
    left, decided, predicted = stored_left(name, devices, mode) if trial is None else Left(trial.left, True)
    deployment().count("left", len(every) - len(_without(every, left)))
    searched = _permitted(_without(every, left - predicted))
    products = [] if origin or cpp else searched_products(facts, searched)
    note(_surveyed(name, mode, searched, left - predicted, products))
    regions = _without(searched, left)
    if bare:
        return
    if trial is None and not ranks_agree(numbers.graph):
        return
    chosen = _chosen([p for p in products if p.family.fingerprint not in left], left, packaged=not decided)
    if chosen:
        replaced: dict[fx.Node, fx.Node] = {}
        for product, schedule in chosen:
            instead = ProductCall.of(product, schedule)
            if trial is not None:
                trial.met(name, instead.device, product.family, schedule)
            replaced |= _replace(graph, product, instead, {}, replaced)
        stable_topological_sort(graph)
        graph.eliminate_dead_code()
        facts = GraphFacts(graph)
        every = regions_from(facts)
        regions = _permitted(_without(every, left))
    matches = _matches(regions, packaged=not decided)
    # All calls are built before the graph is changed, since they are derived from it.
    how = {"verify": verify, "packaged": not decided}
    made_calls = [_call_of(region, found, origin, how, cpp) for region, found in zip(regions, matches, strict=True)]
    calls = [call for call, _ in made_calls]
    _report(regions, matches, calls)
    fates = {r: (False, LEFT if r.workload and r.workload.fingerprint in left else _OPTION) for r in every}
    fates |= {region: (call is not None, why) for region, (call, why) in zip(regions, made_calls, strict=True)}
    try:
        deployment().cover(covered(facts, fates))
    except Exception:
        log.debug("a graph has no coverage", exc_info=True)
    if trial is None and not cpp:
        calls = _counting(calls, regions, matches, {"graph": name, "mode": mode})
    if trial is not None:
        for region, found, call in zip(regions, matches, calls, strict=True):
            if region.workload is not None and call is not None and found.schedule is not None:
                trial.met(name, call.device, region.workload, found.schedule)
    _check_indices(graph, facts, regions, calls, origin)
    made: dict[fx.Node, fx.Node] = {}
    for region, call in zip(regions, calls, strict=True):
        if call is not None:
            made |= _replace(graph, region, call, origin, made)
    stable_topological_sort(graph)  # a reader of a result may precede the last of the region's nodes
    graph.eliminate_dead_code()


def _chosen(products: Sequence[Product], left: frozenset[str], *, packaged: bool) -> list[tuple[Product, Schedule]]:
    """The products for which a stored schedule is faster than the alternatives.

    Args:
        left: workloads that are left to Inductor.
    """

    @functools.cache  # the layers of a model have the same products
    def stored(workload: Workload | None, device: str) -> Schedule | None:
        return None if workload is None else look_up(workload, device, packaged=packaged).schedule

    products = [product for product in products if product.workload.fingerprint not in left]
    found = {product: stored(product.workload, product.device) for product in products}
    alone = {product.product: schedule for product, schedule in found.items() if product.region is None}
    chosen = list[tuple[Product, Schedule]]()
    taken = set[object]()
    for product, schedule in found.items():
        device, region = product.device, product.region
        if schedule is None:
            deployment().record_misses([(product.workload, "not tuned on this device")], device)
            continue
        others = [stored(region.workload, device), alone.get(product.product)] if region is not None else []
        wins = is_faster(schedule, others, stored(product.rest, device))
        if wins and product.product not in taken:
            chosen.append((product, schedule))
            taken.add(product.product)
            deployment().count("products")
    return chosen


def _counting(
    calls: Sequence[RegionCall | None], regions: Sequence[Region], matches: Sequence[Match], graph: Mapping[str, str]
) -> list[RegionCall | None]:
    """The calls; the first one also counts the steps of its graph."""
    made = list(calls)
    first = next((k for k, call in enumerate(calls) if call is not None), None)
    if first is not None:
        pairs = [pair for pair, call in zip(zip(regions, matches, strict=True), calls, strict=True) if call is not None]
        alone_us = round(sum(_alone_us(region, found) for region, found in pairs), 3)
        made[first] = replace(cast(RegionCall, calls[first]), counts={**graph, "alone_us": alone_us})
    return made


def _alone_us(region: Region, found: Match) -> float:
    """Time that a region's kernels save, from the comparison that chose them; scaled by the ratio of rows."""
    inductor = found.schedule.baselines.get("inductor") if found.schedule is not None else None
    if found.schedule is None or inductor is None or region.workload is None or found.tuned is None:
        return 0.0
    return (inductor - found.schedule.latency_us) * max(region.workload.extent, 1) / max(found.tuned.extent, 1)


def _without(regions: Sequence[Region], left: frozenset[str]) -> list[Region]:
    return [region for region in regions if region.workload is None or region.workload.fingerprint not in left]


def _surveyed(
    name: str, mode: str, regions: Sequence[Region], left: frozenset[str], products: Iterable[Product]
) -> Surveyed:
    found = [(device_of(region), region.workload) for region in regions]
    more = [(product.device, w) for product in products for w in (product.workload, product.rest) if w is not None]
    found += [(device, workload) for device, workload in more if workload.fingerprint not in left]
    known = [(device, workload) for device, workload in found if device is not None and workload is not None]
    return Surveyed(name, mode, tuple(known), left)


def device_of(region: Region) -> str | None:
    """The region's device, "cpu" or "cuda:N"; None for a device that autotune does not support."""
    value = next((v for v in (n.meta.get("val") for n in region.outputs) if isinstance(v, torch.Tensor)), None)
    if value is None or value.device.type not in DEVICES:
        return None
    return "cpu" if value.device.type == "cpu" else f"cuda:{value.device.index or 0}"


def _permitted(regions: Sequence[Region]) -> list[Region]:
    """The regions without an Inductor option that requires results that stored kernels do not compute."""
    kept = []
    for region in regions:
        device, required = device_of(region), tuple[str, ...]()
        if region.workload is not None and device is not None:
            required = requirements(device, str(region.workload.spec.get("precision", "")))
        if not required:
            kept.append(region)
            continue
        deployment().count("left_by_options")
        for requirement in required:
            deployment().warn_once(
                f"option {requirement}", f"autotune: regions are left to Inductor, since its option {requirement}"
            )
    return kept


def _matches(regions: Sequence[Region], *, packaged: bool) -> list[Match]:
    """The match of each region; equal regions, such as those of a model's layers, are looked up once."""
    known: dict[tuple[str, str], Match] = {}
    found = []
    for region in regions:
        device = device_of(region)
        if region.workload is None or device is None:
            found.append(Match(Level.NONE, reason=region.reason or "not on a supported device"))
            continue
        key = region.workload.fingerprint, device
        if key not in known:
            known[key] = look_up(region.workload, device, packaged=packaged)
        found.append(known[key])
    return found


def _report(regions: Sequence[Region], matches: Sequence[Match], calls: Sequence[RegionCall | None]) -> None:
    """Count the matches, and record the misses.

    A kernel's hit is counted when code that calls it is loaded. For a call with symbolic sizes, each size's match
    is counted.
    """
    missed: dict[str, list[Any]] = {}
    for region, found, call in zip(regions, matches, calls, strict=True):
        device = device_of(region)
        if found.schedule is not None and not found.level.own and region.workload is not None and device is not None:
            missed.setdefault(device, []).append((region.workload, found.reason))  # to be searched here
        if found.level is not Level.NONE:
            assert found.schedule is not None
            baseline = int(found.schedule.config is None)
            settled = bool(baseline) or (call is not None and not call.symbols)
            deployment().count("hits_other_rows", int(settled and found.level is Level.OTHER_ROWS))
            deployment().count("hits_packaged", int(settled and found.level is Level.PACKAGED))
            deployment().count("hits_predicted", int(settled and found.level is Level.HEURISTIC))
            deployment().count("baseline_wins", baseline)
            deployment().count("hits", baseline)
        elif region.workload is None or device is None:
            deployment().count("unsupported")
        else:
            deployment().count("misses")
            missed.setdefault(device, []).append((region.workload, found.reason))
        log.debug("%s: %s %s", region.workload.label if region.workload else "region", found.level, found.reason)
    for device, entries in missed.items():
        deployment().record_misses(entries, device)


def _call_of(
    region: Region, found: Match, origin: Mapping[fx.Node, fx.Node], how: Mapping[str, Any], cpp: bool
) -> tuple[RegionCall | None, str]:
    """The call that replaces a region, or None to leave it to Inductor; and the reason.

    Args:
        origin: maps nodes of the graph that the region was found in to nodes of Inductor's graph; empty if it is the
            same graph.
        how: further fields of the call.
        cpp: as of :func:`replace_regions`.
    """
    if region.workload is None or found.schedule is None:
        return None, found.reason
    if found.schedule.config is None:
        return None, NO_FASTER
    label = region.workload.label or region.workload.fingerprint[:12]
    try:
        call = replace(_with_numbers(region, label, found), **how)
        call = _with_symbols(call, region, origin) if origin else call
        if cpp:
            prepared(call)
            deployment().count("hits")  # no Python code is loaded that would count it
        return call, found.reason
    except Unsupported as e:
        why = str(e)
        deployment().count("unsupported")
        log.debug("%s is left to Inductor: %s", label, e)
        if cpp:
            deployment().warn_once(f"cpp {e}", f"autotune: {label} is left to Inductor in C++ code: {e}")
    except Exception as e:
        why = f"{type(e).__name__}: {e}"
        deployment().warn_once(f"replace {label}", f"autotune: {label} is left to Inductor: {why}")
        log.debug("the region that is not replaced", exc_info=True)
    return None, why


def _with_numbers(region: Region, label: str, found: Match) -> RegionCall:
    workload, schedule, device = region.workload, found.schedule, device_of(region)
    assert workload is not None
    assert schedule is not None
    assert device is not None
    assert found.tuned is not None
    deployment().keep_match(device, found)
    return RegionCall(
        label=label,
        spec=workload.spec,
        tuned=found.tuned.fingerprint,
        slots=region.binding.inputs,
        results=region.binding.outputs,
        inputs=tuple(TensorSpec.of(n.meta["val"]) for n in region.inputs),
        outputs=tuple(TensorSpec.of(n.meta["val"]) for n in region.outputs),
        device=device,
        source=aten.to_json(region.submodule),
        overwrites=permitted(schedule.artifact, region.binding.inputs, region.binding.outputs),
    )


def _check_indices(
    graph: fx.Graph,
    facts: GraphFacts,
    regions: Sequence[Region],
    calls: Sequence[RegionCall | None],
    origin: Mapping[fx.Node, fx.Node],
) -> None:
    """Insert assertions on the regions' indices before the first region that reads them, if Inductor's option is set.

    Args:
        calls: of :func:`_call_of`, None for a region that Inductor compiles.
        origin: as of :func:`_call_of`.
    """
    from torch._inductor import config

    if not config.assert_indirect_indexing:
        return
    reads = [
        (indices_of(facts, region, origin), call.label, origin.get(region.nodes[-1], region.nodes[-1]))
        for region, call in zip(regions, calls, strict=True)
        if call is not None
    ]
    for check in together(reads):
        add_check(graph, check)


def _replace(
    graph: fx.Graph,
    region: Region | Product,
    call: RegionCall | ProductCall,
    origin: Mapping[fx.Node, fx.Node],
    made: Mapping[fx.Node, fx.Node],
) -> dict[fx.Node, fx.Node]:
    """Replace a region by a call; returns a map from the region's results to their new nodes.

    Args:
        origin: as of :func:`_call_of`.
        made: such a map of the regions replaced before.
    """
    inputs, outputs = ([origin.get(n, n) for n in nodes] for nodes in (region.inputs, region.outputs))
    nodes = dict.fromkeys(origin.get(n, n) for n in region.nodes)
    last, given = max(nodes), [made.get(n, n) for n in inputs]
    name = kernel_name(program_ops(call.source)).removeprefix(PREFIX)
    early = _behind(nodes, last, given, outputs)
    with graph.inserting_before(last if early is None else early.next):
        node = region_node(graph, call.text(), name, given, outputs, call.overwrites)
        results = [graph.call_function(operator.getitem, (node, k)) for k in range(len(outputs))]
    for old, new in zip(outputs, results, strict=True):
        new.meta = {k: v for k, v in old.meta.items() if k != "tensor_meta"}
        old.replace_all_uses_with(new)
    node.meta |= {k: v for k, v in last.meta.items() if k in ("stack_trace", "original_aten", "from_node")}
    return dict(zip(outputs, results, strict=True))


def _behind(
    nodes: Container[fx.Node], last: fx.Node, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.Node | None:
    """The last of a region's inputs, if the call belongs right after it; None to put it before the region's last node.

    The early position is used if the call frees more memory than it allocates. CLIP's image tower ends with the norm of
    one token. Inductor places that norm close to its reader, after the text tower, and keeps all tokens until then.
    """
    computed = dict.fromkeys(base for base in map(memory_of, inputs) if base.op == "call_function")
    if not computed:
        return None
    begin = max(n for n in inputs if n.op == "call_function")
    freed = [_bytes(n) for n in computed if all(r in nodes or r <= begin for r in readers(n))]
    taken = [_bytes(n) for n in outputs]
    if not begin < last or not all(type(size) is int for size in (*freed, *taken)):
        return None
    return begin if sum(freed) > sum(taken) else None


def _bytes(node: fx.Node) -> Any:
    return node.meta["val"].numel() * node.meta["val"].itemsize


def _with_symbols(call: RegionCall, region: Region, origin: Mapping[fx.Node, fx.Node]) -> RegionCall:
    """A call with symbolic sizes, if the region has any.

    Raises:
        Unsupported: the symbols are not sizes of its tensors, or its kernels take the traced sizes only.
    """
    source = aten.to_json(symbolic_program(region, origin))
    symbols = symbols_of(source)
    if not symbols:
        return call
    places = places_of(symbols, [origin[n].meta["val"] for n in (*region.inputs, *region.outputs)])
    if places is None:
        raise Unsupported("sizes that are not those of its tensors")
    layouts = (*call.inputs, *call.outputs)
    general = replace(call, source=source, symbols=places, overwrites=())  # the kernel depends on the sizes
    sizes = {name: 2 * layouts[k].size[dim] + 16 for name, (k, dim) in places.items()}
    try:
        other = at_these(general, sizes, counted=False)
    except (RuntimeError, ValueError) as e:  # these sizes violate the program's relations among sizes
        raise Unsupported(f"its operators at other sizes: {e}") from e
    if not other.tuned:
        raise Unsupported("kernels for one size only")
    return general
