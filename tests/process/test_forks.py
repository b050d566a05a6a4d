"""Forks that replace new Python processes in all other tests behave as new processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.measure import child
from tests.support import forks


def _python(code: str, *args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, **options
    )


def test_a_fork_is_a_child_with_all_that_it_was_given(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getppid(), os.getcwd(), sys.argv, os.environ['A'], sys.stdin.read(), os.getsid(0))"
    env = {**os.environ, "A": "B"}
    done = _python(code, "x", env=env, cwd=tmp_path, input="in", start_new_session=True)
    parent, *rest, session = done.stdout.split()
    assert (parent, rest) == (str(os.getpid()), [str(tmp_path), "['-c',", "'x']", "B", "in"]), done
    assert int(session) != os.getsid(0)


def test_it_ends_as_a_process_does() -> None:
    assert _python("import sys; print(1); sys.exit(3)").returncode == 3
    told = _python("import sys; sys.exit('no')")
    assert (told.returncode, told.stderr) == (1, "no\n")
    failed = _python("1 / 0")
    assert failed.returncode == 1
    assert "ZeroDivisionError: division by zero" in failed.stderr.splitlines()  # Triton's library adds lines
    assert _python("import atexit; atexit.register(print, 'end')").stdout == "end\n"
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.terminate()
    assert process.wait() == -signal.SIGTERM


def test_processes_of_the_package_are_forks_without_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new interpreter for each worker, lane and rank would take most of the time of the tests."""
    (tmp_path / "queue.py").write_text("raise SystemExit('the queue of the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*dict.fromkeys(filter(None, sys.path))])
    words, environ = child.interpreter()
    assert forks._server is not None
    program = "import sys; print('torch' in getattr(sys, 'mod' + 'ules'), sys.path, sys.argv)"
    run = [*words, "-c", f"import queue; {program}", "x"]
    done = subprocess.run(run, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("True ["), done
    assert done.stdout.endswith("] ['-c', 'x']\n"), done
    with forks.new_interpreters():
        other = subprocess.run([*words, "-c", program, "x"], env=environ, capture_output=True, text=True, check=False)
    assert other.stdout.removeprefix("False ") == done.stdout.removeprefix("True ")


def test_what_it_writes_without_a_buffer_arrives_at_once() -> None:
    code = "import sys; print('first'); sys.stdout.write('second '); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(len("first\nsecond ")) == b"first\nsecond "
        process.stdin.close()
        assert process.wait() == 0


def test_it_starts_others_and_they_are_its_children() -> None:
    inner = "import os; print(os.getppid())"
    code = f"import os, subprocess, sys; print(os.getpid()); subprocess.run([sys.executable, '-c', {inner!r}])"
    own, parent_of_inner = _python(f"import sys; {code}").stdout.split()
    assert own == parent_of_inner


def test_programs_that_check_imports_or_set_libraries_get_a_new_interpreter(request: pytest.FixtureRequest) -> None:
    imported = "import sys; print('torch' in getattr(sys, 'mod' + 'ules'))"
    assert forks._server is not None
    own = forks._server._environment  # a library that a test has imported since may have set environment variables
    assert _python(imported, env=own).stdout == "True\n"
    assert _python(imported, env={**own, "NUMBA_OPT": "1"}).stdout == "False\n"
    assert _python("import sys; print('torch' in sys.modules)").stdout == "False\n"
    request.getfixturevalue("new_interpreters")
    assert _python(imported).stdout == "False\n"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The text of a server that starts at once."""
    package = tmp_path / "tests" / "support"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    monkeypatch.setattr(forks, "ROOT", tmp_path)
    return package / "fork_server.py"


def test_the_server_finds_modules_of_pythonpath(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "dependency.py").write_text("NUMBER = 7")
    stub.write_text("""
import socket
def main(descriptor, many):
    import dependency
    requests = socket.socket(fileno=descriptor)
    requests.recv(1 << 16)
    requests.sendall(dependency.NUMBER.to_bytes(8, "little"))
""")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "elsewhere"), str(tmp_path / "no such folder")]))
    server = forks.Server()
    assert server.fork({}, [0, 1, 2]) == 7
    server.close()


def test_the_end_of_a_server_is_an_error_with_its_reason(stub: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stub.write_text("""
def main(descriptor, many):
    import no_such_module
""")
    server = forks.Server()
    for _ in range(2):
        with pytest.raises(forks.ForkError, match="The tests' fork server ended with exit code 1"):
            server.fork({}, [0, 1, 2])
    assert "No module named 'no_such_module'" in capfd.readouterr().err
    server.close()


def test_a_process_that_the_system_refuses_is_an_error() -> None:
    code = """
import os, socket
from tests.support import fork_server, forks
ours, theirs = socket.socketpair()
fork = os.fork
if not (server := fork()):
    ours.close()
    own = os.getpid()
    def refuse_second():
        if os.getpid() != own:
            raise BlockingIOError(11, "no more processes")
        return fork()
    os.fork = refuse_second
    fork_server._serve(theirs)
theirs.close()
for _ in range(2):  # the server goes on
    try:
        forks.Server(ours).fork({}, [0, 1, 2])
    except forks.ForkError as error:
        print(error)
"""
    done = _python(code, timeout=60)
    assert done.stdout.count("The tests' fork server got no process from the system.") == 2, done
    assert "no more processes" in done.stderr


@pytest.mark.usefixtures("new_interpreters")
def test_fork_server_compiles_without_autograd_before_forks() -> None:
    """A build of torch for GPUs starts threads with the first backward pass, after which it refuses to run in forks."""
    code = """
from unittest import mock
import torch
from tests.support import fork_server
with mock.patch.object(torch.autograd, "_engine_run_backward", side_effect=SystemExit("autograd ran")):
    fork_server._compile_once()
assert len(torch._inductor.fx_passes.joint_graph.patterns.patterns) > 0  # it did compile
pid = fork_server.os.fork()
if not pid:
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    fork_server.os._exit(int(x.grad.sum()))
print(fork_server.os.waitstatus_to_exitcode(fork_server.os.waitpid(pid, 0)[1]))
"""
    done = _python(code)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
