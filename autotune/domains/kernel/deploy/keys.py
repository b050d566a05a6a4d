"""What a call's configuration is looked up by: its key.

Two forms of one thing: a tuple of whatever the arguments hold, made in a microsecond or two in every call, and a JSON
object, made once for each tuple, which names the same in every process and is what a database keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.errors import UserError, first_line
from autotune.space import is_number

Key = Mapping[str, Any]
Raw = tuple[Any, ...]

_SCALARS = frozenset((int, str, type(None)))
_TYPED = frozenset((float, bool))  # equal to an int of another meaning, so that their types count


class KeyReader:
    """Reads a call's key.

    Args:
        signature: the kernel's parameters but for what is tuned: name and default, in order; those that are given by
            name alone come last. None where the kernel tells no signature.
        key: names of parameters; a callable of the kernel's own arguments; None for all that is not tuned.
        where: how messages begin.

    Raises:
        UserError: a name that is none of the kernel's parameters.
    """

    def __init__(
        self,
        signature: Mapping[str, Any] | None,
        key: Sequence[str] | Callable[..., Any] | None,
        where: str,
        tuned: Sequence[str] = (),
    ) -> None:
        self._where, self._made = where, key if callable(key) else None
        names = list(signature or ())
        wanted = names if key is None else [] if callable(key) else list(key)
        if signature is None and not callable(key):
            raise UserError(f"{where}: the kernel tells no signature: give key= as a callable of its arguments")
        for name in wanted:
            if name in tuned:
                raise UserError(f"{where}: {name} is tuned, and so cannot be in the key")
            if name not in names:
                raise UserError(
                    f"{where}: the key names {name!r}, which is no parameter of the kernel ({', '.join(names)})"
                )
        if len(set(wanted)) < len(wanted):
            raise UserError(f"{where}: the key names {next(n for n in wanted if wanted.count(n) > 1)!r} twice")
        self.names = None if callable(key) else tuple(wanted)
        self._places = tuple(
            (i, name, default, name in wanted) for i, (name, default) in enumerate((signature or {}).items())
        )

    def raw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Raw:
        """What tells a call from others, in this process; its parts are hashable."""
        if self._made is not None:
            return (_hashable(self._made(*args, **kwargs)),)
        out: list[Any] = []
        count = len(args)
        for i, name, default, wanted in self._places:
            value = args[i] if i < count else kwargs.get(name, default)
            kind = value.__class__
            if kind in _SCALARS:
                if wanted:
                    out.append(value)
            elif kind in _TYPED:
                if wanted:
                    out += (kind, value)
            elif (dtype := getattr(value, "dtype", None)) is not None:
                out.append(dtype)
                if wanted:
                    out.append(value.shape)
                if getattr(value, "is_cuda", False):
                    out.append(value.device)
            elif wanted:
                out.append(_hashable(value))
        return tuple(out)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The key as a JSON object.

        Raises:
            UserError: it holds what is neither a number, a text, nor a list of these.
        """
        if self._made is not None:
            try:
                made = self._made(*args, **kwargs)
            except Exception as error:
                raise UserError(f"{self._where}: key= failed: {first_line(error)}") from error
            items = (
                made.items()
                if isinstance(made, Mapping)
                else enumerate(made)
                if isinstance(made, (tuple, list))
                else [(0, made)]
            )
            return {str(name): self._json(value, str(name)) for name, value in items}
        found: dict[str, Any] = {}
        for i, name, default, wanted in self._places:
            value = args[i] if i < len(args) else kwargs.get(name, default)
            if getattr(value, "dtype", None) is not None:
                found[f"{name}.dtype"] = _dtype(value.dtype)
                if wanted:
                    found[name] = [int(n) for n in value.shape]
            elif wanted:
                found[name] = self._json(value, name)
        return found

    def _json(self, value: Any, name: str) -> Any:
        if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, (tuple, list)):
            return [self._json(v, name) for v in value]
        if type(value).__name__ == "dtype" or "dtype" in type(value).__name__.lower():
            return _dtype(value)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            return self._json(value.item(), name)
        raise UserError(
            f"{self._where}: the key's {name} is a {type(value).__name__}; a key holds numbers, texts, types and lists"
            " of them: leave it out of key=, or give key= as a callable"
        )


def device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Where a call runs: the device of its first CUDA tensor, else "cpu"."""
    for value in (*args, *kwargs.values()):
        if getattr(value, "is_cuda", False):
            return str(value.device)
    return "cpu"


def _dtype(value: Any) -> str:
    return str(getattr(value, "name", None) or value).removeprefix("torch.")


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _hashable(v)) for name, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (value.__class__, value) if value.__class__ in _TYPED else value


def log_distance(a: Key, b: Key) -> float:
    """How far two keys are: the largest ``|log2|`` of the ratio of two numbers, 1 being a factor of two.

    Infinite where anything but numbers above 0 differs.
    """
    if a.keys() != b.keys():
        return math.inf
    return max((_log_distance(a[name], b[name]) for name in a), default=0.0)


def _log_distance(x: Any, y: Any) -> float:
    if isinstance(x, list) and isinstance(y, list):
        return max(map(_log_distance, x, y), default=0.0) if len(x) == len(y) else math.inf
    if x == y and type(x) is type(y):
        return 0.0
    numbers = all(is_number(v) and v > 0 for v in (x, y))
    return abs(math.log2(x) - math.log2(y)) if numbers else math.inf


def extent_of(key: Key) -> int:
    """The product of a key's sizes, at most 2**62: a search begins with what was best for keys of nearly its size."""
    sizes = [n for value in key.values() for n in (value if isinstance(value, list) else [value])]
    numbers = [n for n in sizes if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    return min(math.prod(numbers), 1 << 62)


def words(key: Key) -> str:
    """A key for people: ``M=512 N=512 x=4096x1024 float32``."""
    out = []
    types = {name.removesuffix(".dtype"): value for name, value in key.items() if name.endswith(".dtype")}
    for name, value in key.items():
        if name.endswith(".dtype"):
            continue
        text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
        out.append(f"{name}={text}")
    out += dict.fromkeys(map(str, types.values()))
    return " ".join(out)
