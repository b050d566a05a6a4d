"""A database that somebody else wrote to, and a file that it should not reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autotune.runtime.deployment import Deployment, use


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    use(Deployment())
    yield
    use(Deployment())
    torch._dynamo.reset()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "shared.db"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that no search has any business with."""
    path = tmp_path / "victim"
    path.write_bytes(b"precious" * 16)
    return path
