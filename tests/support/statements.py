"""SQL of statements, made once a process for all databases of a kind: SQLAlchemy makes it again for each engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.engine import Dialect
from sqlalchemy.util import LRUCache


def shared(init: Callable[..., None]) -> Callable[..., None]:
    """``sqlalchemy.Engine.__init__`` of engines that look where earlier ones with the same settings left their SQL."""
    kept: LRUCache[Any, Any] = LRUCache(2000)

    def sharing(self: Any, pool: Any, dialect: Dialect, *given: Any, **options: Any) -> None:
        init(self, pool, dialect, *given, **options)
        self._compiled_cache = _Shared(kept)

    return sharing


class _Shared:
    """Takes the settings of a dialect, with which SQL is made, for the dialect itself in a key."""

    def __init__(self, kept: LRUCache[Any, Any]) -> None:
        self._kept = kept

    def get(self, key: Any) -> Any:
        return self._kept.get(_among_engines(key))

    def __setitem__(self, key: Any, compiled: Any) -> None:
        self._kept[_among_engines(key)] = compiled


def _among_engines(key: Any) -> tuple[Any, ...]:
    dialect, *rest = key
    json = dialect._json_serializer, dialect._json_deserializer
    return (type(dialect), dialect.paramstyle, dialect.server_version_info, *json, *rest)
