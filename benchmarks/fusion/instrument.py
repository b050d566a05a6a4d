"""Kernel times of contenders in a separate process: ``python -m benchmarks.fusion.instrument``.

Requests are lines of JSON on stdin, answers on stdout. The profiler changes how later work in its process is launched,
and JAX brings a second client of the device with a memory pool: neither belongs into the process that times replays.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from autotune.bench.contenders import ProcessLock, inductor_takes_lock
from autotune.errors import first_line

CONTENDERS = ("eager", "inductor", "inductor_best", "autotune", "xla")


class Instrument:
    """The process, started when it is first asked and again after it died.

    Args:
        device: "cuda:N".
        db: database that autotune's contender looks up; None for the default.
        timeout: seconds a case may take, compiling and waiting for a turn on the device included.
        lock_s: seconds to wait for a turn.
    """

    def __init__(self, device: str, db: str | None, timeout: float = 300.0, lock_s: float = 600.0) -> None:
        self.device, self.db, self.timeout, self.lock_s = device, db, timeout, lock_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Instrument:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def ask(self, case: str, size: str, contenders: Sequence[str], best: Mapping[str, Any]) -> dict[str, Any]:
        """Kernel times of a case's contenders.

        What keeps XLA from being measured costs no other contender its figures.

        Args:
            contenders: of :data:`CONTENDERS`.
            best: Inductor's options for "inductor_best".

        Returns:
            ``times``, a mapping of contenders to ``{"us": .., "kernels": ..}``; ``errors``, of those that have none to
            the reason; ``versions``.
        """
        request = {"case": case, "size": size, "device": self.device, "lock_s": self.lock_s, "best": dict(best)}
        answer = self._exchange({**request, "contenders": list(contenders)})
        if "times" in answer:
            return answer
        errors = dict.fromkeys(contenders, answer["error"])
        without = [name for name in contenders if name != "xla"]
        if without and len(without) < len(contenders):
            again = self._exchange({**request, "contenders": without})
            if "times" in again:
                again["errors"] = {"xla": answer["error"], **again["errors"]}
                return again
        return {"times": {}, "errors": errors, "versions": {}}

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer, or ``{"error": ...}``; after a silence or death the process is replaced at the next request."""
        try:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as waiting:
                waiting.register(process.stdout, selectors.EVENT_READ)
                ready = bool(waiting.select(self.timeout))
            line = process.stdout.readline() if ready else ""
        except (OSError, ValueError) as error:
            self.close()
            return {"error": f"the profiling process broke off: {error}"}
        if not line:
            self.close()
            why = "died" if ready else f"did not answer within {self.timeout:.0f} s"
            return {"error": f"the profiling process {why}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            if self.db is not None:
                environment["AUTOTUNE_DB"] = self.db
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fusion.instrument"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        return self._process


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request in this process; see :meth:`Instrument.ask`."""
    import torch

    from benchmarks.fusion import peers
    from benchmarks.fusion.kernel_times import TraceError, kernel_times
    from benchmarks.fusion.suite import CASES
    from benchmarks.fusion.xla import NoXla, xla

    case = CASES[request["case"]]
    torch.cuda.set_device(request["device"])
    args = case.arguments(request["size"], request["device"])
    makers: dict[str, Callable[[], peers.Call]] = {
        "eager": lambda: peers.eager(case.fn, args),
        "inductor": lambda: peers.inductor(case.fn, args),
        "inductor_best": lambda: peers.inductor(case.fn, args, request["best"]),
        "autotune": lambda: peers.deployed(case.fn, args),
        "xla": lambda: xla(case, args),
    }
    calls: dict[str, peers.Call] = {}
    errors: dict[str, str] = {}
    lock = ProcessLock(request["device"], request["lock_s"])
    with inductor_takes_lock(lock):
        for name in request["contenders"]:
            try:
                calls[name] = makers[name]()
            except NoXla as error:
                errors[name] = str(error)
            except Exception as error:
                errors[name] = first_line(error)
    with lock.exclusive():
        try:
            times = kernel_times(calls)
        except TraceError:
            if "xla" not in calls:
                raise
            del calls["xla"]
            errors["xla"] = "the profiler did not see its kernels"
            times = kernel_times(calls)
    calls.clear()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    found = {name: {"us": round(t.us, 3), "kernels": t.kernels} for name, t in times.items()}
    return {"times": found, "errors": errors, "versions": _versions()}


def _versions() -> dict[str, str]:
    jax = sys.modules.get("jax")
    return {"jax": str(jax.__version__)} if jax is not None else {}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        try:
            answer = measure(json.loads(line))
        except Exception as error:
            answer = {"error": first_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # Compilers and libraries may print: stdout is kept for answers.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        serve(sys.stdin, out)
