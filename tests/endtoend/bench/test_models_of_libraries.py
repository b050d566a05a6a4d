"""Models of transformers and timm with a stored kernel for each region: right, in as many graphs as torch.compile."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.model_check import wrong
from benchmarks.real import check
from benchmarks.real.families import FAMILIES
from benchmarks.real.further import FURTHER

MODELS = ("bert_large_train", "llama32_1b_infer", "vit_base_train")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_right_and_all_of_its_regions_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = (FAMILIES | FURTHER)[name.rpartition("_")[0]].library
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (extra bench)")
    monkeypatch.setenv("AUTOTUNE_DB", "")  # it is set below, and restored
    monkeypatch.setattr(check, "_set_caches", lambda folder, who: None)
    case = check.by_operators(name, "cpu", str(tmp_path))
    assert wrong(case) == []
    assert case["regions"] > 5
    assert case["library"] == library
