"""Commands, options, variables and public names in documents exist."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import autotune
from autotune.cli.app import build_parser
from autotune.cli.options import every_domain
from autotune.store.opening import packaged
from tests.support import ROOT
from tests.unit.test_documents import DOCUMENTS

_FENCED = re.compile(r"```\w*[^\n]*\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_COMMAND = re.compile(r"(?:^|[\s;&|(])(autotune (?:[a-z]+)(?: .*)?)$")
INTERNAL = {"AUTOTUNE_PARENT", "AUTOTUNE_SHARED_BUILDS"}
"""Variables that processes of autotune set for each other."""
_OF_DOMAINS = ("search", "lookup", "compare", "calibrate")


_RESULTS = re.compile(r"<!-- results:.*?<!-- end results -->", re.DOTALL)


def _lines(text: str) -> Iterator[str]:
    """Lines of code blocks, continued lines as one, and code within sentences; not the commands of result files."""
    text = _RESULTS.sub("", text)
    for block in _FENCED.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from _INLINE.findall(_FENCED.sub("", text))


@cache
def _options() -> dict[str, set[str]]:
    """Each command's options, those of all domains included."""
    found: dict[str, set[str]] = {}

    def walk(parser: argparse.ArgumentParser) -> None:
        found[parser.prog] = {o for a in parser._actions for o in a.option_strings}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    walk(command)

    walk(build_parser())
    for command in _OF_DOMAINS:
        for domain in every_domain().values():
            own = argparse.ArgumentParser(add_help=False)
            domain.add_arguments(command, own)
            found[f"autotune {command}"] |= {o for a in own._actions for o in a.option_strings}
    return found


def _wrong(line: str) -> str:
    """The unknown command or option of a line, or nothing."""
    match = _COMMAND.search(line.split("  #")[0].strip())
    if match is None:
        return ""
    try:
        words = shlex.split(match[1].replace("[", " ").replace("]", " "), comments=True)
    except ValueError:
        words = match[1].split()
    known = _options()
    prog = " ".join(words[:2])
    if prog not in known:
        return prog
    if f"{prog} {words[2] if len(words) > 2 else ''}" in known:
        prog = f"{prog} {words[2]}"
    if prog == "autotune run":
        words = words[: next((k for k, word in enumerate(words) if word.endswith(".py") or word == "..."), len(words))]
    stop = next((k for k, word in enumerate(words) if word in (";", "&&", "|", "python")), len(words))
    given = [word.partition("=")[0] for word in words[2:stop] if word.startswith("--")]
    unknown = [option for option in given if option not in known[prog] and option != "--"]
    return f"{prog} {' '.join(unknown)}" if unknown else ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_their_options_exist(document: Path) -> None:
    assert [wrong for line in _lines(document.read_text()) if (wrong := _wrong(line))] == []


def test_an_unknown_command_or_option_is_found() -> None:
    fine = ["autotune search c3 --gemm 1x1x1", "A=1 autotune db prune --runs 3d", "autotune run --search 9 x.py --own"]
    assert [_wrong(line) for line in fine] == ["", "", ""]
    assert _wrong("autotune serch fusion") == "autotune serch"
    assert _wrong("pip list; autotune search fusion x --gemmm 1   # --none") == "autotune search --gemmm"
    assert _wrong("autotune db prune --gemm 1") == "autotune db prune --gemm"


_PLACEHOLDERS = {"S": "9", "N": "9", "DOMAIN": "fusion", "gelu": "fusion", "triton": "fusion"}
"""Words of documents in the place of values, and domains of the examples."""
_ENDS = {"|", ";", "&&", "\\", ">", "2>&1"}
_UNPARSED = ("autotune run", "autotune -", "autotune:")


def _fault(line: str, *, whole: bool) -> str:
    """The parser's message about a command line, or nothing.

    Args:
        whole: a command of a code block; code within a sentence may leave arguments out.
    """
    match = _COMMAND.search(line.split("  #")[0].strip())
    if match is None or match[1].startswith(_UNPARSED):
        return ""
    text = re.sub(r"\[\w+[\w -]*\|[^]]*\]", "", match[1])  # a choice of options
    try:
        words = shlex.split(text.replace("[", " ").replace("]", " "), comments=True)
    except ValueError:  # prose that begins with the command's name
        return ""
    words = [_PLACEHOLDERS.get(word, word) for word in words[1:] if word != "..."]
    words = words[: next((k for k, word in enumerate(words) if word in _ENDS), len(words))]
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            build_parser().parse_args(words)
    except SystemExit as end:
        said = told.getvalue()
        missing = "required" in said or "expected" in said
        return said if end.code and (whole or not missing) else ""
    return ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_command_lines_are_parsed(document: Path) -> None:
    text = _RESULTS.sub("", document.read_text())
    blocks = [line for b in _FENCED.findall(text) for line in b.replace("\\\n", " ").splitlines()]
    sentences = _INLINE.findall(_FENCED.sub("", text))
    found = [_fault(line, whole=True) for line in blocks] + [_fault(line, whole=False) for line in sentences]
    assert [fault for fault in found if fault] == []


def test_a_command_line_that_the_parser_rejects_is_found() -> None:
    assert _fault("autotune plan fusion TARGET --why", whole=False) == ""
    assert "invalid choice: 'TARGET'" in _fault("autotune plan TARGET --why", whole=False)
    assert _fault("autotune import", whole=False) == ""
    assert "required" in _fault("autotune import", whole=True)
    assert "not a number" in _fault("autotune search fusion x --timeout soon", whole=False)


def test_packaged_snapshots_and_extras_that_documents_name_exist() -> None:
    extras = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}
    for document in (d for d in DOCUMENTS if "notes" not in d.parts):  # notes have what is not made yet
        text = document.read_text()
        assert {*re.findall(r"\bpackage:(\w+)", text)} <= {*packaged()}, document
        groups = re.findall(r"(?:'\.|autotune-torch)\[([\w,-]+)\]'", text)
        assert {name for group in groups for name in group.split(",")} <= extras, document


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_that_are_run_exist(document: Path) -> None:
    named = set(re.findall(r"python -m ((?:autotune|benchmarks|tests|examples)\b(?:\.\w+)*)", document.read_text()))
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_names_exist(document: Path) -> None:
    """Calls of ``autotune.name(...)``, and options in them that are settings."""
    named = set(re.findall(r"\bautotune\.(\w+)\(", document.read_text()))
    assert named - {*autotune.__all__} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_counters_and_settings_exist(document: Path) -> None:
    text = document.read_text()
    counted = set(re.findall(r"autotune\.counters\(\)\.(\w+)", text))
    assert counted - {*autotune.counters()} == set()
    given = {
        name for call in re.findall(r"autotune\.configure\(([^)]*)\)", text) for name in re.findall(r"(\w+)=", call)
    }
    assert given - {*inspect.signature(autotune.configure).parameters} == set()


def _variables(text: str) -> set[str]:
    return {name.rstrip("_") for name in re.findall(r"\bAUTOTUNE_[A-Z_]+\b", text)}


def test_environment_variables_are_those_of_the_code() -> None:
    code = {name for file in (ROOT / "autotune").rglob("*.py") for name in _variables(file.read_text())}
    page = _variables((ROOT / "docs/reference/environment.md").read_text())
    assert page - code == set()
    documented = {name for document in DOCUMENTS for name in _variables(document.read_text())}
    tests = {name for file in (ROOT / "tests").rglob("*.py") for name in _variables(file.read_text())}
    assert documented - code - tests == set()
    assert code - page == INTERNAL


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    named = set(re.findall(r'heading: "autotune\.([\w.]+)"', page))
    assert {name for name in autotune.__all__ if not name.startswith("_")} == {n for n in named if "." not in n}
    for target in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        module, _, name = target.rpartition(".")
        while (
            importlib.util.find_spec(module.partition(".")[0])
            and not (ROOT / f"{module.replace('.', '/')}.py").exists()
        ):
            module, _, _ = module.rpartition(".")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^\s*(?:def|class) {name}\b", text, re.MULTILINE), target
