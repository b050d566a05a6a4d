"""A process that forgets between tests what it compiled and opened, and databases filled by hand with real kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.backends import registry
from torch._functorch import config as aot_config

from autotune.in_program.backend import dynamo_backend
from autotune.runtime.deployment import Deployment, use
from autotune.runtime.launch import cpu as cpu_launch
from tests.support.deployment import Tune, tune_in


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """The entry point of an installed package does this; a checkout on sys.path has none."""
    if "autotune" not in registry.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(dynamo_backend, name="autotune")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Compile every graph again: a cached one has no look-up that a test could count."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    use(Deployment())
    with torch._inductor.config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield
    use(Deployment())
    torch._dynamo.reset()


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file that $AUTOTUNE_DB names; not there yet."""
    path = str(tmp_path / "tuned.db")
    monkeypatch.setenv("AUTOTUNE_DB", path)
    return path


@pytest.fixture
def tune(db: str) -> Tune:
    """Stores the default configuration of a function's regions in the file that $AUTOTUNE_DB names."""
    return tune_in(db)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels write one element wrong; counts their launches."""
    launched: list[int] = []
    real = cpu_launch.make_launches

    def make(plan: Any, config: Any, tuned: Any = None) -> Any:
        def spoilt(launch: Callable[..., None]) -> Callable[..., None]:
            def run(stream: int, pointers: Any) -> None:
                import ctypes

                launch(stream, pointers)
                launched.append(1)
                ctypes.c_float.from_address(pointers[-1] + 4 * 7).value = 9.0

            return run

        return [(groups, spoilt(launch)) for groups, launch in real(plan, config, tuned)]

    monkeypatch.setattr(cpu_launch, "make_launches", make)
    return launched
