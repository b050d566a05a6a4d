"""A kernel's arguments: made by the user's factory, bound to their names, copied, and compared."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autotune.domains.kernel.kernel import Kernel, parameters_of
from autotune.errors import UserError, first_line
from autotune.measure.verify import compare
from autotune.task import Verdict


@dataclass
class Arguments:
    """What a kernel is called with, but for what is tuned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self, kernel: Kernel) -> dict[str, Any]:
        """By the kernel's names, as far as it has any."""
        parameters = parameters_of(kernel.fn)
        if parameters is None:
            return dict(self.kwargs)
        tuned = set(kernel.space.names)
        places = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name not in tuned]
        return {**dict(zip(places, self.args, strict=False)), **self.kwargs}

    def copied(self) -> Arguments:
        """The same with arrays of its own."""
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        return Arguments(args, kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, each once."""
        arrays = {id(a): a for a in leaves((self.args, self.kwargs)) if is_array(a)}
        return sum(a.numel() * a.element_size() if isinstance(a, torch.Tensor) else a.nbytes for a in arrays.values())


def make(kernel: Kernel, arguments: Mapping[str, Any], device: str, seed: int) -> Arguments:
    """A kernel's arguments, the same for the same ``seed`` in every process.

    Args:
        arguments: of the inputs factory; ``{"": n}`` for the n-th of listed ones.

    Raises:
        UserError: they cannot be made, or are not what the kernel takes.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if not callable(kernel.inputs):
        assert kernel.inputs is not None
        made = copy.deepcopy(kernel.inputs[int(arguments[""])])
        what = f"input {arguments[''] + 1}"
    else:
        given = {**_wanted(kernel.inputs, {"device": device, "seed": seed}), **arguments}
        what = f"inputs({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        try:
            made = kernel.inputs(**given)
        except Exception as error:
            raise UserError(f"{kernel.name}: {what} failed: {first_line(error)}") from error
    found = _as_arguments(made, f"{kernel.name}: {what}")
    moved = Arguments(_moved(found.args, device), _moved(found.kwargs, device))
    _check(kernel, moved, what)
    return moved


def _wanted(fn: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``known`` that a factory has parameters for."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in known.items() if name in parameters}


def _as_arguments(made: Any, where: str) -> Arguments:
    if isinstance(made, Mapping):
        return Arguments((), dict(made))
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return Arguments(tuple(made[0]), dict(made[1]))
    if isinstance(made, (tuple, list)):
        return Arguments(tuple(made), {})
    if made is None:
        raise UserError(f"{where} returned None: it has to return the kernel's arguments")
    return Arguments((made,), {})


def _moved(value: Any, device: str) -> Any:
    """Tensors on the device; for a CPU all is left as it is."""
    if device == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: _moved(v, device) for k, v in value.items()}
    return type(value)(_moved(v, device) for v in value) if type(value) in (tuple, list) else value


def _check(kernel: Kernel, found: Arguments, what: str) -> None:
    """Raise UserError where the kernel cannot be called with these."""
    tuned = set(kernel.space.names)
    if twice := tuned & found.kwargs.keys():
        raise UserError(f"{kernel.name}: {what} has {sorted(twice)[0]}, which is tuned: leave it out")
    parameters = parameters_of(kernel.fn)
    if parameters is None:
        return
    untuned = [p for p in parameters if p.name not in tuned]
    if kernel.positional is not None and len(found.args) > len([p for p in untuned if p.kind is not p.KEYWORD_ONLY]):
        raise UserError(f"{kernel.name}: {what} has {len(found.args)} arguments, more than the kernel takes")
    try:
        inspect.Signature(sorted(untuned, key=lambda p: p.kind), __validate_parameters__=False).bind(
            *found.args, **found.kwargs
        )
    except TypeError as error:
        raise UserError(f"{kernel.name}: {what} does not fit the kernel: {error}") from None


def is_array(value: Any) -> bool:
    """Whether it is a tensor or a NumPy array."""
    return isinstance(value, (torch.Tensor, np.ndarray))


def leaves(value: Any) -> Iterator[Any]:
    """What is inside tuples, lists and dicts, in order."""
    if isinstance(value, Mapping):
        for name in value:
            yield from leaves(value[name])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def poison(value: Any) -> None:
    """Fill an array that the kernel is to write: NaN for floats, the largest number for integers."""
    tensor = _tensor(value)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _tensor(value: Any) -> torch.Tensor:
    """A tensor that shares memory with an array; a number becomes one of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def same(got: Any, want: Any, extent: int, tolerance: float | None, what: str) -> Verdict:
    """Compare results leaf by leaf; the worst verdict.

    Args:
        extent: the longest sum that a result may depend on.
        tolerance: relative; None for one by type.
        what: of what they are, for messages.
    """
    ours, theirs = list(leaves(got)), list(leaves(want))
    if len(ours) != len(theirs):
        return Verdict(False, float("inf"), f"{what}: {len(ours)} values where {len(theirs)} are expected")
    worst = Verdict(True, 0.0)
    for nth, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        where = what if len(ours) == 1 else f"{what} {nth}"
        verdict = _same(a, b, extent, tolerance)
        if not verdict.ok:
            return Verdict(False, verdict.error, f"{where}: {verdict.detail}")
        worst = max(worst, verdict, key=lambda v: v.error)
    return worst


def _same(a: Any, b: Any, extent: int, tolerance: float | None) -> Verdict:
    if b is None or isinstance(b, str):
        equal = type(a) is type(b) and a == b
        return Verdict(equal, 0.0 if equal else float("inf"), "" if equal else f"{a!r} instead of {b!r}")
    try:
        got, want = _tensor(a), _tensor(b)
    except (TypeError, ValueError, RuntimeError):
        try:
            equal = bool(np.array_equal(np.asarray(a), np.asarray(b)))
        except (TypeError, ValueError, RuntimeError):  # a tensor on a GPU, beside what is no array
            equal = False
        return Verdict(equal, 0.0 if equal else float("inf"), "" if equal else f"a {type(a).__name__} that differs")
    if tuple(got.shape) != tuple(want.shape):
        return Verdict(False, float("inf"), f"shape {list(got.shape)} instead of {list(want.shape)}")
    if got.dtype.is_complex or want.dtype.is_complex:
        got, want = (torch.view_as_real(t.to(torch.complex128)) for t in (got, want))
    wide = want.to(torch.float64) if want.dtype.is_floating_point else want
    slack = None
    if tolerance is not None and want.dtype.is_floating_point:
        finite = torch.where(torch.isfinite(wide), wide.abs(), 0.0)
        typical = finite.square().mean().sqrt() if finite.numel() else finite.sum()
        slack = tolerance * (finite + typical)
    return compare(got, wide, got.dtype, extent, slack=slack)


def extent_of(values: Sequence[Any]) -> int:
    """The largest extent of any array among values; at least 1."""
    return max((int(n) for v in leaves(values) if is_array(v) for n in v.shape), default=1)
