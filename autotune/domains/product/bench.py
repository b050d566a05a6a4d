"""Measure matrix products in the worker: inputs, verification against float64, and the baseline programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autotune.compiler.regions import aten
from autotune.compiler.regions.formulas import reference
from autotune.compiler.regions.programs import compile_cached, fake_mode
from autotune.measure.timer import capture, keep_running
from autotune.measure.verify import compare
from autotune.runtime.inductor.product_call import bound
from autotune.task import Artifact, Bench, Config, Runnable, Verdict
from autotune.workload import Workload

_ROWS = 2048
"""Rows compared at a time: a full float64 result may exceed the device's memory."""
_CALLS = 8
_GRAPH_US = 1200.0
"""Calls per CUDA graph, and the upper bound on the graph's duration in microseconds."""
_LEAD_S = 0.002
_REPLAYS = 2
"""A sample is the mean of ``_REPLAYS`` replays, after ``_LEAD_S`` seconds of the same calls. A comparison alternates
between contenders, and so keeps the device busy."""


class ProductBench(Bench):
    """See :class:`autotune.task.Bench`."""

    def __init__(self, workload: Workload, device: str) -> None:
        self.spec, self.source = workload.spec, workload.source
        self.device = torch.device(device)
        self.places = [int(place) for place in self.source["results"] if place >= 0]
        self.given = self.inputs(0)
        self._graphs: dict[int, tuple[Runnable, Callable[[], object], int]] = {}

    def inputs(self, seed: int) -> list[torch.Tensor]:
        """Random inputs of the product, followed by the additional inputs of the rest of its region.

        The second factor is scaled so that the products stay near 1. In fp32 the numbers are exact in TF32, so that
        only sums are rounded.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        made = []
        for k, spec in enumerate(_inputs(self.source)):
            shape, strides = [int(n) for n in spec["shape"]], [int(n) for n in spec["strides"]]
            base = torch.empty_strided(shape, strides, dtype=torch.float32, device=self.device)
            base.normal_(generator=generator)
            scale = int(self.spec["k"]) ** -0.5 if k == self.source["roles"][1] else 1.0
            kind = getattr(torch, spec["dtype"])
            made.append(base.mul_(scale).to(torch.bfloat16 if kind is torch.float32 else kind).to(kind))
        return made

    def outputs(self) -> list[torch.Tensor]:
        """Result matrices filled with NaN, so that unwritten elements are detected."""
        shape, dtype = (int(self.spec["m"]), int(self.spec["n"])), getattr(torch, self.spec["dtype"])
        return [torch.full(shape, float("nan"), dtype=dtype, device=self.device) for _ in self.places]

    def input_sets(self, count: int) -> list[list[torch.Tensor]]:
        """See :class:`autotune.task.Bench`; for a device whose policy rotates through copies of the inputs."""
        return [self.given, *([t.clone() for t in self.given] for _ in range(count - 1))]

    def load(self, config: Config, artifact: Artifact) -> Runnable:
        number = self.device.index or 0
        run = bound(self.spec, self.source, int(config["algorithm"]), number, len(self.source["inputs"]))
        return _Candidate(run, self)

    def figure(self) -> Callable[[Runnable], float] | None:
        """Microseconds per call in a run of back-to-back calls, as products follow each other in a training step.

        A GPU at its power cap lowers its clock, which changes the ranking of the algorithms. On one H200 an algorithm
        that was 3% faster in single calls with cold caches made a ViT's step 1.2% slower.
        """
        return self._sustained if self.device.type == "cuda" else None

    def _sustained(self, run: Runnable) -> float:
        if id(run) not in self._graphs:
            run()
            count = max(1, min(_CALLS, int(_GRAPH_US / _elapsed_us(run))))

            def calls() -> None:
                for _ in range(count):
                    run()

            if len(self._graphs) >= _CALLS:
                self._graphs.clear()
            self._graphs[id(run)] = run, capture(calls, self._pool), count
        _, replay, count = self._graphs[id(run)]
        keep_running(replay, _LEAD_S)
        return _elapsed_us(replay, _REPLAYS) / (_REPLAYS * count)

    @cached_property
    def _pool(self) -> Any:
        """The memory of all graphs, of which one runs at a time: results of large products take gigabytes."""
        return torch.cuda.graph_pool_handle()

    def verify(self, run: Runnable, seed: int) -> Verdict:
        """Compare the results with float64, on random inputs that contain one NaN."""
        assert isinstance(run, _Candidate)
        inputs, outputs = self.inputs(seed), self.outputs()
        a, b, bias, other = (None if place < 0 else inputs[place] for place in self.source["roles"])
        assert a is not None
        assert b is not None
        a[-1, 0] = float("nan")
        run.into(inputs, outputs)
        y, kept = (None if place < 0 else outputs[place] for place in self.source["results"])
        worst, whole = 0.0, b.double()
        for first in range(0, len(a), _ROWS):
            some = slice(first, first + _ROWS)
            x = a[some].double() @ whole
            wanted = reference(
                str(self.spec["epilogue"]), x, None if bias is None else bias.double(),
                None if other is None else other.reshape(len(a), -1)[some].double(),
            )  # fmt: skip
            for name, got, want in zip(("result", "kept input"), (y, kept), wanted, strict=True):
                if got is None or want is None:
                    continue
                verdict = compare(got[some], want, self.spec["dtype"], int(self.spec["k"]))
                if not verdict.ok:
                    return Verdict(False, verdict.error, f"{name}: {verdict.detail}")
                worst = max(worst, verdict.error)
        return Verdict(True, worst)

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        # For a product without a further epilogue, Inductor makes the same library call as eager mode.
        alone = self.spec["epilogue"] in ("", "bias")

        def inductor() -> Runnable:
            program = _program(self.source, self.device.type)
            return _Program(program.forward if alone else compile_cached(program, self.given), self)

        return {"inductor": inductor}

    @cached_property
    def compiled_rest(self) -> Callable[..., Any]:
        """The rest of the region, compiled by Inductor; its last input is the product's result."""
        given = _given_to_rest(self.source, self.given, self.outputs()[0])
        return compile_cached(_rest(self.source, self.device.type), given)


def compile_baselines(workload: Workload, device: str) -> None:
    """Compile a product and its region with Inductor, to fill the cache for the bench's own compilation.

    Raises:
        Exception: any exception of Inductor.
    """
    source, spec = workload.source, workload.spec
    if spec["epilogue"] in ("", "bias"):
        return
    with fake_mode():
        given = [
            torch.empty_strided(t["shape"], t["strides"], dtype=getattr(torch, t["dtype"]), device=device)
            for t in _inputs(source)
        ]
        result = torch.empty(spec["m"], spec["n"], dtype=getattr(torch, spec["dtype"]), device=device)
    compile_cached(_program(source, torch.device(device).type), given)
    if "rest" in source:
        compile_cached(_rest(source, torch.device(device).type), _given_to_rest(source, given, result))


def _inputs(source: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Shape, strides and type of the product's inputs, then of the additional inputs of the rest of its region."""
    rest = source.get("rest", {"program": {"inputs": [None]}, "shares": []})
    further = [t for t, k in zip(rest["program"]["inputs"][:-1], rest["shares"], strict=True) if k < 0]
    return [*source["inputs"], *further]


def _program(source: Mapping[str, Any], device: str) -> fx.GraphModule:
    """The product and the rest of its region, as a function of the tensors of :func:`_inputs`."""
    product = aten.from_json(source, device)
    if "rest" not in source:
        return product
    rest, graph = _rest(source, device), fx.Graph()
    given = [graph.placeholder(f"x{k}") for k in range(len(_inputs(source)))]
    (result,) = _inlined(graph, product, given[: len(source["inputs"])])
    results = _inlined(graph, rest, _given_to_rest(source, given, result))
    graph.output((*results, result) if source["rest"]["is_read"] else tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _rest(source: Mapping[str, Any], device: str) -> fx.GraphModule:
    """The rest of a region, as a function of the tensors of :func:`_given_to_rest`."""
    return aten.from_json(source["rest"]["program"], device)


def _given_to_rest(source: Mapping[str, Any], given: Sequence[Any], result: Any) -> list[Any]:
    """The inputs of the rest of a region, from the inputs of the whole and the product's ``result``."""
    more = iter(given[len(source["inputs"]) :])
    shared = [given[k] if k >= 0 else next(more) for k in source["rest"]["shares"]]
    shape = source["rest"]["program"]["inputs"][-1]["shape"]
    return [*shared, result.view(shape) if isinstance(result, torch.Tensor) else result]


def _elapsed_us(run: Callable[[], object], times: int = 1) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _inlined(graph: fx.Graph, module: fx.GraphModule, given: Sequence[fx.Node]) -> list[fx.Node]:
    """Append a module's graph to ``graph``; returns the nodes of its results."""
    found = graph.graph_copy(module.graph, dict(zip(module.graph.find_nodes(op="placeholder"), given, strict=True)))
    return list(found)  # type: ignore[arg-type]


class _Candidate:
    """A product computed by one algorithm; a call allocates the results, as deployment does.

    A call then runs the rest of the region, compiled by Inductor.
    """

    def __init__(self, run: Callable[..., None], bench: ProductBench) -> None:
        self.run, self.bench, self.own = run, bench, len(bench.source["inputs"])
        self.like = [(t.shape, t.dtype) for t in bench.outputs()]

    def into(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Run the product on ``inputs`` and write to ``outputs``."""
        on_gpu = self.bench.device.type == "cuda"
        stream = torch.cuda.current_stream(self.bench.device).cuda_stream if on_gpu else 0
        self.run(*inputs[: self.own], *outputs, stream)

    def __call__(self, given: Sequence[torch.Tensor] | None = None) -> object:
        bench, tensors = self.bench, given or self.bench.given
        outputs = [torch.empty(shape, dtype=dtype, device=bench.device) for shape, dtype in self.like]
        self.into(tensors, outputs)
        if "rest" not in bench.source:
            return outputs
        with torch.no_grad():
            return bench.compiled_rest(*_given_to_rest(bench.source, tensors, outputs[0]))


class _Program:
    def __init__(self, function: Callable[..., Any], bench: ProductBench) -> None:
        self.function, self.bench = function, bench

    def __call__(self, given: Sequence[torch.Tensor] | None = None) -> object:
        with torch.no_grad():
            return self.function(*(given or self.bench.given))
