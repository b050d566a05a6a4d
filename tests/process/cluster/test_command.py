"""``autotune search --ray``: mistakes that it finds before a cluster is asked, in one line each."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from autotune.cli.app import main
from autotune.errors import UserError
from autotune.store import Store
from autotune.tuner.cluster import engine as engines
from autotune.tuner.cluster.cluster import check_reachable
from autotune.tuner.cluster.engine import Node

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
        "autotune: --ray needs Ray, which is not installed: run `pip install 'autotune-torch[ray]'`"
    )


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:9", "nothing answers there"), ("nonsense", "not an address"), ("ray://head:10001", "on a node of")],
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
        assert "no Ray cluster answers there" in refused(capsys, *TARGET, f"127.0.0.1:{server.getsockname()[1]}")


def test_a_database_in_a_file_serves_this_host_alone(tmp_path: Path) -> None:
    here, other = Node("a", "one", "10.0.0.1", 1, 0), Node("b", "two", "10.0.0.2", 1, 0)
    with Store.open(tmp_path / "x.db") as store:
        check_reachable(store, [here], "10.0.0.1")
        with pytest.raises(UserError, match=r"x\.db is a file of this host, and two is another host: .* PostgreSQL"):
            check_reachable(store, [here, other], "10.0.0.1")
