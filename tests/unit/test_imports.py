"""Rules of imports in addition to the layers in pyproject.toml: no circle, one importer for each library, a light
deployment."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp
import pytest

from tests.support import ROOT

PACKAGE = ROOT / "autotune"
MODULES = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "db").rglob("*.py"))

# What is imported, and the files or folders (relative to the root) that may, anywhere in them.
DOORS = {
    "numba": ["autotune/compiler/targets/"],
    "llvmlite": ["autotune/compiler/targets/"],
    "sqlalchemy": ["autotune/store/", "db/"],
    "alembic": ["autotune/store/connection/migrate.py", "db/"],
    "optuna": ["autotune/tuner/"],
    "jinja2": ["autotune/report/"],
    "ray": ["autotune/tuner/cluster/engine.py"],
    "vl_convert": ["autotune/charts.py"],
    "cryptography": ["autotune/store/snapshot_form.py"],
    "pickle": ["autotune/runtime/inductor/code.py"],  # in torch's cache, which holds pickles
}


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Every module that ``path`` imports, at its top or within a function, with relative imports resolved."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parent = ".".join([*base, *filter(None, [node.module])])
            yield parent
            yield from (f"{parent}.{alias.name}" for alias in node.names)


def falls_under(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize("module", sorted(DOORS))
def test_only_its_door_imports(module: str) -> None:
    wrong = []
    for path in MODULES:
        where = path.relative_to(ROOT).as_posix()
        if any(where == door or (door.endswith("/") and where.startswith(door)) for door in DOORS[module]):
            continue
        wrong += [f"{where} imports {name}" for name in imported(path) if falls_under(name, module)]
    assert not wrong


def in_circles(imports: Mapping[str, set[str]]) -> set[str]:
    """The modules of ``imports`` (module to its imports) on a circle, or between two circles."""
    left = {module: set(others) for module, others in imports.items()}
    while True:
        found = {module for others in left.values() for module in others}
        ends = {module for module, others in left.items() if not others & left.keys() or module not in found}
        if not ends:
            return set(left)
        left = {module: others - ends for module, others in left.items() if module not in ends}


def test_a_circle_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"b", "e"}, "d": {"f"}, "e": {"f"}, "f": set()}
    assert in_circles(imports) == {"b", "c"}


def test_no_module_is_in_an_import_circle() -> None:
    """Imports within functions and under TYPE_CHECKING count."""
    graph = grimp.build_graph("autotune", cache_dir=None)
    assert len(graph.modules) > 300
    found = in_circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    assert not sorted(found)


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    path = tmp_path / "a" / "b" / "c.py"
    path.write_text("import x.y as z\ndef f():\n    from ..d import e\nfrom . import g\nif 0:\n    from h import i\n")
    assert set(imported(path)) == {"x.y", "a.d", "a.d.e", "a.b", "a.b.g", "h", "h.i"}


def loaded_by(statement: str) -> set[str]:
    """The modules of a new process that ran ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["lookup", "launch.executor", "backend", "packages"])
def test_deployment_loads_no_search_and_no_compiler(module: str) -> None:
    assert not loaded_by(f"import autotune.runtime.{module}") & {"optuna", "alembic", "numba", "llvmlite"}


def test_code_from_torchs_caches_loads_nothing_that_makes_kernels() -> None:
    """A second process imports these modules in its first step."""
    names = ("runtime.inductor.code", "runtime.inductor.region_call", "compiler.capture.hooks")
    loaded = loaded_by("import " + ", ".join(f"autotune.{name}" for name in (*names, "compiler.capture.attention")))
    makers = {"compiler.kernel.nodes", "compiler.planner", "compiler.lower.rules", "ir.graph", "store.store"}
    makers |= {"runtime.inductor.product_call", "compiler.capture.attention.operators"}
    assert not loaded & {f"autotune.{name}" for name in makers}


def test_importing_the_package_costs_nothing() -> None:
    heavy = {"torch", "numpy", "numba", "sqlalchemy", "optuna", "rich", "psutil"}
    assert not loaded_by("import autotune, autotune.task, autotune.store.records") & heavy
