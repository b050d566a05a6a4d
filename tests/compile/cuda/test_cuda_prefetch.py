"""Instructions of a row-wise kernel before its first reduction, in its PTX: no branches between loads,
tables' rows by vectors."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from autotune.compiler.program.passes import build_program
from autotune.compiler.program.vectors import vector_length
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.domains.fusion.task import FusionTask
from autotune.space import load_space
from tests.support.zoo import (
    BF16,
    BOOL,
    I64,
    Case,
    T,
    dropout_residual_ln,
    embeddings_ln_dropout,
    workloads,
    workloads_of,
)

NAMES = ("dropout_residual_ln", "embeddings_ln_dropout")
COLUMN = T(768, d=BF16)
BERT = Case("layer", dropout_residual_ln, (T(4096, 768, d=BF16), T(4096, 768, d=BF16), COLUMN, COLUMN))
IDS = T(32, 128, d=I64)
BERT_BEGIN = Case(
    "begin",
    embeddings_ln_dropout,
    (T(30522, 768, d=BF16), IDS, T(128, 768, d=BF16), T(2, 768, d=BF16), IDS, COLUMN, COLUMN),
)


def ptx_of(name: str, **changes: object) -> list[str]:
    """Lines of the kernel of a region of one group: its default with some parameters changed."""
    (work,) = workloads(name)
    (group,) = FusionTask(work, "cuda:0", target="sm_90", sms=132).plan.groups
    scheme = scheme_of(group.graph)
    threads, width = (8, 16) if name == NAMES[1] else (4, 8)  # three packs a thread
    shape = {"threads_per_row": threads, "rows_per_block": 64 // threads, "vector_bytes": width}
    config = scheme.normalize(group.graph, scheme.default(group.graph) | shape | changes)
    assert scheme.reject(group.graph, config) is None
    (source,) = scheme.emit(group.graph, config, 132).sources
    return compile_ptx(source, "sm_90")[0].splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_branched_round(name: str) -> None:
    """Several packs a thread and several rows a block, the last of which may be absent: one block of instructions,
    and stores under a predicate."""
    lines = ptx_of(name)
    assert not [line for line in lines if re.search(r"\bbra\b", line)]
    assert [line for line in lines if re.search(r"@q st\.global\.v[24]", line)]


def test_rows_of_a_table_are_gathered_by_vectors() -> None:
    lines = ptx_of("embeddings_ln_dropout")
    guarded = [line for line in lines if "@q ld.global" in line]
    assert len(guarded) == 3 * 3  # three tables, three packs
    assert all("@q ld.global.nc.v4.u32" in line for line in guarded)


def test_packs_of_a_tensor_have_one_address() -> None:
    """The second and the third pack are a constant number of bytes after the first."""
    lines = ptx_of("dropout_residual_ln")
    for apart in (64, 128):  # of weights and biases, which have no row; the others' are sums with theirs
        assert sum(bool(re.search(rf"add\.s64 .*, {apart};", line)) for line in lines) >= 3
    assert not [line for line in lines if re.search(r"add\.s64 .*, \d{10,};", line)]  # places have 32 bits


def test_bytes_of_a_mask_are_selected_where_they_belong() -> None:
    lines = ptx_of("dropout_residual_ln")
    assert [line for line in lines if re.search(r"selp\.b32 .* 16777216, 0, ", line)]


@pytest.mark.parametrize("case", [BERT, BERT_BEGIN], ids=str)
def test_a_short_search_meets_whole_rows(case: Case) -> None:
    """Of the first three candidates none has threads without elements: rows of 768 are 96 vectors of 16 bytes."""
    (work,) = workloads_of(case)
    (group,) = FusionTask(work, "cuda:0", target="sm_90", sms=132).plan.groups
    scheme = scheme_of(group.graph)
    begin = [scheme.default(group.graph), *scheme.seeds(group.graph)][:3]
    assert [(c["threads_per_row"], bool(c["max_registers"])) for c in begin] == [(96, False), (32, True), (96, True)]
    for config in begin:
        assert scheme.reject(group.graph, config) is None
        vec = vector_length(build_program(group.graph), int(config["vector_bytes"]))
        assert vec == 8
        assert 768 % (int(config["threads_per_row"]) * vec) == 0


def test_a_mask_with_the_widest_type_leaves_the_default_in_the_space() -> None:
    def sums(x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        return (x * m).sum(-1), torch.where(m, x, x.amax(-1, keepdim=True))

    (work,) = workloads_of(Case("sums", sums, (T(33, 768, d=I64), T(33, 768, d=BOOL))))
    (group,) = FusionTask(work, "cuda:0", target="sm_90", sms=132).plan.groups
    scheme = scheme_of(group.graph)
    assert scheme.name == "rows"
    assert scheme.space_of(group.graph, load_space("fusion", "cuda")).contains(scheme.default(group.graph))
