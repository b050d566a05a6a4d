"""Targets, which print and compile kernels; here their Numba intrinsics, made of functions of any arity."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

Write = Callable[..., Any]


def make_intrinsic(
    intrinsic: Callable[..., Any], arity: int, typed: Callable[..., tuple[Any, Write]], name: str = "op"
) -> Any:
    """An intrinsic of ``arity`` arguments.

    Args:
        intrinsic: Numba's decorator, of ``numba.extending`` or ``numba.cuda.extending``.
        typed: answers for their Numba types a signature, and a function of (context, builder, signature, values) that
            writes the code; it answers None for nothing.
    """

    def op(typingctx: Any, *args: Any) -> Any:
        sig, write = typed(*args)

        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            result = write(context, builder, sig, values)
            return context.get_dummy_value() if result is None else result

        return sig, codegen

    # Numba matches arguments with parameters, and takes none that are starred.
    names = ["typingctx", *(f"x{k}" for k in range(arity))]
    op.__signature__ = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names])  # type: ignore[attr-defined]
    op.__name__ = op.__qualname__ = name
    return intrinsic(op)


def intrinsic_of(intrinsic: Callable[..., Any], result: Any, *operands: Any) -> Callable[[Write], Any]:
    """Makes an intrinsic of a function of (builder, values), whatever types it is called with.

    Args:
        result: its Numba type; ``operands`` are those of its arguments.
    """

    def make(write: Write) -> Any:
        def typed(*_: Any) -> tuple[Any, Write]:
            return result(*operands), lambda context, builder, sig, values: write(builder, *values)

        return make_intrinsic(intrinsic, len(operands), typed, write.__name__)

    return make
