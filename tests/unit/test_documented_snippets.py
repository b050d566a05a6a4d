"""Python in documents: blocks compile, imports exist, and names of libraries are imported before they are used."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._inductor.config as inductor

import autotune
from tests.support import ROOT
from tests.unit.test_documents import DOCUMENTS

PAGES = [d for d in DOCUMENTS if "```python" in d.read_text() and "notes" not in d.parts]
HOW_TO = [p for p in PAGES if p.parent.name == "how-to" and p.name not in ("extending.md", "own-kernels.md")]
"""Guides whose blocks are parts of a reader's script; the two others show parts of autotune, and files."""
_BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
OPTIONAL = {"transformers", "diffusers", "lightning"}
"""Libraries that the environment of these tests may lack."""


def _trees(text: str) -> Iterator[ast.Module]:
    """The syntax trees of a page's blocks.

    Raises:
        SyntaxError: a block is not Python.
    """
    for _, block in _BLOCK.findall(text):
        yield ast.parse(textwrap.dedent(block))


def _wrong_imports(tree: ast.AST, own: str) -> list[str]:
    """Imports of modules or names that do not exist.

    Args:
        own: a page's text; a module that it names as a file is the reader's.
    """
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in named:
            root = module.partition(".")[0]
            if f"{root}.py" in own or (root in OPTIONAL and importlib.util.find_spec(root) is None):
                continue
            try:
                found = importlib.import_module(module)
            except ImportError:
                wrong.append(module)
                continue
            if name and not hasattr(found, name) and importlib.util.find_spec(f"{module}.{name}") is None:
                wrong.append(f"{module}.{name}")
    return wrong


def _bound(tree: ast.AST) -> set[str]:
    """Names that a block binds by imports, assignments and definitions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


def _unbound(trees: list[ast.Module]) -> list[str]:
    """Modules and classes that a page uses without an import. A block of one line is not a script."""
    bound: set[str] = {*vars(builtins)}
    wrong: list[str] = []
    for tree in trees:
        bound |= _bound(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        named = {name for name in used if name in ("torch", "autotune") or (name[0].isupper() and len(name) > 1)}
        wrong += sorted(named - bound) if len(tree.body) > 1 else []
    return wrong


def _wrong_arguments(tree: ast.AST) -> list[str]:
    """Arguments of autotune's functions that they do not have, and options of its backend that do not exist."""
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        backend = given.get("backend")
        if isinstance(backend, ast.Constant) and backend.value == "autotune":
            options = given.get("options")
            named = (
                [k.value for k in options.keys if isinstance(k, ast.Constant)] if isinstance(options, ast.Dict) else []
            )
            known = {"search", "unsearched", *inductor.get_config_copy()}
            wrong += [f"options[{name!r}]" for name in named if name not in known]
        function = node.func
        if not (isinstance(function, ast.Attribute) and ast.unparse(function.value) == "autotune"):
            continue
        if function.attr not in autotune.__all__:
            wrong.append(f"autotune.{function.attr}")
            continue
        parameters = inspect.signature(getattr(autotune, function.attr)).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            wrong += [f"{function.attr}({name}=)" for name in given if name not in {p.name for p in parameters}]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_compile_with_names_that_exist(page: Path) -> None:
    text = page.read_text()
    trees = [*_trees(text)]
    assert [wrong for tree in trees for wrong in (*_wrong_imports(tree, text), *_wrong_arguments(tree))] == []


@pytest.mark.parametrize("page", HOW_TO, ids=lambda p: p.name)
def test_guides_import_the_names_that_they_use(page: Path) -> None:
    assert _unbound([*_trees(page.read_text())]) == []


def test_faults_are_found() -> None:
    (tree,) = _trees("```python\nmodel.compile()\nTrainer(model)\nprint(autotune.counters())\n```\n")
    assert _unbound([tree]) == ["Trainer", "autotune"]
    (tree,) = _trees("  ```python\n  from torch.nn import Nothing\n  import nowhere\n  import mine\n  ```\n")
    assert _wrong_imports(tree, "`mine.py`") == ["torch.nn.Nothing", "nowhere"]
    (tree,) = _trees(
        "```python\nautotune.fsdp(model, seconds=3)\nautotune.nothing()\n"
        'torch.compile(f, backend="autotune", options={"search": 9, "seach": 9, "max_autotune": True})\n```\n'
    )
    assert _wrong_arguments(tree) == ["fsdp(seconds=)", "autotune.nothing", "options['seach']"]
    with pytest.raises(SyntaxError):
        next(_trees("```python\nmodel = (\n```\n"))
