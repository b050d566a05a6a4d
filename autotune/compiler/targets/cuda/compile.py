"""Compile emitted CUDA source to a cubin, without a GPU or a driver.

Numba CUDA generates PTX, and the CUDA linker (nvJitLink) generates the cubin. Neither needs a GPU, so candidates
compile in a pool of ordinary processes while others are measured.

A cubin is an ELF file, from which a kernel's resources are read. Section ``.nv.info`` holds the register count
(attribute EIATTR_REGCOUNT) and the stack frame (EIATTR_FRAME_SIZE). Older linkers put the register count in the top
byte of the ``.text.<kernel>`` section's ``sh_info``. Static shared memory is the size of ``.nv.shared.<kernel>``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import linecache
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from autotune.compiler.targets.cuda.frontend import without_repeated_work
from autotune.compiler.targets.cuda.source import CudaSource, Listing
from autotune.errors import BuildError
from autotune.files import whole_file
from autotune.task import SHARED_BUILDS, Kernel

_FRAME_SIZE = 0x11
_REGCOUNT = 0x2F
_PTXAS_ERROR = "ptxas error   :"
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


def _namespace(code: CodeType) -> dict[str, Any]:
    import numpy as np
    from numba import cuda, types
    from numba.cuda import libdevice

    from autotune.compiler.targets.cuda.memory_intrinsics import resolve

    space: dict[str, Any] = {"cuda": cuda, "math": math, "libdevice": libdevice}
    space |= {"inf": np.float32(np.inf), "nan": np.float32(np.nan)}
    space |= {name: getattr(types, name) for name in ("float32", "int32", "uint32", "int64", "boolean")}
    intrinsics = {name: resolve(name) for name in _names(code) - space.keys()}
    return space | {name: found for name, found in intrinsics.items() if found is not None}


def _names(code: CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)


@functools.cache
def _import_arrays() -> None:
    """Import the module of numba-cuda 0.30 that needs ``np.row_stack``, which numpy 2.5 no longer has.

    The module uses it once, to register an implementation. No code compiled here calls it. numpy is not changed.
    """
    import numpy as np

    if hasattr(np, "row_stack"):
        return
    np.__dict__["row_stack"] = np.vstack
    try:
        importlib.import_module("numba.cuda.np.arrayobj")
    finally:
        del np.__dict__["row_stack"]


@contextlib.contextmanager
def _without_device(cc: tuple[int, int]) -> Iterator[None]:
    """Let numba-cuda compile device functions without a driver.

    It reads the current device's compute capability only to choose the target, which is given here.
    """
    import numba.cuda.dispatcher as dispatcher

    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = real


def reason_of(error: BaseException) -> str:
    """The line of an error's message that has the reason: the last one, but of ptxas its first error."""
    lines = [line for text in str(error).replace("\0", "").splitlines() if (line := text.strip())]
    reasons = [line.partition(_PTXAS_ERROR)[2].strip() for line in lines if _PTXAS_ERROR in line]
    return re.sub(r"'_Z\w+'", "of the device", [*reasons, *reversed(lines), "without a reason"][0])[:300]


def _numba_ptx(text: str, params: tuple[str, ...], dynamic: bool, block: int, cc: tuple[int, int], fast: bool) -> str:
    """Numba's PTX of a kernel's text; Numba chooses the name of the entry."""
    from numba import cuda, types

    from autotune.compiler.targets.cuda.memory_intrinsics import POINTER

    _import_arrays()
    filename = f"<autotune {abs(hash(text)):x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    code = compile(text, filename, "exec")
    space = _namespace(code)
    exec(code, space)
    for name, obj in list(space.items()):
        if isinstance(obj, FunctionType) and obj.__code__.co_filename == filename and name != "kernel":
            space[name] = cuda.jit(device=True, fastmath=fast)(obj)
    extent0 = [types.int64] if dynamic else []
    sig = types.void(*(types.CPointer(POINTER[s]) for s in params), *extent0)
    options = {"cc": cc, "output": "ptx", "abi": "numba", "fastmath": fast, "launch_bounds": block}
    try:
        with _without_device(cc), without_repeated_work():
            ptx, _ = cuda.compile(space["kernel"], sig, device=False, **options)
    except Exception as error:  # numba raises many types; all mean this candidate does not compile
        raise BuildError(f"numba: {type(error).__name__}: {reason_of(error)}") from error
    return ptx.decode() if isinstance(ptx, bytes) else str(ptx)


def _shared_ptx(*parts: Any) -> str:
    """:func:`_numba_ptx`, or the result of another build of this search for the same source.

    A group is compiled when it is searched alone, and again in every plan that contains it.
    """
    folder = os.environ.get(SHARED_BUILDS)
    if not folder:
        return _numba_ptx(*parts)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    path = Path(folder, name)
    with contextlib.suppress(OSError):
        return path.read_text()
    ptx = _numba_ptx(*parts)
    with contextlib.suppress(OSError), whole_file(path) as out:  # a full disk costs time only
        out.write(ptx.encode())
    return ptx


def compile_ptx(source: CudaSource | Listing, target: str) -> tuple[str, str]:
    """(PTX text, entry name). Raises BuildError if Numba rejects the source."""
    cc = capability(target)
    text = _shared_ptx(source.text, source.params, bool(source.launch["dynamic"]), source.block, cc, source.fast)
    entry = next((line.split("(")[0].split()[-1] for line in text.splitlines() if ".entry" in line), "")
    if not entry:
        raise BuildError("numba made no kernel entry")
    if source.cluster > 1 and cc < (9, 0):
        raise BuildError(f"{target} has no thread-block clusters")
    # A stable entry name, as the environment pointers go: equal candidates are equal cubins, and stored once.
    return _completed(text, source).replace(entry, source.name), source.name


def _completed(ptx: str, source: CudaSource | Listing) -> str:
    """PTX with the directives that Numba does not write, and without its environment pointers.

    No kernel reads those, and their names contain a counter that differs between processes.
    """
    out = []
    for line in ptx.splitlines(keepends=True):
        if not (line.startswith(".common .global ") and "NumbaEnv" in line):
            out.append(line)
        if line.startswith(".maxntid"):
            if source.cluster > 1:
                out.append(f".explicitcluster\n.reqnctapercluster {source.cluster}, 1, 1\n")
            if source.max_registers:
                # ptxas ignores its own register option where the kernel states its block size: it states both.
                out.append(f".maxnreg {source.max_registers}\n")
    return "".join(out)


def build(source: CudaSource | Listing, target: str = "sm_90") -> Kernel:
    """Compile ``source`` and read its resources.

    Raises BuildError if it does not compile, spills too much, or does not fit an SM.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx, entry = compile_ptx(source, target)
    options = LinkerOptions(arch=target)
    try:
        cubin = bytes(Linker(ObjectCode.from_ptx(ptx.encode()), options=options).link("cubin").code)
    except Exception as error:
        raise BuildError(f"ptxas: {type(error).__name__}: {reason_of(error)}") from error
    used = taken(cubin, entry, target)
    shared = used["shared"] + int(source.launch["shared"])
    fit = blocks_per_sm(used["registers"], shared, source.block, target)
    if shared > limits(target).shared_block:
        raise BuildError(f"{shared} bytes of shared memory a block, the device has {limits(target).shared_block}")
    if fit < 1:
        raise BuildError(f"{used['registers']} registers in {source.block} threads do not fit one SM")
    used.update(shared_total=shared, blocks_per_sm=fit, threads=source.block)
    return Kernel(entry=entry, code=cubin, launch=dict(source.launch), resources=used)
