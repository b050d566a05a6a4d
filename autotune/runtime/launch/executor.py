"""Running a region by its stored schedule: tensors in, tensors out, on the current stream.

An executor is built once for a region with known shapes. A call allocates the outputs and scratch, and launches. It
keeps no tensors between calls, so that it may run in several threads, on several streams, and under CUDA graph capture.
Scratch is allocated by torch's caching allocator on the stream that uses it, so freeing it early is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autotune.runtime.deployment import deployment
from autotune.runtime.launch.cuda import REFUSED, Launch, make_launch
from autotune.runtime.launch.prepared import Prepared, RegionTensors, TensorSpec, prepare
from autotune.runtime.launch.verify import Check, WrongResult, copies_of_overwritten
from autotune.store.records import Schedule

if TYPE_CHECKING:
    from autotune.compiler.planner.groups import Plan
    from autotune.ir.graph import Graph

_EMPTY = {
    "cpu": getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None),
    "cuda": getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None),
}
"""Inductor's allocation: the caching allocator without the dispatcher; for "cuda", on the current device."""


def load_executor(
    graph: Graph, schedule: Schedule, tensors: RegionTensors, device: torch.device, tuned: Graph | None = None
) -> Executor:
    """Make a stored schedule ready to run.

    Args:
        graph: the canonical graph of the region to run (not of the tuned one, if the rows differ).
        schedule: with a configuration and an artifact; see ``match.match``.
        device: of all tensors.
        tuned: the graph that the schedule was tuned for; None if it is ``graph``.

    Raises:
        BuildError, Unsupported, RuntimeError: the schedule cannot be loaded here; the region's own operators run.
    """
    return executor_of(prepare(graph, schedule, tensors, device.type), tensors, device, tuned)


def executor_of(made: Prepared, tensors: RegionTensors, device: torch.device, tuned: Graph | None = None) -> Executor:
    """As :func:`load_executor`, for prepared launches."""
    steps: list[tuple[Launch, tuple[int, ...]]] = []
    if made.launches:
        number = device.index if device.index is not None else torch.cuda.current_device()
        steps = [(make_launch(one.kernel, number, one.grid, one.extent0), one.pointers) for one in made.launches]
    elif device.type == "cpu" and not made.nothing:
        from autotune.compiler.planner.plan import make_plan

        assert made.plan is not None
        there = None if tuned is None else make_plan(tuned, "cpu", made.plan.text)
        steps = _cpu_steps(made.plan, made.config, len(tensors.slots), len(tensors.results), there)
    return Executor(steps, tensors, made.scratch, made.aligned, device)


def _cpu_steps(
    plan: Plan, config: Any, n_inputs: int, n_outputs: int, tuned: Plan | None
) -> list[tuple[Launch, tuple[int, ...]]]:
    from autotune.runtime.launch.cpu import make_launches

    start = {"input": 0, "output": n_inputs, "scratch": n_inputs + n_outputs}
    return [
        (launch, tuple(start[s] + n for k in groups for s, n in (*plan.groups[k].inputs, *plan.groups[k].outputs)))
        for groups, launch in make_launches(plan, config, tuned)
    ]


class Executor:
    """A region ready to run; see :func:`load_executor`. Calling it takes the region's inputs and returns its outputs.

    ``call`` does the same with less overhead: straight-line code for this region. It calls the general form in unusual
    cases (another current device, other strides, a misaligned address).

    Raises (when called):
        RuntimeError: the driver refused a launch, or memory ran out. Nothing was written outside the new outputs.
    """

    __slots__ = (
        "_alloc", "_call", "_device", "_empty", "_index", "_inputs", "_is_cuda", "_results", "_scratch", "_steps",
        "_stream", "_takes",
    )  # fmt: skip

    def __init__(
        self,
        steps: Sequence[tuple[Launch, tuple[int, ...]]],
        tensors: RegionTensors,
        scratch: Sequence[tuple[torch.dtype, int]],
        aligned: Sequence[int],
        device: torch.device,
    ) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._index = device.index or 0
        self._empty = _EMPTY.get(device.type)
        self._stream = torch._C._cuda_getCurrentRawStream if self._is_cuda else lambda index: 0
        inputs = tensors.inputs
        self._inputs = tuple((i, inputs[i].stride, a - 1) for i, a in zip(tensors.slots, aligned, strict=True))
        self._alloc = tuple((o.size, o.stride, o.dtype) for o in tensors.outputs)
        self._results = tuple(tensors.results)  # index of the k-th output of the graph among the region's
        self._scratch = tuple(((n,), (1,), dtype) for dtype, n in scratch)
        self._steps, self._takes = tuple(steps), len(inputs)
        self._call: Callable[..., tuple[torch.Tensor, ...]] | None = None

    @property
    def call(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The executor as straight-line code."""
        if self._call is None:
            self._call = self._straight() if self._steps else self.__call__
        return self._call

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._run(tensors)

    def run_into(self, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Run and write to ``outputs``, allocated like the executor's own: for verification with poisoned outputs."""
        self._run(tensors, tuple(outputs))

    def _straight(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Generate Python for a call without loops or tuples of unknown length: half the general form's host time."""
        names: dict[str, Any] = {"stream": self._stream, "index": self._index, "slow": self}
        takes = ", ".join(f"x{i}" for i in range(self._takes))
        unusual = []
        if self._is_cuda:
            names["device"] = torch._C._cuda_getDevice
            unusual.append(f"device() != {self._index}")
        for i, stride, _ in self._inputs:
            names[f"s{i}"] = stride
            unusual.append(f"x{i}.stride() != s{i}")
        unusual += self._misaligned()
        body = self._addresses()
        body += [f"if {' or '.join(dict.fromkeys(unusual))}: return slow({takes})"] if unusual else []
        body += self._allocations("y", self._alloc, names)
        body += self._allocations("z", self._scratch, names)
        body.append("on = stream(index)")
        body += self._launches(names)
        body.append(f"return ({''.join(f'y{k}, ' for k in range(len(self._alloc)))})")
        return generated(f"call({takes})", body, names)

    def writer(
        self, instead: Callable[[Exception], Callable[..., None]], check: Check | None = None
    ) -> Callable[..., None]:
        """A function of the region's inputs and its outputs, which it writes, and on a GPU of the raw stream.

        It is for callers whose tensors have the expected strides and are on the current device.

        Args:
            instead: takes the error of a launch, and returns a function that does the same work from then on.
            check: compares the results of the first call, or of every call. Unchecked calls cost no more than without
                it.
        """
        xs, ys = ([f"{c}{i}" for i in range(n)] for c, n in (("x", self._takes), ("y", len(self._alloc))))
        takes = ", ".join([*xs, *ys])

        def slow(*tensors: torch.Tensor) -> None:
            self._run(tensors[: self._takes], tensors[self._takes :])

        def give_up(error: Exception) -> Callable[..., None]:
            names["given_up"] = made = instead(error)
            return made

        names: dict[str, Any] = {
            "slow": slow, "give_up": give_up, "given_up": None, "no_memory": torch.OutOfMemoryError
        }  # fmt: skip
        if not self._steps:
            return generated(f"call({takes}{', on' if self._is_cuda else ''})", ["return"], names)
        misaligned = self._misaligned()
        work = self._addresses()
        work += [f"if {' or '.join(misaligned)}: return slow({takes})"] if misaligned else []
        work += [] if self._is_cuda else ["on = 0"]
        work += self._allocations("z", self._scratch, names)
        work += self._launches(names)
        body = ["try:", *(f"    {line}" for line in work)]
        body += ["except no_memory: raise", f"except Exception as error: give_up(error)({takes}); return True"]
        signature = f"call({takes}{', on' if self._is_cuda else ''})"
        if check is not None:
            names["given_up"] = self._checked(generated(signature, body, names), names, instead, check)
        return generated(signature, [f"if other := given_up: return other({takes})", *body], names)

    def _checked(
        self,
        made: Callable[..., bool | None],
        names: dict[str, Any],
        instead: Callable[[Exception], Callable[..., None]],
        check: Check,
    ) -> Callable[..., None]:
        """The function that a writer calls until its results are compared, possibly in several threads.

        Args:
            made: the writer without that call. It returns True if the launch failed and ``instead`` did the work.
        """

        def run(*tensors: torch.Tensor) -> None:
            inputs, outputs = tensors[: self._takes], tensors[self._takes :]
            expected = check.expected(inputs)
            inputs = inputs if expected is None else copies_of_overwritten(inputs, outputs)
            if made(*tensors, *([self._stream(self._index)] if self._is_cuda else [])) or expected is None:
                return
            if wrong := check.wrong(inputs, outputs, expected):
                names["given_up"] = instead(WrongResult(wrong))
                for out, want in zip(outputs, expected, strict=True):
                    out.copy_(want)
            elif not check.always and names["given_up"] is run:
                names["given_up"] = None

        return run

    def _addresses(self) -> list[str]:
        return [f"p{slot} = x{i}.data_ptr()" for slot, (i, _, _) in enumerate(self._inputs)]

    def _misaligned(self) -> list[str]:
        """Conditions for copying an input before vector loads read it."""
        masks: dict[int, list[str]] = {}
        for slot, (_, _, mask) in enumerate(self._inputs):
            if mask:
                masks.setdefault(mask, []).append(f"p{slot}")
        return [f"({' | '.join(pointers)}) & {mask}" for mask, pointers in masks.items()]

    def _allocations(self, name: str, layouts: Sequence[Any], names: dict[str, Any]) -> list[str]:
        if layouts:
            names["empty"] = self._empty or self._allocate
        lines = []
        for k, (size, stride, dtype) in enumerate(layouts):
            names |= {f"{name}n{k}": size, f"{name}t{k}": stride, f"{name}d{k}": dtype}
            lines.append(f"{name}{k} = empty({name}n{k}, {name}t{k}, {name}d{k})")
        return lines

    def _launches(self, names: dict[str, Any]) -> list[str]:
        """Code for every launch on the stream ``on``, with inputs at ``p*``, outputs at ``y*`` and scratch ``z*``."""
        pointers = [f"p{slot}" for slot in range(len(self._inputs))]
        outs = [f"y{k}.data_ptr()" for k in self._results]
        outs += [f"z{k}.data_ptr()" for k in range(len(self._scratch))]
        body = []
        if len(self._steps) > 1:
            body += [f"q{k} = {out}" for k, out in enumerate(outs)]
            outs = [f"q{k}" for k in range(len(outs))]
        pointers += outs
        for n, (launch, order) in enumerate(self._steps):
            taken = "".join(pointers[p] + ", " for p in order)
            direct = getattr(launch, "direct", None)
            if direct is None:
                names[f"launch{n}"] = launch
                body.append(f"launch{n}(on, ({taken}))")
                continue
            # Inlined, to save a Python call before the driver's.
            head = [f"h{n}_{i}" for i in range(len(direct.head))]
            names |= dict(zip(head, direct.head, strict=True))
            names |= {f"launch{n}": direct.call, f"general{n}": direct.general, "refused": REFUSED}
            tail = "".join(f"{int(value)}, " for value in direct.tail)
            body += [
                f"try: launch{n}({', '.join(head)}, ({taken}{tail}), on)",
                f"except refused: general{n}(on, ({taken}))",
            ]
        return body

    def _run(
        self, tensors: Sequence[torch.Tensor], into: tuple[torch.Tensor, ...] | None = None
    ) -> tuple[torch.Tensor, ...]:
        if self._is_cuda and torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                return self._run(tensors, into)
        pointers = []
        held: Any = None  # copies must live until the launches are enqueued
        for i, stride, mask in self._inputs:
            t = tensors[i]
            if t.stride() != stride and not _same_place(t, stride):
                t = _restride(t, stride)
                held = (held, t)
            if t.data_ptr() & mask:
                t = _realign(t)
                held = (held, t)
            pointers.append(t.data_ptr())
        empty = self._empty or self._allocate
        outputs = into if into is not None else tuple([empty(*spec) for spec in self._alloc])
        if not self._steps:
            return outputs
        scratch = [empty(*spec) for spec in self._scratch]
        pointers += [outputs[k].data_ptr() for k in self._results]
        pointers += [s.data_ptr() for s in scratch]
        stream = self._stream(self._index)
        for launch, order in self._steps:
            launch(stream, [pointers[p] for p in order])
        return outputs

    def _allocate(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=self._device)


def generated(signature: str, body: Sequence[str], names: dict[str, Any]) -> Callable[..., Any]:
    """A function from generated text, which contains only indices; everything else is passed as objects."""
    source = f"def {signature}:\n" + "".join(f"    {line}\n" for line in body)
    exec(compile(source, "<autotune executor>", "exec"), names)
    made: Callable[..., Any] = names["call"]
    return made


def _same_place(t: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """True if the strides only differ in dimensions where they are unused (extents below 2)."""
    return all(n < 2 or a == b for n, a, b in zip(t.shape, t.stride(), stride, strict=True))


def _restride(t: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if any(s == 0 and n > 1 for n, s in zip(t.shape, stride, strict=True)):
        raise RuntimeError(f"an input expected to be expanded came with strides {tuple(t.stride())}")
    deployment().count("restrided")
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


def _realign(t: torch.Tensor) -> torch.Tensor:
    """A copy of the memory that a tensor spans, at an address from the allocator (aligned to 64 bytes or more)."""
    deployment().count("misaligned")
    span = TensorSpec.of(t).span
    return t.as_strided((span,), (1,)).clone()
