"""Hooks of autotune in Inductor's compilation, which run after the user's hooks."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor import custom_graph_pass

from autotune.compiler.capture.joint import prepare_joint, rewrite_joint

# A user's pass may take an is_inference argument; older torch has no such passes.
_Base: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)


class Hook(_Base):  # type: ignore[misc]
    """A pass of autotune that runs after the user's passes in the same hook.

    Args:
        run: changes a graph in place.
        identity: identifies everything that ``run`` depends on; a part of Inductor's cache keys. None disables caching.
        before: the user's setting: a pass, a list of passes, or None.
    """

    def __init__(self, run: Callable[[fx.Graph], None], identity: bytes | None, before: Any) -> None:
        self._run, self._identity = run, identity
        self._before = list(before) if isinstance(before, (list, tuple)) else [] if before is None else [before]

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for theirs in self._before:
            if _Base is not custom_graph_pass.CustomGraphPass and isinstance(theirs, _Base):
                theirs(graph, is_inference)
            else:
                theirs(graph)
        self._run(graph)

    def uuid(self) -> Any:
        """The identities of all passes; None, which disables Inductor's caching, if one has no identity."""
        theirs = [p.uuid() if isinstance(p, custom_graph_pass.CustomGraphPass) else None for p in self._before]
        known = (self._identity, *theirs)
        return None if any(one is None for one in known) else known


@functools.cache
def text_of(folder: Path) -> bytes:
    """A digest of the Python files in a folder, so that no cache returns a graph that an older pass rewrote."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(file.read_bytes())
    return found.digest()


def hooked(post_grad: Hook) -> dict[str, Any]:
    """Inductor's settings for ``post_grad`` and the rewrites of joint graphs that it depends on."""
    from torch._inductor import config

    identity = b"autotune joint " + text_of(Path(__file__).parent)
    return {
        "joint_custom_pre_pass": Hook(prepare_joint, identity, config.joint_custom_pre_pass),
        "joint_custom_post_pass": Hook(rewrite_joint, identity, config.joint_custom_post_pass),
        "post_grad_custom_post_pass": post_grad,
        "layout_optimization": config.layout_optimization,  # a pass may change it, for its graph alone
    }
