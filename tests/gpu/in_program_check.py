"""Kill programs in the middle of their search: each next one trains on, and the database stays whole.

    python -m tests.gpu.in_program_check --kills 30 --device cuda

A program trains a model with ``options={"search": S}``. SIGKILL, SIGTERM or SIGINT ends it after a random time. After
each kill the database is checked, and a program without a search trains from it. At the end a program is left to
itself: it finishes its search and its contest, with the losses of eager mode.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 80
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def program(device: str, seconds: float) -> None:
    """Train, and print the losses; ``seconds`` 0 searches nothing."""
    import torch
    from torch import nn

    import autotune
    from autotune.in_program.backend import dynamo_backend

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(512, 512), nn.LayerNorm(512)

        def forward(self, x: Any, y: Any) -> Any:
            return nn.functional.mse_loss(self.norm(nn.functional.gelu(self.linear(x)) + x), y)

    def train(compiled: bool, steps: int) -> list[float]:
        torch.manual_seed(0)
        model = Model().to(device)
        x, y = torch.randn(2, 4096, 512, device=device)
        options = {"search": seconds} if seconds else None
        run = torch.compile(model, backend=dynamo_backend, options=options) if compiled else model
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
        for _ in range(steps):
            loss = run(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    steps = STEPS if seconds else 3
    print(json.dumps({"losses": train(True, steps), "eager": train(False, 3), "hits": autotune.counters().hits}))


def run(folder: Path, device: str, seconds: float, env: dict[str, str]) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.gpu.in_program_check", "--program", str(seconds), "--device", device]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def right(answer: str) -> str:
    """The faults of a program's losses; "" for none."""
    found = json.loads(answer.splitlines()[-1])
    pairs = zip(found["losses"], found["eager"], strict=False)
    return "" if all(abs(a - b) <= 1e-3 * abs(b) for a, b in pairs) else f"losses {found['losses'][:3]}"


def damaged(db: Path) -> str:
    """SQLite's report of a damaged database; "" for a sound or a missing one."""
    if not db.exists():
        return ""
    with sqlite3.connect(db) as connection:
        ((answer,),) = connection.execute("PRAGMA integrity_check").fetchall()
    return "" if answer == "ok" else str(answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--search", type=float, default=60.0, metavar="S")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--program", type=float, metavar="S", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program is not None:
        program(args.device, args.program)
        return 0
    chance, bad = random.Random(0), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = {"AUTOTUNE_DB": str(folder / "tuned.db"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        env = {**os.environ, **own, "AUTOTUNE_PACKAGED": "refuse"}
        for k in range(args.kills):
            running, after = run(folder, args.device, args.search, env), chance.uniform(5.0, args.search + 30.0)
            with_signal = SIGNALS[k % len(SIGNALS)]
            begin = time.monotonic()
            while running.poll() is None and time.monotonic() - begin < after:
                time.sleep(0.2)
            ended = running.poll() is not None
            running.send_signal(with_signal)
            running.communicate(timeout=120)
            done = run(folder, args.device, 0.0, env)
            out, err = done.communicate(timeout=600)
            why = damaged(folder / "tuned.db") or (err[-300:] if done.returncode else right(out))
            bad += bool(why)
            how = "had ended" if ended else f"{with_signal.name} after {after:.0f} s"
            print(f"{k + 1}: {how}: {why or 'right'}", flush=True)
        last = run(folder, args.device, args.search, env)
        out, err = last.communicate(timeout=args.search + 900)
        why = err[-300:] if last.returncode else right(out)
        print(f"left to itself: {why or 'right'}, {json.loads(out.splitlines()[-1])['hits'] if out else 0} kernels")
        bad += bool(why)
    print(f"{args.kills} kills, {bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
