"""Resource usage of a kernel from its cubin (registers, spills, shared memory), and the blocks that fit an SM.

A cubin is an ELF file. Section ``.nv.info`` holds the register count (attribute EIATTR_REGCOUNT) and the stack frame
(EIATTR_FRAME_SIZE). Older linkers put the register count in the top byte of the ``.text.<kernel>`` section's
``sh_info``. Static shared memory is the size of ``.nv.shared.<kernel>``. No driver and no device is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

_FRAME_SIZE = 0x11
_REGCOUNT = 0x2F
_PARTS = 4  # partitions of an SM, each with a register file and a scheduler


@dataclass(frozen=True)
class SmLimits:
    """Resources of one SM; ``shared_block`` is the most a block may take (bytes)."""

    registers: int = 65536
    threads: int = 2048
    blocks: int = 32
    shared: int = 233472
    shared_block: int = 232448


def too_large(shared: int, block: int, max_registers: int) -> str | None:
    """The reason why no SM takes ``shared`` bytes and ``block`` threads under a cap of registers (0 for none)."""
    most = SmLimits()
    if shared > most.shared_block:
        return f"{shared} bytes of shared memory a block"
    if max_registers * block > most.registers:
        return f"a cap of {max_registers} registers does not fit {block} threads"
    return None


LIMITS: Mapping[str, SmLimits] = {
    "sm_70": SmLimits(shared=98304, shared_block=98304),
    "sm_75": SmLimits(threads=1024, blocks=16, shared=65536, shared_block=65536),
    "sm_80": SmLimits(shared=167936, shared_block=166912),
    "sm_86": SmLimits(threads=1536, blocks=16, shared=102400, shared_block=101376),
    "sm_89": SmLimits(threads=1536, blocks=24, shared=102400, shared_block=101376),
    "sm_90": SmLimits(),
    "sm_100": SmLimits(),
    "sm_120": SmLimits(threads=1536, blocks=24, shared=102400, shared_block=101376),
}


def limits(target: str) -> SmLimits:
    """Limits of a target such as "sm_90"; those of sm_80 for an unknown one."""
    return LIMITS.get(target, LIMITS["sm_80"])


def _sections(cubin: bytes) -> list[tuple[str, int, int, int]]:
    """(name, sh_info, offset, size) of each section."""
    if cubin[:4] != b"\x7fELF" or cubin[4:5] != b"\x02":
        raise ValueError("not a 64-bit ELF file")
    shoff = struct.unpack_from("<Q", cubin, 0x28)[0]
    entsize, count, strndx = struct.unpack_from("<HHH", cubin, 0x3A)
    raw = [struct.unpack_from("<IIQQQQII", cubin, shoff + k * entsize) for k in range(count)]
    base = raw[strndx][4]
    out = []
    for name, _, _, _, offset, size, _, info in raw:
        end = cubin.find(b"\0", base + name)
        if end < 0:
            raise IndexError(base + name)
        out.append((cubin[base + name : end].decode(), info, offset, size))
    return out


def resources(cubin: bytes, entry: str) -> dict[str, int]:
    """``registers`` per thread, ``stack`` bytes per thread (spills, local arrays), ``shared`` static bytes per block.

    Raises ValueError if the bytes are no cubin, or if the cubin has no such kernel.
    """
    out = {"registers": 0, "stack": 0, "shared": 0}
    found = False
    try:
        for name, info, offset, size in _sections(cubin):
            if name == f".text.{entry}":
                out["registers"] = max(out["registers"], info >> 24)
                found = True
            elif name == f".nv.shared.{entry}":
                out["shared"] = size
            elif name == ".nv.info":
                at = offset
                while at + 4 <= offset + size:
                    sized, attr, length = cubin[at] == 0x04, cubin[at + 1], struct.unpack_from("<H", cubin, at + 2)[0]
                    if sized and attr in (_FRAME_SIZE, _REGCOUNT) and length >= 8:
                        field = "stack" if attr == _FRAME_SIZE else "registers"
                        out[field] = max(out[field], struct.unpack_from("<I", cubin, at + 8)[0])
                    at += 4 + (length if sized else 0)  # in the others the two bytes are the value
    except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError("a damaged cubin: it ends early, or points outside itself") from error
    if not found:
        raise ValueError(f"no kernel {entry!r} in the cubin")
    return out


def blocks_per_sm(registers: int, shared: int, threads: int, target: str) -> int:
    """Blocks of ``threads`` threads that fit one SM at a time; 0 if none does.

    The rules are those of ``cuda_occupancy.h``. An SM has four partitions, each with a quarter of the registers. A
    warp's registers are allocated in units of 256. A block's check for registers rounds its warps up to a multiple of
    four. Shared memory is allocated in units of 128 bytes (256 before sm_80). From sm_80 on, the system reserves 1 KiB
    per block.
    """
    lim = limits(target)
    modern = int(target.removeprefix("sm_").rstrip("af")) >= 80
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    if registers > 255 or shared > lim.shared_block or per_warp * (-(-warps // _PARTS) * _PARTS) > lim.registers:
        return 0
    by_regs = lim.registers // _PARTS // per_warp * _PARTS // warps if registers else lim.blocks
    unit = 128 if modern else 256
    taken = -(-(shared + (1024 if modern else 0)) // unit) * unit
    by_shared = lim.shared // taken if taken else lim.blocks
    return min(by_regs, by_shared, lim.threads // (warps * 32), lim.blocks)


def capability(target: str) -> tuple[int, int]:
    """ "sm_90" -> (9, 0)."""
    n = int(target.removeprefix("sm_"))
    return n // 10, n % 10


def taken(cubin: bytes, entry: str, target: str) -> dict[str, int]:
    """:func:`resources`, with the shared memory of the kernel alone; it raises the same errors."""
    used = resources(cubin, entry)
    if capability(target) >= (9, 0) and used["shared"] >= 1024:
        used["shared"] -= 1024  # the linker counts what the system reserves; blocks_per_sm adds it itself
    return used
