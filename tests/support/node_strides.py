"""Check of the strides in a captured graph against those of its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._functorch import config as aot_config
from torch._inductor.compile_fx import compile_fx
from torch.utils import _pytree as pytree

from autotune.compiler.capture.hooks import Hook, hooked


def strides_apart(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of one shape have different strides; that of an extent of 1 is never used."""
    return any(e > 1 and a.stride(i) != b.stride(i) for i, e in enumerate(a.shape))


class Checked(fx.Interpreter):
    """Runs a graph node by node; a node with other strides than its fake value is noted in ``wrong``."""

    def __init__(self, gm: fx.GraphModule, wrong: list[str]) -> None:
        super().__init__(gm)
        self.wrong = wrong

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function":
            for real, fake in zip(pytree.tree_leaves(value), pytree.tree_leaves(n.meta["val"]), strict=True):
                if isinstance(real, Tensor) and strides_apart(real, fake):
                    self.wrong.append(f"{n.format_node()}: {real.stride()} where the graph has {tuple(fake.stride())}")
        return value


def checking_backend(seen: list[fx.GraphModule], wrong: list[str]) -> Callable[..., Any]:
    """A backend for torch.compile that runs graphs as :class:`Checked` does, once Inductor's joint passes, ours among
    them, are through; each is kept in ``seen``."""

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        seen.append(gm)

        def run(given: list[Any]) -> Any:
            return Checked(gm, wrong).run(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # Inductor's padding of products puts slices into the graph and leaves the strides foretold as they were.
        patches = {**hooked(Hook(lambda graph: None, b"checked", None)), "shape_padding": False}
        with aot_config.patch(enable_autograd_cache=False):
            return compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)

    return backend
