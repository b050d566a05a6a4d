"""Targets and inputs from the command line.

A target is a built-in name, ``package.module:callable``, or a factory call with literals such as
``package.module:make("bert", layers=4)``, which returns the target.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotune import numerics
from autotune.compiler.capture.recording import CapturedGraph, capture_for_user
from autotune.compiler.capture.signature import signature
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions.find import regions_from
from autotune.domains.fusion.builtin import BUILTIN
from autotune.errors import UserError, first_line
from autotune.files import import_object
from autotune.runtime.deployment import deployment
from autotune.runtime.inductor.product_call import searched_products
from autotune.words import closest
from autotune.workload import Workload

Call = tuple[tuple[Any, ...], dict[str, Any]]


def resolve(
    target: str, inputs: str | None, device: str, matmul_precision: str | None = None
) -> tuple[Callable[..., Any], Call, str]:
    """The callable named by the user, its ``(args, kwargs)`` on ``device``, and a label.

    Global torch settings that the target's module makes at import remain in force in this process.

    Args:
        target: a name in :data:`BUILTIN`, or ``package.module:callable``; the current directory is importable. A class
            is instantiated without arguments; a module is moved to the device. A factory call with literal arguments
            returns the target: ``package.module:make()``, ``package.module:make("bert", layers=4)``.
        inputs: ``package.module:callable`` returning a tensor, a tuple or list of arguments, a dict of keyword
            arguments, or ``(args, kwargs)``; it is given ``device`` if it has a parameter of that name. It may also be
            a factory call. None for built-in targets.
        device: "cpu" or "cuda:N".
        matmul_precision: overrides the module's setting, as ``torch.set_float32_matmul_precision`` does.

    Raises:
        UserError: an argument is invalid; a one-line message.
    """
    found = _resolved(target, inputs, device)
    numerics.set_matmul(matmul_precision)
    return found


def _resolved(target: str, inputs: str | None, device: str) -> tuple[Callable[..., Any], Call, str]:
    _check_device(device)
    if ":" not in target:
        if target not in BUILTIN:
            hint = f", {near}" if (near := closest(target, BUILTIN)) else ""
            raise UserError(
                f"unknown workload {target!r}{hint}; `autotune workloads` lists the built-in ones, your own are named"
                " package.module:callable"
            )
        if inputs is not None:
            raise UserError(f"--inputs goes with package.module:callable; the workload {target!r} brings its own")
        builtin = BUILTIN[target]
        size = builtin.size(device)
        return builtin.make(size, device), (builtin.inputs(size, device), {}), target
    fn = load_callable(target, inputs)
    _refuse_meta(fn, (), target)
    if isinstance(fn, nn.Module):
        fn = fn.to(device)
    return fn, load_inputs(str(inputs), device), target


def load_callable(target: str, inputs: str | None) -> Callable[..., Any]:
    """Load or make the target, and instantiate it if it is a class; raises early if ``inputs`` is missing.

    Raises:
        UserError: as :func:`resolve`.
    """
    fn, call = _load(target, "target")
    if inputs is None:
        raise UserError(f"{target} needs --inputs package.module:callable, which returns its example inputs")
    if call is not None:
        fn = _made(fn, call, target)
    if inspect.isclass(fn):
        fn = _call(fn, f"{target} could not be instantiated without arguments")
    if not callable(fn):
        verb = "is" if call is None else "gave"
        raise UserError(f"{target} {verb} a {type(fn).__name__}, which cannot be called")
    return fn  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Captured:
    """The result of capturing a target.

    Attributes:
        workloads: distinct workloads in order of appearance, each with the number of its occurrences.
        signature: hash of everything that the capture depends on; None if it cannot be computed.
        known: True if the workloads are those of an earlier capture.
        gradients: see :func:`gradients_of`.
    """

    workloads: list[tuple[Workload, int]]
    signature: str | None = None
    known: bool = False
    gradients: tuple[bool, ...] = (False,)

    def to_json(self) -> dict[str, Any]:
        """The entry to store; ``known`` of :func:`captured` finds it later."""
        return {"signature": self.signature, "workloads": [[w.fingerprint, count] for w, count in self.workloads]}


def captured(
    target: str,
    inputs: str | None,
    device: str,
    *,
    train: bool = False,
    rows: int | None = None,
    known: Callable[[str], list[tuple[Workload, int]] | None] | None = None,
    matmul_precision: str | None = None,
) -> Captured:
    """The distinct workloads of a target in order of appearance, each with the number of its occurrences.

    A target that requires a gradient is captured with and without autograd, since its regions store different results.
    A workload that occurs in both captures has the larger of the two counts.

    Args:
        train: capture only with autograd, forward and backward, whatever requires a gradient; see :func:`training`.
        rows: see :func:`with_rows`; None leaves the inputs unchanged.
        known: maps a signature (:mod:`autotune.compiler.capture.signature`) to the workloads of an earlier capture,
            which replace a new one; returns None if there is none.
        matmul_precision: see :func:`resolve`.

    Raises:
        UserError: as :func:`resolve`, or the callable fails on its inputs.
    """
    fn, call, label = resolve(target, inputs, device, matmul_precision)
    args, kwargs = call if rows is None else with_rows(call, rows)
    gradients = gradients_of(fn, args, kwargs, train=train)
    signed = signature(fn, args, kwargs, train=train, device=device) if ":" in target else None
    if known and signed and (found := known(signed)):
        return Captured(found, signed, known=True, gradients=gradients)
    try:
        found = workloads_of(fn, args, kwargs, label, train=train)
    except UserError as error:
        raise UserError(f"{error}{_or_a_factory(fn, target)}") from error
    if len(found) == 1:
        found = [(named_after(target, workload), count) for workload, count in found]
    return Captured(found, signed, gradients=gradients)


def _or_a_factory(fn: Callable[..., Any], target: str) -> str:
    """Hint to append to an error if the function is probably a factory of the target."""
    if not inspect.isfunction(fn) or "(" in target or ":" not in target:
        return ""
    try:
        inspect.signature(fn).bind()
    except TypeError:
        return ""
    return f"; where it makes the model, write '{target}()'"


def named_after(target: str, workload: Workload) -> Workload:
    """Label the only workload of a built-in target with the target's name; other workloads are unchanged."""
    extents = workload.label.partition(" ")[2]
    return replace(workload, label=f"{target} {extents}") if target in BUILTIN else workload


def with_rows(call: Call, rows: int) -> Call:
    """Inputs with another number of rows.

    The number of rows is the first extent of the first tensor with two or more axes. Each tensor whose axis 0 has that
    extent is repeated or truncated to ``rows``; other values are unchanged.

    Raises:
        UserError: no input has two axes, or tensors with so many rows cannot be made.
    """
    tensors = [t for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor)]
    first = next((t for t in tensors if t.dim() > 1 and len(t)), None)
    if first is None:
        raise UserError("--rows needs an input of two axes or more, whose first axis counts the rows")
    own = len(first)

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) != own:
            return value
        wide = value.detach()[torch.arange(rows, device=value.device) % own]
        return wide.requires_grad_(value.requires_grad)

    try:
        made: Call = pytree.tree_map(leaf, call)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise UserError(f"--rows {rows}: cannot make inputs with this number of rows: {first_line(error)}") from None
    return made


def workloads_of(
    fn: Callable[..., Any],
    args: Iterable[Any],
    kwargs: dict[str, Any] | None = None,
    label: str = "the target",
    *,
    train: bool = False,
) -> list[tuple[Workload, int]]:
    """As :func:`captured`, for a callable and its inputs."""
    arguments = tuple(args)
    _refuse_meta(fn, (arguments, kwargs), label)
    counts: Counter[Workload] = Counter()
    for graphs in captures(fn, arguments, kwargs, label, train=train):
        met: Counter[Workload] = Counter()
        for graph in graphs:
            facts = GraphFacts(graph.module.graph)
            regions = regions_from(facts)
            met.update(r.workload for r in regions if r.workload is not None)
            products = searched_products(facts, regions)
            met.update(w for p in products for w in (p.workload, p.rest) if w is not None)
        counts |= met
    return list(counts.items())


def captures(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, label: str, *, train: bool
) -> list[tuple[CapturedGraph, ...]]:
    """The graphs of a target in each mode of :func:`gradients_of`.

    Raises:
        UserError: the callable fails on the inputs, or has nothing to train.
    """
    fuse = deployment().settings.attention == "fuse"
    with training(fn, args, kwargs, label, train=train) as (given, named):
        try:
            return [
                capture_for_user(fn, given, named, label=label, grad=grad, fuse_attention=fuse)
                for grad in gradients_of(fn, given, named, train=train)
            ]
        except SystemExit as error:
            raise UserError(f"{label} failed on the inputs: {first_line(error)}") from error


@contextlib.contextmanager
def training(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    label: str = "the target",
    *,
    train: bool = True,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any] | None]]:
    """Arguments for which ``fn`` has a backward pass while the context is active; unchanged without ``train``.

    If a parameter or input already requires grad, nothing changes. Else the module's floating-point parameters require
    grad within the context, or its floating-point inputs if it has no such parameters. The backward pass starts from
    gradients of all results, as in a larger model.

    Raises:
        UserError: no parameter or input could require grad.
    """
    if not train or _requires_grad(fn, args, kwargs):
        yield args, kwargs
        return
    owner = getattr(fn, "__self__", fn)
    parameters = [p for p in owner.parameters() if p.is_floating_point()] if isinstance(owner, nn.Module) else []
    if parameters:
        try:
            for p in parameters:
                p.requires_grad_(True)
            yield args, kwargs
        finally:
            for p in parameters:
                p.requires_grad_(False)
        return
    leaves = pytree.tree_leaves((args, kwargs or {}))
    if not any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in leaves):
        raise UserError(
            f"{label} cannot be trained: neither parameters nor inputs are floating point; leave out --train"
        )

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().requires_grad_(True)
        return value

    with torch.inference_mode(False):
        yield pytree.tree_map(leaf, (args, kwargs))


def gradients_of(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, train: bool
) -> tuple[bool, ...]:
    """Capture modes of a target: False for a call under ``torch.no_grad()``, True for training.

    A target that requires a gradient is captured in both modes, as it may be deployed in either. With ``train``, it is
    captured in training mode only.
    """
    if train:
        return (True,)
    return (False, True) if _requires_grad(fn, args, kwargs) else (False,)


def _requires_grad(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    leaves = pytree.tree_leaves((args, kwargs or {}))
    owner = getattr(fn, "__self__", fn)
    if isinstance(owner, nn.Module):
        leaves.extend(owner.parameters())
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in leaves)


def side_of(device: str) -> str:
    """ "cpu" or "cuda".

    Raises:
        UserError: another device.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r}; give cpu, cuda or cuda:N")
    return kind


def _check_device(device: str) -> None:
    if side_of(device) == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {device!r} does not exist: torch finds {torch.cuda.device_count()} CUDA devices; use --device cpu"
        )


def _load(spec: str, what: str) -> tuple[Any, Call | None]:
    """Import ``package.module:attribute``; returns the object, and the arguments if it is written as a call."""
    module_name, _, path = spec.partition(":")
    call = None
    if "(" in path:
        path, call = _parsed(path, spec, what)
    if not module_name or not path:
        raise UserError(f"{what} {spec!r} must be package.module:callable")
    return import_object(module_name, path, spec), call


def _parsed(text: str, spec: str, what: str) -> tuple[str, Call]:
    """Parse a call such as ``make("bert", layers=4)`` to its name and arguments, without evaluating code."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # ValueError: a null byte
        call = None
    if not isinstance(call, ast.Call) or not _is_name(call.func):
        form = 'package.module:make() or package.module:make("bert", layers=4)'
        raise UserError(f"{what} {spec!r} is not a call of one function: write {form}")
    given: list[Any] = []
    for node in [*call.args, *(k.value for k in call.keywords)]:
        try:
            given.append(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise UserError(
                f"{what} {spec!r}: {ast.unparse(node)} is not a literal: the arguments may be numbers, quoted"
                " strings, True, False, None, and lists, tuples and dicts of them"
            ) from None
    names = [k.arg for k in call.keywords]
    if None in names:
        raise UserError(f"{what} {spec!r}: name each argument instead of **")
    args = tuple(given[: len(call.args)])
    return ast.unparse(call.func), (args, dict(zip(map(str, names), given[len(args) :], strict=True)))


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_name(node.value))


def _made(factory: Any, call: Call, spec: str, **more: Any) -> Any:
    if not callable(factory):
        raise UserError(f"{spec}: a {type(factory).__name__} cannot be called: leave out the parentheses")
    args, kwargs = call
    return _call(factory, f"{spec} failed", *args, **{**more, **kwargs})


def load_inputs(spec: str, device: str) -> Call:
    """Load arguments from ``package.module:callable`` and move them to ``device``; see :func:`resolve`."""
    made, call = _load(spec, "--inputs")
    if call is not None or (callable(made) and not isinstance(made, torch.Tensor)):
        given = {"device": device} if _takes_device(made) else {}
        made = _made(made, call or ((), {}), f"--inputs {spec}", **given)
    args, kwargs = _as_call(made, spec)
    if not any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves((args, kwargs))):
        raise UserError(f"--inputs {spec} returned no tensors")
    _refuse_meta(None, (args, kwargs), f"--inputs {spec}")
    return pytree.tree_map(lambda t: _moved(t, device), (args, kwargs))  # type: ignore[no-any-return]


def _refuse_meta(fn: Any, given: Any, label: str) -> None:
    """
    Raises:
        UserError: a tensor of the arguments or of the module has no data.
    """
    leaves = pytree.tree_leaves(given)
    owner = getattr(fn, "__self__", fn)
    if isinstance(owner, nn.Module):
        leaves.extend((*owner.parameters(), *owner.buffers()))
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in leaves):
        raise UserError(f"{label}: tensors on the meta device have no data: create them on cpu or cuda")


def _as_call(made: Any, spec: str) -> Call:
    if isinstance(made, torch.Tensor):
        return (made,), {}
    if isinstance(made, dict):
        return (), dict(made)
    if isinstance(made, (tuple, list)):
        if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
            return tuple(made[0]), dict(made[1])
        return tuple(made), {}
    raise UserError(
        f"--inputs {spec} returned a {type(made).__name__}; return a tensor, a tuple or list of arguments, a dict of"
        " keyword arguments, or (args, kwargs)"
    )


def _moved(value: Any, device: str) -> Any:
    """Move a tensor to the device; it remains a leaf, and still requires grad if it did."""
    if not isinstance(value, torch.Tensor) or value.device == torch.device(device):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _takes_device(fn: Callable[..., Any]) -> bool:
    try:
        return "device" in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False


def _call(fn: Callable[..., Any], problem: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {first_line(error)}") from error
