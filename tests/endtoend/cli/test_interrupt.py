"""Ctrl-C before anything was begun, and a user's code that ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.app import main
from tests.support import ROOT

_STEP = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
wanted = sys.argv[2]

class Watch:  # is asked for every module that is imported
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Watch())
sys.argv[1:] = ["search", "fusion", "layer_norm", "--device", "cpu", "--timeout", "1"]
from autotune.__main__ import main
sys.exit(main())
"""


@pytest.mark.usefixtures("new_interpreters")
@pytest.mark.parametrize("module", ["autotune.cli.commands.compare", "email.errors", "torch.nn", "torch.utils.data"])
def test_an_early_interrupt_is_one_line(module: str, tmp_path: Path) -> None:
    env = {**os.environ, "AUTOTUNE_DB": str(tmp_path / "a.db")}
    command = [sys.executable, "-c", _STEP, str(ROOT), module]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 130
    assert done.stderr == "autotune: interrupted; nothing was begun\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit(3)", "importing broken for broken:f failed: SystemExit: 3"),
        ("class Odd(BaseException): pass\nraise Odd('no')", "importing broken for broken:f failed: Odd: no"),
        ("import sys\ndef f(x): sys.exit('enough')\ndef make(): return torch.ones(8)", "SystemExit: enough"),
        ("import sys\ndef f(x): return x + 1\ndef make(): sys.exit()", "--inputs broken:make failed: SystemExit"),
        ("def f(x): return x + 1\ndef make(): return torch.ones(8, device='meta')", "the meta device have no data"),
        ("f = torch.nn.LayerNorm(8, device='meta')\ndef make(): return torch.ones(8)", "the meta device have no data"),
    ],
)
def test_faults_of_the_users_code_are_reported_in_one_line(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("import torch\n" + text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    args = ["search", "fusion", "broken:f", "--inputs", "broken:make", "--device", "cpu"]
    assert main([*args, "--db", str(tmp_path / "a.db")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
