"""``autotune search --ray``: what it prints, its mistakes in one line each, and no password anywhere."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from pathlib import Path

import pytest

from autotune import api
from autotune.cli.app import main
from autotune.errors import UserError
from autotune.store import Store
from autotune.tuner.cluster import engine as engines
from autotune.tuner.cluster.cluster import Cluster, check_reachable
from autotune.tuner.cluster.engine import Engine, Node
from tests.support.ray_cluster import LocalCluster, until
from tests.support.toy.policy import QUICK
from tests.support.toy.toy_domain import workload as toy

pytestmark = pytest.mark.usefixtures("formula")

TARGET = ["search", "fusion", "layer_norm", "--ray"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that is refused."""
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    return line


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused(capsys, *TARGET, "auto") == (
        "autotune: --ray needs Ray, which is not installed: pip install 'autotune[ray]'"
    )


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:9", "nothing answers there"), ("nonsense", "no address"), ("ray://head:10001", "on a node of")],
)
def test_an_address_that_is_none(address: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    line = refused(capsys, *TARGET, address)
    assert f"--ray {address}: " in line
    assert said in line


def test_who_listens_and_is_no_cluster_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr(engines, "_HEALTH_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        begin = time.monotonic()
        assert "no Ray cluster answers there" in refused(capsys, *TARGET, f"127.0.0.1:{server.getsockname()[1]}")
        assert time.monotonic() - begin < 20


def test_a_database_in_a_file_serves_this_host_alone(tmp_path: Path) -> None:
    here, other = Node("a", "one", "10.0.0.1", 1, 0), Node("b", "two", "10.0.0.2", 1, 0)
    with Store.open(tmp_path / "x.db") as store:
        check_reachable(store, [here], "10.0.0.1")
        with pytest.raises(UserError, match=r"x\.db is a file of this host, and two is another: .* PostgreSQL"):
            check_reachable(store, [here, other], "10.0.0.1")


@pytest.mark.slow
def test_mistakes_that_the_cluster_tells(
    ray_cluster: LocalCluster, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with contextlib.closing(Engine(ray_cluster.address)) as engine:
        assert until(
            lambda: not any(node.gpus for node in engine.nodes())
        )  # the cluster knows that an earlier test's died
    capsys.readouterr()  # Ray said so
    ray = [*TARGET, ray_cluster.address]
    assert "no node of the cluster" in refused(capsys, *ray, "--device", "cuda")
    assert "on a cluster it is auto, cpu or cuda" in refused(capsys, *ray, "--device", "cuda:1")
    module = ["search", "fusion", "no.such.module:f", "--inputs", "no.such.module:g", "--ray", ray_cluster.address]
    line = refused(capsys, *module, "--device", "cpu", "--db", postgres_url)
    assert "no module 'no' for" in line
    assert f"(on {socket.gethostname()})" in line
    monkeypatch.setattr(Engine, "host", property(lambda engine: "10.9.9.9"))
    line = refused(capsys, *ray, "--device", "cpu", "--db", str(tmp_path / "x.db"))
    assert "needs PostgreSQL" in line


@pytest.mark.slow
def test_a_domain_of_ones_own_is_searched_on_the_nodes(
    ray_cluster: LocalCluster, postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOTUNE_DOMAINS", "gelu=examples.blocked_gelu.domain")
    words = ["search", "gelu", "65536", "--device", "cpu", "--ray", ray_cluster.address, "--db", postgres_url]
    assert main([*words, "--trials", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["measured"] == 2
    assert answer["match"] == "exact"
    assert "4 nodes of the Ray cluster" in err
    assert "2 of 2 measured" in err


@pytest.mark.slow
def test_no_password_is_told_to_anyone(
    ray_cluster: LocalCluster, cluster: Cluster, postgres_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither in what is printed nor in any file that Ray keeps of the session, also where an actor dies."""
    secret = "hunter2xyz"
    url = postgres_url.replace("autotune@", f"autotune:{secret}@")
    assert secret in url
    with Store.open(url) as store:
        (found,) = api.tune_workloads([toy()], "cpu", store, trials=2, policy=QUICK, cluster=cluster)
        assert found.ok
        with pytest.raises(UserError, match="on a node: RuntimeError: no_such thing"):
            cluster.call(_fails, None, store)
    told = capfd.readouterr()
    assert secret not in told.out + told.err
    files = [path for path in Path(ray_cluster.folder).rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def _fails(args: object, device: str, store: Store) -> None:
    raise RuntimeError("no_such thing")
