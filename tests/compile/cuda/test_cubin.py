"""Resources read from cubins, and occupancy against values of NVIDIA's CUDA occupancy calculator."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from autotune.compiler.targets.cuda.compile import LIMITS, blocks_per_sm, build, limits, resources
from autotune.compiler.targets.cuda.source import Listing
from autotune.errors import BuildError
from autotune.task import Kernel


def source(body: str, block: int = 128, shared: int = 0) -> Listing:
    """A hand-written kernel over one float pointer ``p0``."""
    return Listing((), tuple(body.splitlines()), ("f32",), {"dynamic": False, "shared": shared}, block, 0)


PLAIN = "i = cuda.threadIdx.x\np0[i] = p0[i] + float32(1)"
SHARED = """s = cuda.shared.array(%d, float32)
i = cuda.threadIdx.x
s[i] = p0[i]
cuda.syncthreads()
p0[i] = s[i ^ 1]"""
LOCAL = """s = cuda.local.array(%d, float32)
for k in range(%d):
    s[k] = p0[k]
p0[0] = s[int32(p0[1])]"""


@pytest.fixture(scope="module")
def plain() -> Kernel:
    return build(source(PLAIN))


def test_plain_kernel_needs_registers_only(plain: Kernel) -> None:
    used = plain.resources
    assert 4 <= used["registers"] <= 16
    assert used["stack"] == used["shared"] == used["shared_total"] == 0
    assert used["threads"] == 128
    assert used["blocks_per_sm"] == 16  # 2048 threads
    assert plain.code[:4] == b"\x7fELF"


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("floats", [32, 1000, 8192])
def test_static_shared_memory(target: str, floats: int) -> None:
    used = build(source(SHARED % floats), target).resources
    assert used["shared"] == used["shared_total"] == 4 * floats
    assert used["blocks_per_sm"] == min(16, limits(target).shared // (4 * floats + 1024))


def test_dynamic_shared_memory_counts_for_occupancy() -> None:
    used = build(source(SHARED % 1024, shared=60000)).resources
    assert used["shared"] == 4096
    assert used["shared_total"] == 64096
    assert used["blocks_per_sm"] == 3


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_local_arrays_are_stack(target: str) -> None:
    assert 4 * 40 <= build(source(LOCAL % (40, 40)), target).resources["stack"] < 4 * 40 + 64


def test_too_much_shared_memory_is_a_build_error() -> None:
    with pytest.raises(BuildError, match="240000 bytes of shared memory a block, the device has 232448"):
        build(source(PLAIN, shared=240000))
    build(source(PLAIN, shared=200000))
    with pytest.raises(BuildError, match="the device has 166912"):
        build(source(PLAIN, shared=200000), "sm_80")


def test_registers_agree_with_the_section_header(plain: Kernel) -> None:
    """Two places hold the count: the attribute and, in older cubins, the top byte of the section's sh_info."""
    without = bytearray(plain.code)
    at = without.find(struct.pack("<BBH", 0x04, 0x2F, 8))
    assert at > 0
    without[at + 1] = 0x7F  # an unknown attribute
    header = resources(bytes(without), plain.entry)["registers"]
    assert header in (0, plain.resources["registers"])
    assert resources(plain.code, plain.entry)["registers"] == plain.resources["registers"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda code: b"",
        lambda code: b"not a cubin at all",
        lambda code: code[:64],
        lambda code: code[: len(code) // 2],
        lambda code: b"\x7fELF\x01" + code[5:],
        lambda code: code[:0x28] + b"\xff" * 8 + code[0x30:],
        lambda code: code[:0x3E] + b"\xff\xff" + code[0x40:],
    ],
)
def test_garbage_is_a_value_error(plain: Kernel, spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ValueError, match=r"ELF|cubin"):
        resources(spoil(plain.code), plain.entry)


def test_another_kernels_name_is_a_value_error(plain: Kernel) -> None:
    with pytest.raises(ValueError, match="no kernel 'other'"):
        resources(plain.code, "other")


# Registers a thread, shared bytes a block, threads a block -> blocks an SM, as cuda_occupancy.h of CUDA 13.0 has them.
CALCULATOR = [
    ("sm_90", 32, 0, 256, 8),  # 100%: threads
    ("sm_90", 32, 0, 32, 32),  # blocks: half of the warps
    ("sm_90", 33, 0, 256, 6),  # 40 registers after rounding: 1280 a warp, 51 warps, 6 blocks of 8
    ("sm_90", 40, 0, 256, 6),
    ("sm_90", 64, 0, 256, 4),
    ("sm_90", 128, 0, 256, 2),
    ("sm_90", 255, 0, 256, 1),
    ("sm_90", 64, 0, 1024, 1),
    ("sm_90", 65, 0, 1024, 0),  # 72 registers after rounding: 73728 for a block
    ("sm_90", 32, 49152, 256, 4),  # 228 KiB over 49 KiB
    ("sm_90", 32, 0, 96, 21),  # 2048 threads over 3 warps
    ("sm_90", 16, 232448, 1024, 1),
    ("sm_90", 16, 232449, 1024, 0),
    ("sm_80", 32, 0, 256, 8),
    ("sm_80", 32, 49152, 256, 3),  # 164 KiB over 49 KiB
    ("sm_80", 16, 166912, 128, 1),
    ("sm_86", 32, 0, 256, 6),  # 1536 threads
    ("sm_86", 32, 0, 32, 16),
    ("sm_89", 32, 0, 32, 24),
    ("sm_75", 32, 0, 256, 4),  # 1024 threads
    ("sm_75", 32, 32768, 128, 2),  # nothing reserved before sm_80
    ("sm_70", 32, 0, 64, 32),
    ("sm_90", 40, 0, 96, 16),  # each quarter of the SM holds 12 warps, not 12.8
    ("sm_90", 35, 0, 64, 24),
    ("sm_90", 96, 0, 672, 0),  # 21 warps are checked as if they were 24
    ("sm_90", 64, 65000, 192, 3),
    ("sm_90", 24, 5130, 224, 9),
    ("sm_100", 208, 0, 288, 0),
    ("sm_100", 72, 0, 896, 1),
    ("sm_80", 44, 1252, 672, 1),
    ("sm_86", 152, 2061, 416, 0),
    ("sm_89", 198, 0, 160, 1),
    ("sm_120", 178, 51799, 288, 0),
]


@pytest.mark.parametrize(("target", "registers", "shared", "threads", "blocks"), CALCULATOR)
def test_occupancy(target: str, registers: int, shared: int, threads: int, blocks: int) -> None:
    assert blocks_per_sm(registers, shared, threads, target) == blocks


def test_more_registers_than_a_thread_can_have() -> None:
    assert blocks_per_sm(256, 0, 32, "sm_90") == 0


def test_an_unknown_target_is_taken_for_a_small_one() -> None:
    assert limits("sm_103a") == LIMITS["sm_80"]
    assert all(v.shared_block <= v.shared for v in LIMITS.values())
