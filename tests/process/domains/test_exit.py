"""The end of a process that has used ``autotune.overlap``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")

_RANK = """
import atexit, os, sys, time
from pathlib import Path

def gloo():
    names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
    return sum(name == "pt_gloo_runloop" for name in names)

def settled():  # a thread gives itself its name, some time after it has begun
    seen = []
    while len(seen) < 4 or len(set(seen[-4:])) > 1:
        seen.append(gloo())
        time.sleep(0.3)
    return seen[-1]

atexit.register(lambda: print(gloo(), flush=True))  # the first to be registered, the last to be called
import torch
import torch.distributed as dist
import autotune
rank, store = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=2)
dist.barrier()
mine = settled()
x, shard = torch.randn(8, 8), torch.randn(64)
op = autotune.overlap(torch.nn.Linear(8, 8), "all_gather", like=shard, inputs=x)
with torch.no_grad():
    op(x, shard)
print(mine, settled(), flush=True)
if rank == "1":
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("new_interpreters")
def test_no_thread_of_ours_is_there_when_the_interpreter_goes(tmp_path: Path) -> None:
    """One that drops a tensor then aborts the process. The user's own group is the user's: rank 0 leaves it as it is,
    and rank 1 destroys it."""
    env = {**os.environ, "AUTOTUNE_DB": str(tmp_path / "none.db"), "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate(timeout=550)
        assert rank.returncode == 0, err
        users, all_of_them, at_exit = map(int, out.split())
        assert all_of_them > users >= at_exit
