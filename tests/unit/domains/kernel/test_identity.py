"""The fingerprint of a kernel's source: what changes it, and what does not."""

from __future__ import annotations

import functools
import importlib.util
import math
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
def test_what_changes_nothing(tmp_path: Path, old: str, new: str) -> None:
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
def test_what_changes_it(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOURCE
    assert fingerprint(tmp_path, SOURCE.replace(old, new)) != fingerprint(tmp_path, SOURCE)


def test_what_declares_the_tuning_is_no_part_of_it(tmp_path: Path) -> None:
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


def test_what_has_no_source_is_told_by_its_name() -> None:
    assert source_fingerprint(math.sqrt, []) != source_fingerprint(math.cos, [])
    made = eval("lambda x: x + 1")
    assert source_fingerprint(made, []) != source_fingerprint(eval("lambda x: x + 2"), [])
