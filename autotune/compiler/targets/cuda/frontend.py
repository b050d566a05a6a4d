"""Numba's frontend without repeated work: a call's types are resolved once in a process, and lowering is linear.

NVVM and ptxas take 6% of a build. Type inference and lowering take most of the rest, and two thirds of their work is
the same each time:

- Type inference resolves each call in each of its passes, and lowering resolves it again. Kernels of one search have
  23 000 calls in 16 builds, of 565 kinds.
- Lowering finds the variables with one assignment. For each of them it walks all statements of their block.

Both are replaced while autotune's own kernels are compiled, and for no other code. The PTX is the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

_MOST = 1 << 16
"""Remembered resolutions, after which all are forgotten."""
_FIND = "_find_singly_assigned_variable"
_KNOWN = "c3b499f7"
"""Digest of the source of numba-cuda's function of that name, which is replaced. Another version keeps its own."""


class _Active(threading.local):
    """True in a thread that compiles a kernel of autotune."""

    now = False


_active = _Active()
_resolved: dict[Any, tuple[Any, Exception | None, Any]] = {}


@contextlib.contextmanager
def without_repeated_work() -> Iterator[None]:
    """Replace both in this thread."""
    _install()
    before, _active.now = _active.now, True
    try:
        yield
    finally:
        _active.now = before


@functools.cache
def _install() -> None:
    """Put functions in place of Numba's that call these in threads that do not compile a kernel of autotune."""
    from numba.core.types import NumberClass
    from numba.core.types.functions import BaseFunction
    from numba.cuda.lowering import Lower
    from numba.cuda.typing.context import BaseContext

    call_type: Any = BaseFunction.get_call_type
    function_type: Any = BaseContext.resolve_function_type
    own: Any = getattr(Lower, _FIND, None)

    @functools.wraps(call_type)
    def get_call_type(function: Any, context: Any, args: Any, kws: Any) -> Any:
        known = _active.now and hasattr(function, "_impl_keys")
        return (_resolve if known else _asked)(call_type, function, context, args, kws)

    @functools.wraps(function_type)
    def resolve_function_type(context: Any, function: Any, args: Any, kws: Any) -> Any:
        # A cast such as int32(x) is a new function in each call.
        known = _active.now and isinstance(function, NumberClass)
        return (_resolve if known else _asked)(function_type, context, function, args, kws)

    @functools.wraps(own or call_type)
    def find(lower: Any) -> None:
        (_find_single if _active.now else own)(lower)

    for owner, function in ((BaseFunction, get_call_type), (BaseContext, resolve_function_type)):
        setattr(owner, function.__name__, function)
    if own is not None and digest_of(own) == _KNOWN:
        setattr(Lower, _FIND, find)


def digest_of(function: Callable[..., Any]) -> str:
    """The digest of a function's source; "" if it has none."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:8]
    except (OSError, TypeError):
        return ""


def _asked(real: Callable[..., Any], first: Any, second: Any, args: Any, kws: Any) -> Any:
    return real(first, second, args, kws)


def _resolve(real: Callable[..., Any], first: Any, second: Any, args: Any, kws: Any) -> Any:
    """The signature of a call: of a function in a context, or of a context for a cast.

    A function also notes the key of its implementation.
    """
    from numba.core.errors import TypingError

    try:
        key = (first, second, tuple(args), tuple(kws.items()))
        found = _resolved.get(key)
    except TypeError:  # an omitted argument whose value has no hash
        return _asked(real, first, second, args, kws)
    if found is None:
        try:
            found = _asked(real, first, second, args, kws), None, first
        except TypingError as problem:
            found = None, problem, first
        if len(_resolved) >= _MOST:
            _resolved.clear()
        _resolved[key] = found
    signature, error, resolved = found
    if error is not None:
        raise error.with_traceback(None)
    if resolved is not first and signature is not None:  # an equal function
        first._impl_keys.setdefault(signature.args, resolved._impl_keys[signature.args])
    return signature


def _find_single(lower: Any) -> None:
    """``Lower._find_singly_assigned_variable`` in one walk over the statements of each block."""
    from numba.cuda import lowering

    ir, blocks, single = lowering.ir, lower.func_ir.blocks, set[str]()
    if not lower.func_ir.func_id.is_generator:
        found, kept = lowering.compute_use_defs(blocks), lowering.must_use_alloca(blocks)
        homes = Counter(name for names in found.defmap.values() for name in names)
        used = set().union(*found.usemap.values())
        for block, names in found.defmap.items():
            assigned = Counter(s.target.name for s in blocks[block].find_insts(ir.assign_types))
            single |= {n for n in names if n not in kept and n not in used and homes[n] == assigned[n] == 1}
    lower._singly_assigned_vars = single
    lower._blk_local_varmap = {}
