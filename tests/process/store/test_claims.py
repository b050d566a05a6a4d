"""Leases on candidates, and several processes that contend for them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from autotune.store import Key, Measurement, Store, owner_name
from autotune.store.tables import measurements as claims
from autotune.store.tables.measurements import owner_is_dead
from autotune.task import Status
from tests.support.rows import put_key, workload

CONFIG = {"threads": 32}
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def dead_pid(spawn: Spawn) -> int:
    process = spawn("pass")
    process.wait(550)
    return process.pid


def test_one_owner_at_a_time(store: Store, key: Key) -> None:
    a, b = owner_name(), owner_name()
    assert store.claim(key, CONFIG, "screen", a, 60)
    assert not store.claim(key, CONFIG, "screen", b, 60)
    assert store.claim(key, CONFIG, "screen", a, 60)  # its own again
    assert store.claim(key, CONFIG, "repeat", b, 60)  # another stage is another claim
    assert store.claim(key, {"threads": 64}, "screen", b, 60)
    assert store.claim(put_key(store, workload(2)), CONFIG, "screen", b, 60)
    assert store.stats()["claims"] == 4


def test_release(store: Store, key: Key) -> None:
    a, b = owner_name(), owner_name()
    store.claim(key, CONFIG, "screen", a, 60)
    assert not store.release(key, CONFIG, "screen", b)
    assert store.release(key, CONFIG, "screen", a)
    assert not store.release(key, CONFIG, "screen", a)
    assert store.claim(key, CONFIG, "screen", b, 60)
    assert store.claim(key, {"threads": 64}, "screen", b, 60)
    assert store.release_all(b) == 2
    assert store.stats()["claims"] == 0


def test_measured_candidates_cannot_be_claimed_and_measuring_drops_the_claim(store: Store, key: Key) -> None:
    a = owner_name()
    store.claim(key, CONFIG, "screen", a, 60)
    store.add_measurement(Measurement(key, CONFIG, Status.CRASHED, reason="hung"))
    assert store.stats()["claims"] == 0
    assert not store.claim(key, CONFIG, "screen", a, 60)
    assert store.stats()["claims"] == 0


def test_a_lease_runs_out_unless_renewed(store: Store, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = owner_name(), owner_name()
    now = [1000.0]
    monkeypatch.setattr(claims, "time", SimpleNamespace(time=lambda: now[0]))
    store.claim(key, CONFIG, "screen", a, 10)
    assert store.renew(a, 60) == 1
    now[0] += 20
    assert not store.claim(key, CONFIG, "screen", b, 60)
    now[0] += 50
    assert store.claim(key, CONFIG, "screen", b, 60)
    assert store.renew(a, 60) == 0


def test_a_dead_owner_on_this_host_is_taken_over_at_once(store: Store, key: Key, dead_pid: int) -> None:
    dead = f"{socket.gethostname()}:{dead_pid}:x"
    assert store.claim(key, CONFIG, "screen", dead, 3600)
    assert store.claim(key, CONFIG, "screen", owner_name(), 60)
    elsewhere = f"another-host:{dead_pid}:x"
    assert store.claim(key, CONFIG, "repeat", elsewhere, 3600)
    assert not store.claim(key, CONFIG, "repeat", owner_name(), 60)


def test_owner_is_dead(dead_pid: int) -> None:
    assert not owner_is_dead(owner_name())
    host = owner_name().split(":", 1)[0]
    assert owner_is_dead(f"{host}:{dead_pid}:abc")
    for odd in ("", "nonsense", "a:b", f"{host}:notanumber:x", f"elsewhere:{dead_pid}:x"):
        assert not owner_is_dead(odd)


CLAIM_AND_WAIT = """
import json, sys, time
from autotune.store import Key, Store, owner_name
store = Store.open(sys.argv[1])
print(store.claim(Key(*json.loads(sys.argv[2])), {"threads": 32}, "screen", owner_name(), 3600), flush=True)
time.sleep(600)
"""


def test_sigkill_frees_a_claim(store: Store, key: Key, spawn: Spawn) -> None:
    parts = json.dumps([key.workload, key.device, key.environment, key.policy])
    process = spawn(CLAIM_AND_WAIT, store.url, parts)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "True"
    assert not store.claim(key, CONFIG, "screen", owner_name(), 60)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(250)
    assert store.claim(key, CONFIG, "screen", owner_name(), 60)


SEARCH = """
import json, os, sys, time
from autotune.store import Key, Measurement, Store, owner_name
from autotune.task import Status
store, key, me = Store.open(sys.argv[1]), Key(*json.loads(sys.argv[2])), owner_name()
print("ready", flush=True); sys.stdin.readline()
measured = []
for i in range(int(sys.argv[3])):
    if store.claim(key, {"i": i}, "screen", me, 60):
        time.sleep(0.005)  # measuring
        if store.add_measurement(Measurement(key, {"i": i}, Status.OK, latency_us=i + 1.0, run=str(os.getpid()))):
            measured.append(i)
        else: sys.exit("claimed, and measured by another all the same")
    store.add_measurement(Measurement(key, {"mine": os.getpid(), "i": i}, Status.TIMEOUT))
print(json.dumps(measured))
"""


def test_searches_at_the_same_time_lose_and_repeat_nothing(store: Store, key: Key, spawn: Spawn) -> None:
    parts = json.dumps([key.workload, key.device, key.environment, key.policy])
    n, many = 40, 4
    processes = [spawn(SEARCH, store.url, parts, str(n), stdin=subprocess.PIPE) for _ in range(many)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    shares = []
    for process in processes:
        out, error = process.communicate(timeout=550)
        assert process.returncode == 0, error
        shares.append(json.loads(out))
    assert sorted(i for share in shares for i in share) == list(range(n))
    assert sum(map(bool, shares)) > 1, "they ran one after another: the test proves nothing"
    assert sorted(int(str(m.config["i"])) for m in store.measurements(status=Status.OK)) == list(range(n))
    assert len(store.measurements(status=Status.TIMEOUT)) == n * many
    assert store.best(key)[0].config == {"i": 0}
    assert store.stats()["claims"] == 0
