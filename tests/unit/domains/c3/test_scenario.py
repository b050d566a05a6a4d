"""Scenarios: sizes, names, refusals, and scenarios that are the same workload."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autotune.domain import domain_of
from autotune.domains.c3.scenario import (
    COLLECTIVES,
    Gemm,
    Program,
    Scenario,
    format_bytes,
    parse_bytes,
    parse_gemm,
)
from autotune.errors import UserError

GEMM = Gemm(8192, 28672, 8192)


@pytest.mark.parametrize(
    ("op", "inputs", "outputs"),
    [("all_gather", 100, 400), ("all_to_all", 400, 400), ("reduce_scatter", 400, 100), ("all_reduce", 400, 400)],
)
def test_bytes_are_those_of_the_larger_buffer(op: str, inputs: int, outputs: int) -> None:
    scenario = Scenario(GEMM, op, 800, 4)
    assert (scenario.numel, scenario.part) == (400, 100)
    assert (scenario.input_numel, scenario.output_numel) == (inputs, outputs)


def test_an_all_reduce_need_not_divide() -> None:
    assert Scenario(GEMM, "all_reduce", 802, 4).part == 101
    with pytest.raises(UserError, match="use a multiple of 8"):
        Scenario(GEMM, "all_gather", 802, 4)
    with pytest.raises(UserError, match="use a multiple of 4"):
        Scenario(GEMM, "all_reduce", 802, 4, "f32")


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("compute", [GEMM, Gemm(1, 2, 3, "f32", "tn"), Program("softmax"), Program("a:b", "a:c")])
def test_json_makes_an_equal_scenario(op: str, compute: Gemm | Program) -> None:
    scenario = Scenario(compute, op, 960, 3, "f32")
    assert Scenario.from_json(json.loads(json.dumps(scenario.to_json()))) == scenario
    assert Scenario.from_json(scenario.workload().spec) == scenario


def test_json_of_another_version_is_refused() -> None:
    with pytest.raises(UserError, match="version 2"):
        Scenario.from_json({**Scenario(GEMM, "all_gather", 800, 4).to_json(), "version": 2})


def test_a_family_leaves_extents_and_bytes_open_and_nothing_else() -> None:
    scenario = Scenario(GEMM, "all_gather", 800, 4)
    here = scenario.workload()
    assert here.extent == 800
    assert here.label == "8192x28672x8192 bf16 | all_gather 800B x4"
    near = [replace(scenario, nbytes=1600), replace(scenario, compute=Gemm(1, 2, 3))]
    far = [replace(scenario, collective="all_to_all"), replace(scenario, ranks=2), replace(scenario, dtype="f32"),
           replace(scenario, compute=replace(GEMM, layout="nt")), replace(scenario, compute=replace(GEMM, dtype="f16")),
           replace(scenario, compute=Program("softmax"))]  # fmt: skip
    fingerprints = {here.fingerprint}
    for other in near + far:
        workload = other.workload()
        assert (workload.family == here.family) == (other in near)
        fingerprints.add(workload.fingerprint)
    assert len(fingerprints) == 1 + len(near) + len(far)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"collective": "broadcast"}, "unknown collective 'broadcast': use all_gather"),
        ({"dtype": "f64"}, "unknown dtype 'f64'"),
        ({"ranks": 1}, "2 ranks or more, not 1"),
        ({"nbytes": 0}, "0 bytes are not divisible"),
        ({"compute": Gemm(8, 0, 8)}, "not 8x0x8"),
        ({"compute": Gemm(8, 8, 8, "bf16", "nx")}, "layout 'nx'"),
        ({"compute": Gemm(8, 8, 8, "i8")}, "dtype 'i8'"),
    ],
)
def test_scenario_refuses_invalid_fields_in_one_line(change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        replace(Scenario(GEMM, "all_gather", 800, 4), **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("4GiB", 2**32), ("65536", 65536), ("100MB", 10**8), ("1.5 KiB", 1536), ("2g", 2**31),
     ("7b", 7), ("64k", 65536)],
)  # fmt: skip
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-5", "0", "0.3", "1e6", "5MiB5"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--bytes"):
        parse_bytes(text)


def test_sizes_are_written_as_they_are_read() -> None:
    for size in (1, 1023, 1024, 1536, 2**20, 3 * 2**20, 2**30, 2**31 + 2**20):
        assert parse_bytes(format_bytes(size)) == size
    assert format_bytes(512 * 2**20) == "512MiB"


def test_gemms_are_read() -> None:
    assert parse_gemm(" 8192x28672X8192 ", "f16", "nt") == Gemm(8192, 28672, 8192, "f16", "nt")
    assert parse_gemm("2x3x4") == Gemm(2, 3, 4)
    for text in ("8192x8192", "8192*8192*8192", "axbxc", "", "1x2x3x4", "-1x2x3"):
        with pytest.raises(UserError, match="write MxNxK"):
            parse_gemm(text)


def test_memory_is_that_of_the_buffers_and_the_matrices() -> None:
    scenario = Scenario(Gemm(256, 128, 64, "bf16"), "all_gather", 1 << 20, 4, "f32")
    matrices = (256 * 64 + 64 * 128 + 256 * 128) * 2
    assert domain_of("c3").bytes_held(scenario.workload()) == (1 << 18) + (1 << 20) + matrices
