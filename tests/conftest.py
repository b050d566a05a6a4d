"""What every test gets: a user data directory of its own, so that none reads or writes the user's database, and a
terminal of one width. And an end for the processes that a test starts."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several pytest processes a temporary folder of its own, where the device's lock lies and what
    Inductor compiles: none waits while another measures, and none runs what another compiled under other settings.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    folder = tempfile.mkdtemp(prefix=f"autotune-{worker}-")
    os.chmod(folder, 0o711)  # PostgreSQL of another user has its folder in it
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(autouse=True)
def own_data_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the default database at an empty folder and forget the user's AUTOTUNE_DB."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
    monkeypatch.delenv("AUTOTUNE_DB", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test has started, for it to append to: whatever is left of them is killed at the end."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not go through it again and again, which costs a tenth of the
    time of tests that compile or simulate kernels."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests/gpu, and say why, where no CUDA device can be used."""
    on_gpu = [item for item in items if GPU_TESTS in item.path.parents]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
