"""Fixtures of every test: a separate user data directory, so that none reads or writes the user's database, and a
terminal of one width. Processes that a test starts end with it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.measure import quiet
from tests.support import ROOT, forks
from tests.support.brief import measure_briefly
from tests.support.bytecode import make_bytecode
from tests.support.cpu_times import CpuTimes
from tests.support.headers import share_headers
from tests.support.lean import compile_lean
from tests.support.skipped import recorder


def pytest_configure(config: pytest.Config) -> None:
    """Set up folders and threads of the processes of a run.

    Each of several pytest processes has a separate temporary folder with the device's lock: none waits while another
    measures. Inductor's output is in one folder of the run. Waiting threads sleep: there are more of them than cores,
    and a spinning thread takes time from a computing one.
    """
    if table := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(Path(table)))
    if (skipped := config.getoption("--skipped")) and (plugin := recorder(skipped)):
        config.pluginmanager.register(plugin)
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # or Inductor compiles for ten seconds to check cpuid
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")  # it colours refusals that no test prints
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        if config.getoption("numprocesses", None):
            compiled = tempfile.mkdtemp(prefix="autotune-inductor-")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
            config.add_cleanup(lambda: shutil.rmtree(compiled, ignore_errors=True))
            make_bytecode(config)
            _fork_processes(config)
        return
    folder = tempfile.mkdtemp(prefix=f"autotune-{worker}-")
    os.chmod(folder, 0o711)  # PostgreSQL of another user has its folder in it
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    share_headers(Path(folder))


def _fork_processes(config: pytest.Config) -> None:
    """Let the processes of the run come from one that has imported for all of them."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # set before libgomp loads: two thirds of a softmax's time
    folder = tempfile.mkdtemp(prefix="autotune-imports-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    share_headers(Path(folder))
    forked = contextlib.ExitStack()
    forked.enter_context(forks.installed(tests=Path(folder)))
    config.add_cleanup(forked.close)


@pytest.fixture(scope="session")
def data_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders for the tests of a process; each next one there is empty."""
    base = tmp_path_factory.mktemp("data")

    def following() -> Iterator[Path]:
        for n in itertools.count():
            (base / str(n)).mkdir()
            yield base / str(n)

    return following()


@pytest.fixture(autouse=True)
def own_data_directory(data_directories: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the default database at an empty folder and forget the user's AUTOTUNE_DB."""
    monkeypatch.setenv("XDG_DATA_HOME", str(next(data_directories)))
    monkeypatch.delenv("AUTOTUNE_DB", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def default_numerics() -> Iterator[None]:
    """Restore torch's settings of precision and determinism after a test."""
    from autotune import numerics

    numerics.restore({})
    yield
    numerics.restore({})


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """CPU kernels are compiled once for all tests of a run, and none come from the user's cache."""
    own = tmp_path_factory.getbasetemp()
    run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    (run / "kernels").mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTUNE_CACHE_DIR", str(run / "kernels"))
        yield


@pytest.fixture(scope="session", autouse=True)
def kept_ptx() -> Iterator[Callable[..., str]]:
    """Numba compiles a kernel's text once for all runs of the tests; yields Numba itself."""
    from autotune.compiler.targets.cuda import compile as compiling
    from tests.support.ptx import kept

    numba_ptx = compiling._numba_ptx
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_numba_ptx", kept(numba_ptx))
        yield numba_ptx


@pytest.fixture
def compiled_anew(kept_ptx: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba itself, for tests that compile the same kernel twice."""
    from autotune.compiler.targets.cuda import compile as compiling

    monkeypatch.setattr(compiling, "_numba_ptx", kept_ptx)


@pytest.fixture(scope="session", autouse=True)
def kept_tables() -> Iterator[Callable[..., None]]:
    """Alembic makes the tables once for all databases of a process; yields Alembic's own function."""
    from autotune.store.connection import migrate
    from tests.support.tables import kept

    upgrade = migrate.command.upgrade
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "command", SimpleNamespace(upgrade=kept(upgrade)))
        yield upgrade


@pytest.fixture
def migrated_anew(kept_tables: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alembic itself, for tests of its tables."""
    from autotune.store.connection import migrate

    monkeypatch.setattr(migrate, "command", SimpleNamespace(upgrade=kept_tables))


@pytest.fixture(scope="session", autouse=True)
def shared_statements() -> Iterator[None]:
    """SQLAlchemy makes the SQL of a statement once for all databases of a process."""
    import sqlalchemy as sa

    from tests.support.statements import shared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sa.Engine, "__init__", shared(sa.Engine.__init__))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[None]:
    """Python processes are forked from one that has imported everything, which this process may be a fork of itself."""
    with forks.installed():
        yield


@pytest.fixture(scope="session", autouse=True)
def brief() -> Iterator[float]:
    """Measurements are brief, and none waits until other processes rest: those are other tests.

    Yields what counts as quiet without this.
    """
    busy = quiet.BUSY
    with pytest.MonkeyPatch.context() as patch:
        measure_briefly(patch.setattr)
        yield busy


@pytest.fixture(scope="session", autouse=True)
def lean() -> None:
    """torch.compile does what tests look at."""
    compile_lean()


@pytest.fixture(scope="session", autouse=True)
def vision() -> None:
    """Make torchvision, which timm and transformers import, importable with a CPU build of torch."""
    from benchmarks.real.vision import declare_operators

    declare_operators()


@pytest.fixture
def new_interpreters() -> Iterator[None]:
    """Processes import for themselves: for tests of that, and of how interpreters start and end."""
    with forks.new_interpreters():
        yield


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test has started, for it to append to: whatever is left of them is killed at the end."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def threads() -> Iterator[None]:
    """Measurements pin the process; other tests get their threads back."""
    import torch

    cpus, count = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(count)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing is garbage while modules are imported; looking for it took a fifth of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: scanning them costs a tenth of the
    time of tests that compile or simulate kernels."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="few cases of each test, few tests of layers above unit")
    about = "of tests of kernels with many cases, the third that is the commit's; the next commits run the others"
    parser.addoption("--third", action="store_true", help=about)
    parser.addoption("--cpu-times", metavar="FILE", help="write what layers, files and tests took, in CPU seconds")
    parser.addoption("--skipped", metavar="FILE", help="add the tests that were skipped, and why, to a file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``--sample`` or ``--third`` does."""
    if config.getoption("--sample"):
        left_out = _beyond_the_sample(items)
    elif config.getoption("--third"):
        left_out = other_thirds(items, _own_third())
    else:
        return
    config.hook.pytest_deselected(items=left_out)
    gone = {*left_out}
    items[:] = [item for item in items if item not in gone]


def _beyond_the_sample(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """A sample is the first case of each test in tests/unit and of the first test of each file elsewhere."""
    unit = Path(__file__).parent / "unit"
    seen: set[object] = set()
    left_out = []
    for item in items:
        of = getattr(item, "function", item) if unit in item.path.parents else item.path
        if of in seen or item.get_closest_marker("slow"):
            left_out.append(item)
        seen.add(of)
    return left_out


_MANY = 3
"""Cases of a test, from which on it has thirds."""


_IN_THIRDS = (
    "simulated", "compile", "unit/compiler", "unit/domains/fusion", "unit/ir", "unit/bench/test_cases.py",
    "endtoend/examples/test_example_models.py",
)  # fmt: skip
"""Where tests are of kernels and of what becomes kernels, program by program. Nothing here guards what is stored, who
is trusted, or what a deployment computes."""


def other_thirds(items: Sequence[pytest.Item], own: int) -> list[pytest.Item]:
    """Two of three cases of the tests in :data:`_IN_THIRDS` that have many.

    Args:
        own: 0, 1 or 2, which of the thirds is not left out.
    """
    layers = [Path(__file__).parent / layer for layer in _IN_THIRDS]
    families: dict[object, list[pytest.Item]] = {}
    chosen = {path for path in {item.path for item in items} if any(map(path.is_relative_to, layers))}
    for item in items:
        if item.path in chosen:
            families.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    many = itertools.chain.from_iterable(cases for cases in families.values() if len(cases) >= _MANY)
    return [item for number, item in enumerate(many) if number % 3 != own]


def _own_third() -> int:
    """Which third a commit runs: 0 where there is no commit, or no git."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return int(found.stdout.strip() or "0", 16) % 3


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked ``programs`` run once for each of their share of the random programs, whose number is ``seed``.

    A second argument of the marker is a function that returns False for programs that the test leaves out.

    ``AUTOTUNE_PROPERTY_CASES=N`` tries N programs (default 40) times the marker's share; ``AUTOTUNE_PROPERTY_FIRST=K``
    begins at seed K.
    """
    marker = metafunc.definition.get_closest_marker("programs")
    if marker is None:
        return
    first = int(os.environ.get("AUTOTUNE_PROPERTY_FIRST", "0"))
    count = max(1, round(marker.args[0] * int(os.environ.get("AUTOTUNE_PROPERTY_CASES", "40"))))
    wanted = marker.args[1] if len(marker.args) > 1 else None
    metafunc.parametrize("seed", [*filter(wanted, range(first, first + count))])
