"""The options of ``torch.compile`` that are autotune's.

"search" is the number of seconds that a program's searches may add to its start. "unsearched" decides about regions
without a search.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.runtime.deployment import deployment
from autotune.runtime.settings import checked

if TYPE_CHECKING:
    from torch import fx

OPTION, VARIABLE = "search", "AUTOTUNE_SEARCH"
_UNSEARCHED = "unsearched"

_MORE_S = 1.5
"""A graph is searched again with a budget that is larger by this factor."""

SHARE, _SHARE_OF_SEVERAL = 0.9, 0.5
"""Share of the remaining budget for one graph, and the least of one that others of the same function follow."""


@dataclass(eq=False)
class _Budget:
    """The budget of a :func:`tuning` that has not ended.

    Attributes:
        thread: that entered it.
        around: the budget around it, which gets the spent seconds at its end; None for that of the process.
    """

    seconds: float
    thread: int
    around: _Budget | None
    spent_s: float = 0.0


_lock = threading.RLock()
_tuning: list[_Budget] = []
_spent_s = 0.0
"""Seconds that all searches outside of :func:`tuning` have spent, and those in it from its end on."""
_functions = 0
"""Number of functions whose first graph Dynamo has compiled."""
_unfinished: dict[int, list[tuple[str, str, int]]] = {}
"""Functions that Dynamo has divided at a graph break, and whose last graph has not been compiled, by thread."""


@contextlib.contextmanager
def tuning(seconds: float) -> Iterator[None]:
    """Context manager that searches the graphs compiled inside it, for at most ``seconds``.

    ::

        model = torch.compile(model, backend="autotune")
        with autotune.tuning(seconds=120):
            step()

    Dynamo is reset at the entrance, so that the step is compiled again and searched. Each thread has its own innermost
    context. A thread without one, such as a worker that the step starts, takes the latest of the process.

    Args:
        seconds: budget of all searches in the context together.

    Raises:
        UserError: ``seconds`` is not a number above 0.
    """
    import torch

    thread = threading.get_ident()
    budget = _Budget(parse(seconds, "tuning(seconds)"), thread, _own(thread))
    torch._dynamo.reset()
    with _lock:
        _tuning.append(budget)
    try:
        yield
    finally:
        with _lock:
            _tuning.remove(budget)
            _spend(budget.around, budget.spent_s)


def _own(thread: int) -> _Budget | None:
    """The innermost budget that a thread has entered."""
    with _lock:
        return next((budget for budget in reversed(_tuning) if budget.thread == thread), None)


def _innermost() -> _Budget | None:
    """The budget of this thread's searches; None for that of the process."""
    with _lock:
        return _own(threading.get_ident()) or (_tuning[-1] if _tuning else None)


def _spend(budget: _Budget | None, seconds: float) -> None:
    """Count seconds as spent from a budget, or from the one around it that has not ended; the caller has the lock."""
    global _spent_s
    while budget is not None and budget not in _tuning:
        budget = budget.around
    if budget is None:
        _spent_s += seconds
    else:
        budget.spent_s += seconds


def parse(value: Any, name: str) -> float:
    """The seconds of a budget; raises UserError if ``value`` is not a finite number above 0."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise UserError(f"{name}: {value!r} must be a number of seconds above 0, such as 120")
    return seconds


def asked(options: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """The budget in seconds, 0 for none, and the options of ``torch.compile`` without it.

    The order of precedence is the innermost :func:`tuning`, the option "search", $AUTOTUNE_SEARCH.

    Args:
        options: ``mode`` and ``options`` as the user gave them to ``torch.compile``.

    Raises:
        UserError: the option is not a number of seconds. An invalid variable only logs one warning.
    """
    own = dict(options.get("options") or {})
    option = own.pop(OPTION, None)
    rest = {**options, "options": own} if option is not None else dict(options)
    if (innermost := _innermost()) is not None:
        return innermost.seconds, rest
    if option is not None:
        return 0.0 if option in (0, False) else parse(option, f"options[{OPTION!r}]"), rest
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "0"):
        return 0.0, rest
    try:
        return parse(text, VARIABLE), rest
    except UserError as error:
        deployment().warn_once(VARIABLE, f"autotune: {error}; no search")
        return 0.0, rest


def is_enough(before: float, seconds: float) -> bool:
    """True if a graph that was searched with a budget of ``before`` seconds is not searched again with ``seconds``."""
    return _MORE_S * before >= seconds


def left_s(seconds: float) -> float:
    """The rest of a budget of ``seconds``, which all searches of the context or of the process share."""
    innermost = _innermost()
    return seconds - (_spent_s if innermost is None else innermost.spent_s)


@contextlib.contextmanager
def spending() -> Iterator[None]:
    """Context manager that counts its time as spent."""
    budget, begin = _innermost(), time.monotonic()
    try:
        yield
    finally:
        with _lock:
            _spend(budget, time.monotonic() - begin)


def more_follow(gm: fx.GraphModule) -> bool:
    """True if further graphs of the same function follow a Dynamo graph. Call it once for each graph, in their order.

    At a graph break Dynamo ends a graph, and compiles the rest of the function as a function of its own. The first part
    calls it. A rest without operators is not compiled: then its function is finished when it is no longer running.
    """
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX

    reason, translator = getattr(gm, "compile_subgraph_reason", None), _translator()
    if translator is None:
        return False
    running = set(_running())
    global _functions
    with _lock:
        unfinished = [one for one in _unfinished.pop(threading.get_ident(), ()) if one in running]
        _functions += not unfinished
        if unfinished and translator.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX):
            unfinished.pop()
        if getattr(reason, "graph_break", False):
            unfinished.append(_identity(translator.f_code))
        if unfinished:
            _unfinished[threading.get_ident()] = unfinished
        return bool(unfinished)


def function_number() -> int:
    """The number of the function whose graph Dynamo compiles now; the graphs between its breaks have the same."""
    return _functions


def _translator() -> Any:
    """Dynamo's translator of the function that it compiles now; None if Dynamo did not call the backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return getattr(InstructionTranslator, "current_tx", lambda: None)()


def _identity(code: CodeType) -> tuple[str, str, int]:
    """The part of a function's code that Dynamo's code of it has too."""
    return code.co_filename, code.co_name, code.co_firstlineno


def _running() -> Iterator[tuple[str, str, int]]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield _identity(frame.f_code)
        frame = frame.f_back


def share_of(more: bool, inputs: Sequence[Any]) -> float:
    """The share of the remaining budget for a graph that Dynamo compiles now.

    A graph that others follow gets a half, or more if it takes most of the model's parameters: often a loss of a few
    operators follows a model of many layers.

    Args:
        more: result of :func:`more_follow`.
        inputs: of the graph.
    """
    return max(_SHARE_OF_SEVERAL, SHARE * _part(inputs)) if more else SHARE


def _part(inputs: Sequence[Any]) -> float:
    """The part of a module's parameters that a graph of its forward pass takes; 0 if there is no such module."""
    from torch import nn

    translator = _translator()
    module = None if translator is None else translator.f_locals.get("self")
    if not isinstance(module, nn.Module):
        return 0.0
    every = sum(weight.numel() for weight in module.parameters())
    return sum(x.numel() for x in inputs if isinstance(x, nn.Parameter)) / every if every else 0.0


def forget_breaks() -> None:
    """Count graph breaks from zero, since ``torch._dynamo.reset()`` has dropped the functions."""
    with _lock:
        _unfinished.clear()


def predicts(options: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """True if unsearched regions get predicted schedules, and the options without autotune's own.

    Args:
        options: ``mode`` and ``options`` as the user gave them to ``torch.compile``.

    Raises:
        UserError: invalid value of the option. An invalid variable only logs one warning.
    """
    own = dict(options.get("options") or {})
    if _UNSEARCHED in own:
        asked = checked(_UNSEARCHED, own.pop(_UNSEARCHED), f"options[{_UNSEARCHED!r}]")
        return asked == "default", {**options, "options": own}
    try:
        return deployment().settings.unsearched == "default", dict(options)
    except UserError as error:
        deployment().warn_once("settings", f"autotune: no schedule is predicted: {error}")
        return False, dict(options)
