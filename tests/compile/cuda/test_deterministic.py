"""`torch.use_deterministic_algorithms` needs nothing of autotune: no kernel counts on who comes first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autotune
from autotune.compiler.assemble import draft
from autotune.compiler.planner.groups import group_configs
from autotune.domains.fusion.task import FusionTask
from tests.support.zoo import ZOO, random_configs, workloads

INTRINSICS = Path(autotune.__file__).parent / "compiler" / "targets" / "cuda"
ADDS_UP = re.compile(r"\b(atom|red|multimem)\.|atomic", re.IGNORECASE)
"""Operations whose order the device decides, in PTX and in Numba."""


def test_no_intrinsic_is_atomic() -> None:
    texts = {path.name: path.read_text() for path in INTRINSICS.glob("*intrinsics.py")}
    assert len(texts) > 1
    assert [name for name, text in texts.items() if ADDS_UP.search(text)] == []


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_no_kernel_is_atomic(case) -> None:
    """By default and under other configurations; the text is what the compiler gets."""
    for work in workloads(case.name):
        task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
        for config in (task.default(), *random_configs(task, 2, seed=1)):
            plan = task.plan_of(config)
            drafts, _ = draft(task.graph, plan, group_configs(plan, config), 132)
            assert drafts
            for made in drafts:
                assert "def " in made.source.text
                assert not ADDS_UP.search(made.source.text)
