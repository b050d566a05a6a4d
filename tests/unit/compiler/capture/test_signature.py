"""A module is captured once: its signature has everything that its capture depends on, or is None."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.compiler.capture import signature as signatures
from autotune.compiler.capture.signature import _real, signature
from autotune.domains.fusion import program_spec as targets
from autotune.store import Store

X = torch.zeros(4, 16)


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.scale = 2.0
        self.sizes = [1, 2]

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.dropout(self.norm(x)) * self.scale
        return y if bias is None else y + bias


def signed(block: nn.Module, *args: object, train: bool = False, device: str = "cpu", **kwargs: object) -> str | None:
    return signature(block, args or (X,), kwargs, train=train, device=device)


def test_equal_modules_with_any_values_have_equal_signatures() -> None:
    other = Block()
    with torch.no_grad():
        other.norm.weight.fill_(3.0)
    assert signed(Block()) == signed(Block()) == signed(other, torch.ones(4, 16))


def changed(change: Callable[[Block], object]) -> Block:
    block = Block()
    change(block)
    return block


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "scale", 3.0),
        lambda b: setattr(b, "scale", 2),
        lambda b: b.sizes.append(3),
        lambda b: b.eval(),
        lambda b: b.to(torch.bfloat16),
        lambda b: b.requires_grad_(False),
        lambda b: setattr(b.dropout, "p", 0.2),
        lambda b: setattr(b.norm, "eps", 1e-3),
        lambda b: setattr(b, "more", nn.ReLU()),
        lambda b: setattr(b.norm, "bias", b.norm.weight),
        lambda b: b.register_buffer("table", torch.zeros(3)),
    ],
)
def test_signature_changes_with_every_input_of_the_capture(change: Callable[[Block], object]) -> None:
    found = signed(changed(change))
    assert found is not None
    assert found != signed(Block())


def test_inputs_and_how_count() -> None:
    base = signed(Block())
    others = [
        signed(Block(), torch.zeros(8, 16)),
        signed(Block(), torch.zeros(16, 4).t()),
        signed(Block(), X.double()),
        signed(Block(), X, X),
        signed(Block(), X, bias=X),
        signed(Block(), train=True),
        signed(Block(), device="cuda:0"),
        signed(Block(), X.clone().requires_grad_()),
    ]
    assert None not in others
    assert len({base, *others}) == len(others) + 1
    with torch.autocast("cpu"):
        cast = signed(Block())
    with torch.autocast("cpu", dtype=torch.float16):
        assert len({signed(Block()), cast, base}) == 3


def test_signature_is_none_for_unknown_state() -> None:
    assert signature(lambda x: x, (X,), {}, train=False, device="cpu") is None
    closure = X
    assert signed(changed(lambda b: setattr(b, "act", lambda x: x + closure))) is None
    assert signed(changed(lambda b: setattr(b, "thing", object()))) is None
    assert signed(changed(lambda b: b.norm.register_forward_hook(lambda *a: None))) is None
    assert signed(Block(), object()) is None


def test_functions_and_classes_count_where_their_names_lead_to_them() -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return x

    typed: dict[str, object] = {"__name__": "typed_in"}
    exec("def act(x):\n    return x", typed)
    assert signed(changed(lambda b: setattr(b, "act", torch.nn.functional.gelu))) is not None
    assert signed(changed(lambda b: setattr(b, "act", signed))) is not None
    assert signed(changed(lambda b: setattr(b, "act", nn.GELU))) is not None
    assert signed(changed(lambda b: setattr(b, "act", int))) is not None
    for shared in (lambda x: x, local, type("Block", (), {}), typed["act"]):
        assert signed(changed(lambda b, act=shared: setattr(b, "act", act))) is None  # type: ignore[misc]


def test_modules_loaded_by_autotune_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "autotune.store.connection.migrate", raising=False)
    before = signed(Block())
    Store.open(tmp_path / "new.db").close()
    assert (
        "autotune.store.connection.migrate" in sys.modules
    )  # which an empty database takes, and the same one next time does not
    assert signed(Block()) == before is not None


def test_sources_count_by_their_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "signed_helper.py"
    source.write_text("WIDTH = 16\n")
    without = signed(Block())
    importlib.import_module("signed_helper")
    before = signed(Block())
    assert before != without
    os.utime(source, (1, 1))
    assert signed(Block()) == before
    source.write_text("WIDTH = 17\n")  # as long as before
    assert signed(Block()) != before
    monkeypatch.delitem(sys.modules, "signed_helper")
    assert signed(Block()) == without


def test_installed_packages_count_where_classes_are_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(signatures, "_installed", lambda: (os.path.realpath(tmp_path) + os.sep,))
    package = tmp_path / "signed_package"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "1"\n')
    (package / "nets.py").write_text("from torch import nn\n\nclass Net(nn.Module):\n    pass\n")
    nets = importlib.import_module("signed_package.nets")
    before = signed(nets.Net())
    assert before == signed(nets.Net()) is not None
    monkeypatch.setattr(sys.modules["signed_package"], "__version__", "2")
    newer = signed(nets.Net())
    (package / "nets.py").write_text("from torch import nn\n\nclass Net(nn.Module):\n    more = 1\n")
    assert len({before, newer, signed(nets.Net())}) == 3
    monkeypatch.delattr(nets, "__file__")  # as in a notebook, where the next cell may define it again
    assert signed(nets.Net()) is None


def test_signature_takes_pip_target_folders_as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host without a network, with packages in a folder of PYTHONPATH."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "signed_package").mkdir()
    (tmp_path / "signed_package" / "__init__.py").write_text("")
    (tmp_path / "signed_single.py").write_text("")
    (tmp_path / "signed_mine.py").write_text("")
    (tmp_path / "signed-1.0.dist-info").mkdir()
    record = "signed_package/__init__.py,sha256=abc,0\nsigned_single.py,,\n../bin/signed,,\n"
    (tmp_path / "signed-1.0.dist-info" / "RECORD").write_text(record)
    before = signed(Block())
    importlib.import_module("signed_package")
    importlib.import_module("signed_single")
    assert signed(Block()) == before is not None
    importlib.import_module("signed_mine")  # installed by the user in the same folder
    assert signed(Block()) != before


MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)

def inputs():
    return torch.zeros(8, {n})
"""


def test_the_second_search_takes_the_capture_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "signed_net.py").write_text(MODULE.format(n=32))
    with Store.open(tmp_path / "t.db") as store:
        first = targets.captured("signed_net:Net", "signed_net:inputs", "cpu", known=store.captured)
        assert not first.known
        for workload, _ in first.workloads:
            store.put_workload(workload)
        store.finish_run(store.start_run("search").id, "done", {"capture": first.to_json()})

        def again(*args: object, **kwargs: object) -> None:
            raise AssertionError("captured again")

        monkeypatch.setattr(targets, "workloads_of", again)
        second = targets.captured("signed_net:Net", "signed_net:inputs", "cpu", known=store.captured)
        assert second.known
        assert second.workloads == first.workloads
        assert [w.label for w, _ in second.workloads] == [w.label for w, _ in first.workloads]
        with pytest.raises(AssertionError, match="captured again"):
            targets.captured("signed_net:Net", "signed_net:inputs", "cpu", train=True, known=store.captured)
        (tmp_path / "signed_net.py").write_text(MODULE.format(n=32) + "\n# another text\n")
        with pytest.raises(AssertionError, match="captured again"):
            targets.captured("signed_net:Net", "signed_net:inputs", "cpu", known=store.captured)


def test_links_of_files_and_folders_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.py").touch()
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "real" / "b.py").symlink_to(tmp_path / "folder" / "a.py")
    folders: dict[str, str] = {}
    for name in ("real/a.py", "folder/a.py", "real/b.py", "folder/b.py", "folder/../folder/b.py", "none/c.py"):
        assert _real(str(tmp_path / name), folders) == os.path.realpath(tmp_path / name)
