"""Bytecode of the tests, made once for all processes of a run: in a fresh checkout each of them made all of it."""

from __future__ import annotations

import compileall
import contextlib
import os
import sys
import warnings
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.support import ROOT


def make_bytecode(config: pytest.Config) -> None:
    """Compile what is not compiled yet, a process on each processor. What fails is left to who imports it."""
    if sys.dont_write_bytecode:
        return
    files = [path for folder in ("autotune", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    count, children = len(os.sched_getaffinity(0)), list[int]()
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads. They are OpenBLAS's, which ends them before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        for k in range(count):
            if (child := os.fork()) == 0:
                try:
                    for path in files[k::count]:
                        with contextlib.suppress(
                            Exception
                        ):  # of a text that is no Python, or of pytest's own functions
                            _compile(path, config)
                finally:
                    os._exit(0)
            children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _compile(path: Path, config: pytest.Config) -> None:
    """pytest rewrites the asserts of tests, and caches their bytecode under separate names."""
    if not path.name.startswith("test_") and path.name != "conftest.py":
        compileall.compile_file(path, quiet=2)
        return
    kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, kept) is None:
        status, code = rewrite._rewrite_test(path, config)
        kept.parent.mkdir(exist_ok=True)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, kept)
