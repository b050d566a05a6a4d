"""``autotune.tunable``: a callable, and what is to be tuned of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.domains.kernel.declare.file import from_file
from autotune.domains.kernel.declare.make import file_of, from_converted, make_kernel
from autotune.domains.kernel.declare.triton import Converted, converted, is_autotuner
from autotune.domains.kernel.deploy.tunable import Tunable
from autotune.domains.kernel.identity import kernel_name
from autotune.domains.kernel.kernel import Call, Objective
from autotune.errors import UserError


class _Tunable:
    """The decorator, and what else makes a tunable kernel."""

    def __call__(
        self,
        space: Mapping[str, Iterable[Any]] | Sequence[Mapping[str, Any]] | str | Path | None = None,
        *,
        key: Sequence[str] | Callable[..., Any] | None = None,
        reference: Callable[..., Any] | None = None,
        inputs: Callable[..., Any] | Sequence[Any] | None = None,
        shapes: Sequence[Mapping[str, Any]] = (),
        constraints: Sequence[str | Callable[..., bool]] = (),
        default: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = (),
        metrics: Mapping[str, Callable[[Call], float]] | None = None,
        objective: Objective | None = None,
        distance: Callable[[Mapping[str, Any], Mapping[str, Any]], float] | None = None,
        within: float = 2.0,
        tolerance: float | None = None,
        grid: Any = None,
        name: str = "",
        db: str | None = None,
    ) -> Callable[[Any], Tunable]:
        """Make a kernel tunable.

        ::

            @autotune.tunable(space={"block": [32, 64, 128]}, key=["x"], reference=plain, inputs=make)
            def blur(x, block=64): ...

        Args:
            space: parameter name to choices; or a list of configurations; or the name of a TOML file beside the code.
            key: by what a call's configuration is found: names of arguments (a number counts by its value, an array by
                its shape), or a callable of the arguments that returns numbers and texts. None for all arguments.
                Arrays that are not named count by their types.
            reference: takes the arguments without what is tuned and returns the right result, or writes it as the
                kernel does. None for the kernel's default configuration.
            inputs: makes arguments: a callable that returns a dict of them, a tuple or ``(args, kwargs)``; it is given
                ``device`` and ``seed`` if it takes them. Or a list of such arguments.
            shapes: what ``inputs`` is called with, a dict for each key to search.
            constraints: texts such as "A * B <= 1024", or callables of parameters by name.
            default: the configuration without a search; None takes it from the function's signature.
            outputs: the arguments that the kernel writes to, where it returns nothing and the reference returns what
                should be there.
            metrics: name to a figure of a :class:`Call`, ``{"GB/s": lambda c: 8e-3 * c.arguments["n"] / c.us}``.
            objective: what is to be smallest, or largest, in the place of time.
            distance: of two keys, for the nearest; infinite where one says nothing of the other. None for the largest
                ``|log2|`` of the ratio of two numbers.
            within: the largest such distance; not for a ``distance`` of your own.
            tolerance: relative error allowed; None for one by storage type.
            grid: of a Triton kernel, for the search.
            name: in the database; None for the module's last name and the function's.
            db: database to look up in; None for $AUTOTUNE_DB or the default file.

        Raises:
            UserError: whatever is wrong with these, in one line.
        """
        given = {k: v for k, v in locals().items() if k not in ("self", "space", "db", "name")}
        if callable(space):
            raise UserError("autotune.tunable needs a space: write @autotune.tunable(space={...}) with brackets")

        def declare(fn: Any) -> Tunable:
            if isinstance(space, (str, Path)):
                path = Path(space)
                if not path.is_absolute() and (code := file_of(fn)):
                    path = code.parent / path
                said = {k: v for k, v in given.items() if v is not _UNSET[k]}
                return Tunable(from_file(fn, path, said, name), db)
            return Tunable(make_kernel(fn, space=space, name=name, **given), db)

        return declare

    def from_triton(self, kernel: Any, **more: Any) -> Tunable:
        """A kernel with ``triton.autotune`` as a tunable one: its configurations are the space, its key is the key.

        ::

            matmul = autotune.tunable.from_triton(matmul, inputs=make, grid=grid)

        Args:
            kernel: what ``@triton.autotune`` made.
            more: of ``autotune.tunable``; ``inputs`` and ``grid`` are what a search needs besides.

        Raises:
            UserError: it is no such kernel, or it uses what cannot be kept: a ``pre_hook``.
        """
        if not is_autotuner(kernel):
            raise UserError(f"{kernel_name(kernel)} has no triton.autotune: use autotune.tunable(space=...)")
        found = Converted.of(kernel)
        return Tunable(from_converted(kernel.fn, found, more), more.pop("db", None))

    def triton(
        self,
        configs: Sequence[Any],
        key: Sequence[str],
        *,
        prune_configs_by: Mapping[str, Any] | None = None,
        reset_to_zero: Sequence[str] | None = None,
        restore_value: Sequence[str] | None = None,
        pre_hook: Any = None,
        post_hook: Any = None,
        warmup: Any = None,
        rep: Any = None,
        use_cuda_graph: Any = None,
        do_bench: Any = None,
        cache_results: Any = None,
        **more: Any,
    ) -> Callable[[Any], Tunable]:
        """What takes the place of ``@triton.autotune``: the same arguments, and those of ``autotune.tunable``.

        ``warmup``, ``rep``, ``use_cuda_graph``, ``do_bench`` and ``cache_results`` say how Triton measures in a call;
        here a search measures, by its own policy, and they mean nothing.

        Raises:
            UserError: a hook, which cannot be kept.
        """
        found = converted(configs, key, prune_configs_by, reset_to_zero, restore_value, pre_hook, post_hook)
        return lambda fn: Tunable(from_converted(fn, found, more), more.pop("db", None))


_UNSET: Mapping[str, Any] = {
    n: p.default for n, p in inspect.signature(_Tunable.__call__).parameters.items() if p.default is not p.empty
}
tunable = _Tunable()
triton_autotune = tunable.triton
