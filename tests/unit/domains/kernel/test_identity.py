"""The fingerprint of a kernel's source: changes that alter it, and others."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import math
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autotune.domains.kernel.identity import kernel_name, plain_function, source_fingerprint

SOURCE = '''
"""A module."""
import functools
import math

SCALE = 2.0
calls = 0

def helper(x):
    return x * SCALE

def other(x):
    return x

def kernel(x, block=4):
    """What it does."""
    global calls
    calls += 1  # counted
    return helper(x) + math.sqrt(block)
'''


def fingerprint(tmp_path: Path, text: str, name: str = "kernel") -> str:
    path = tmp_path / f"module{len(list(tmp_path.iterdir()))}.py"
    path.write_text(text)
    return source_fingerprint(getattr(_load(path), name), ["block"])


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("identity_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# counted", "# counted, each once"),
        ('"""What it does."""', '"""What else it does."""'),
        ('    """What it does."""\n', ""),
        ("    return x\n", "    return x + 1\n"),  # of a function that it does not call
        ("calls = 0", "calls = 7"),  # state, not source
        ("calls += 1  # counted\n", "calls += 1\n\n"),
        ("helper(x) + math.sqrt(block)", "(helper(x)\n            + math.sqrt(block))"),
    ],
)
def test_source_fingerprint_ignores_equivalent_source(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOURCE
    assert fingerprint(tmp_path, SOURCE.replace(old, new)) == fingerprint(tmp_path, SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ math.sqrt", "- math.sqrt"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("return x * SCALE", "return SCALE / x"),
        ("def helper(x):\n    return x", "def helper(x):\n    return other(x)"),
        ("x, block=4", "x, block: int = 4"),  # Triton compiles by annotations
        ("def kernel", "@functools.cache\ndef kernel"),
    ],
)
def test_source_fingerprint_changes_with_the_source(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOURCE
    assert fingerprint(tmp_path, SOURCE.replace(old, new)) != fingerprint(tmp_path, SOURCE)


def test_source_fingerprint_ignores_tuning_decorators(tmp_path: Path) -> None:
    declared = SOURCE.replace("def kernel", "@autotune.tunable(space={'block': [4, 8]})\ndef kernel")
    again = declared.replace("[4, 8]", "[4, 8, 16]").replace("import math", "import math\nimport autotune")
    assert fingerprint(tmp_path, again) == fingerprint(tmp_path, SOURCE)


def test_other_parameters_are_another_kernel(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(SOURCE)
    kernel = _load(path).kernel
    assert source_fingerprint(kernel, ["block"]) != source_fingerprint(kernel, ["block", "x"])


def test_it_looks_under_wrappers() -> None:
    def kernel(x: Any) -> Any:
        return x

    @functools.wraps(kernel)
    def wrapper(*args: Any) -> Any:
        return kernel(*args)

    class Dispatcher:
        py_func = staticmethod(kernel)

    for wrapped in (wrapper, functools.partial(kernel, 1), Dispatcher()):
        assert plain_function(wrapped) is kernel
        assert source_fingerprint(wrapped, []) == source_fingerprint(kernel, [])
    assert kernel_name(kernel).startswith("test_identity:test_it_looks_under_wrappers")


def test_source_fingerprint_uses_names_and_code_without_source() -> None:
    assert source_fingerprint(math.sqrt, []) != source_fingerprint(math.cos, [])
    made = eval("lambda x: x + 1")
    assert source_fingerprint(made, []) != source_fingerprint(eval("lambda x: x + 2"), [])


def made(text: str, name: str = "kernel") -> Any:
    """A function of a text that was never in a file."""
    space: dict[str, Any] = {"__name__": "made"}
    exec(text, space)
    return space[name]


def test_a_text_of_another_function_is_not_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python 3.13 puts the text of ``python -c`` there, under the file name of all that exec and eval compile.
    text = "def kernel(x):\n    return 0\n"
    monkeypatch.setitem(linecache.cache, "<string>", (len(text), None, text.splitlines(True), "<string>"))
    plus, minus = made("def kernel(x):\n    return x + 1"), made("def kernel(x):\n    return x - 1")
    own = made(text)
    assert len({source_fingerprint(fn, []) for fn in (plus, minus, own)}) == 3
    commented = text.replace("0", "0  # nothing")
    assert source_fingerprint(own, []) != source_fingerprint(made(commented.replace("0 ", "1 ")), [])


def test_a_kept_text_is_the_source_of_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for k, text in enumerate(("def kernel(x):\n    return x\n", "def kernel(x):\n    return x  # as it is\n")):
        name = f"<made {k}>"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        space: dict[str, Any] = {"__name__": "made"}
        exec(compile(text, name, "exec"), space)
        found.append(source_fingerprint(space["kernel"], []))
    assert found[0] == found[1]


@pytest.mark.usefixtures("new_interpreters")
def test_functions_of_a_command_line_differ() -> None:
    program = """
from autotune.domains.kernel.identity import source_fingerprint
first, second = {}, {}
exec("def kernel(x):\\n    return x + 1", first)
exec("def kernel(x):\\n    return x * 2", second)
print(source_fingerprint(first["kernel"], []) == source_fingerprint(second["kernel"], []))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def kernel(x, n=2):\n    return x * n", "def kernel(x, n=3):\n    return x * n"),
        ("def kernel(x, *, n=2):\n    return x * n", "def kernel(x, *, n=3):\n    return x * n"),
        ("def kernel(x):\n    return [(lambda y: y + 1)(x)]", "def kernel(x):\n    return [(lambda y: y - 1)(x)]"),
        ("def kernel(x):\n    return x in {1, 2}", "def kernel(x):\n    return x in {1, 3}"),
        ("def kernel(x):\n    return x * 2j", "def kernel(x):\n    return x * 3j"),
        ("def kernel(x, y):\n    return x.a(y=1)", "def kernel(x, y):\n    return x.a(z=1)"),
        ("def kernel(*x):\n    return x", "def kernel(**x):\n    return x"),
    ],
)
def test_without_source_all_that_is_compiled_counts(one: str, other: str) -> None:
    assert source_fingerprint(made(one), []) != source_fingerprint(made(other), [])
    again = made("\n\n" + one)  # other lines, another object
    assert source_fingerprint(made(one), []) == source_fingerprint(again, [])


def test_two_lambdas_of_a_line_differ() -> None:
    plus, minus = (lambda x: x + 1), (lambda x: x - 1)
    assert source_fingerprint(plus, []) != source_fingerprint(minus, [])


def test_functions_of_one_name_all_count() -> None:
    def scaled(by: int) -> Any:
        def scale(x: Any) -> Any:
            return x * by

        return scale

    def using(first: Any, second: Any) -> Any:
        def kernel(x: Any) -> Any:
            return first(second(x))

        return kernel

    kernels = [using(scaled(2), scaled(3)), using(scaled(2), scaled(4)), using(scaled(3), scaled(2))]
    assert len({source_fingerprint(kernel, []) for kernel in kernels}) == 3
    assert source_fingerprint(using(scaled(2), scaled(3)), []) == source_fingerprint(kernels[0], [])


def test_a_function_that_calls_itself_ends() -> None:
    first, second = made("def kernel(n):\n    return kernel(n - 1)"), made("def kernel(n):\n    return kernel(n - 2)")
    assert isinstance(first, types.FunctionType)
    assert source_fingerprint(first, []) != source_fingerprint(second, [])
