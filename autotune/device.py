"""The device and the software that a measurement was made with.

A schedule found on one device is only used on an equal one (:class:`DeviceIdentity`). The caller matches the software
(:class:`Environment`) *strictly* (the same versions) or *loosely* (the same minor versions of torch and CUDA).
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.errors import UserError, printable
from autotune.workload import digest

_GIB_IN_MIB = 1024


@dataclass(frozen=True)
class DeviceIdentity:
    """Properties that two devices must share for a measurement on one to hold on the other.

    Attributes:
        kind: "cpu" or "cuda".
        name: the model, as its maker writes it.
        units: streaming multiprocessors, or the physical cores this process may use.
        threads: hardware threads this process may use (CPU); 0 for a GPU.
        memory_mib: memory in MiB, rounded up (GPU: 1 GiB, CPU: 4 GiB), so that the part reserved by firmware and
            driver does not change it from one boot to the next.
        capability: compute capability such as "9.0"; the instruction set for a CPU ("x86_64").
        count: number of devices; more than one only in domains that measure several together.
        links: their interconnect (such as "NV18"); empty for one device.
    """

    kind: str
    name: str
    units: int
    memory_mib: int
    capability: str = ""
    threads: int = 0
    count: int = 1
    links: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every field, 64 hex digits."""
        return digest({"device": self.to_json()})

    @property
    def label(self) -> str:
        """Short form for people, such as ``NVIDIA H200 (132 SMs, 140 GiB)``."""
        unit = "SMs" if self.kind == "cuda" else "cores"
        many = f"{self.count} x " if self.count > 1 else ""
        return f"{many}{printable(self.name)} ({self.units} {unit}, {self.memory_mib // _GIB_IN_MIB} GiB)"

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal identity."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceIdentity:
        return cls(
            kind=str(data["kind"]),
            name=str(data["name"]),
            units=int(data["units"]),
            memory_mib=int(data["memory_mib"]),
            capability=str(data.get("capability", "")),
            threads=int(data.get("threads", 0)),
            count=int(data.get("count", 1)),
            links=str(data.get("links", "")),
        )


@dataclass(frozen=True)
class Environment:
    """The software a measurement was made with. Fields that do not apply are empty (a CPU has no driver)."""

    kind: str
    torch: str
    numba: str
    numba_cuda: str = ""
    cuda: str = ""
    driver: str = ""
    python: str = ""
    os: str = ""
    isa: str = ""
    """CPU vector extensions, such as "avx2 avx512f", which determine the code that Numba generates."""

    @cached_property
    def strict(self) -> str:
        """SHA-256 over every field: equal software."""
        return digest({"environment": self.to_json()})

    @cached_property
    def loose(self) -> str:
        """SHA-256 over the minor versions of torch and CUDA: software that most likely behaves the same."""
        return digest({"environment": {"kind": self.kind, "torch": _minor(self.torch), "cuda": _minor(self.cuda)}})

    @property
    def fingerprint(self) -> str:
        """The strict fingerprint, under which the environment is stored."""
        return self.strict

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal environment."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Environment:
        names = cls.__dataclass_fields__
        return cls(**{str(k): str(v) for k, v in data.items() if k in names})


def resolve_device(device: str) -> str:
    """Turn "auto", "cpu", "cuda" or "cuda:N" into "cpu" or "cuda:N"; "auto" prefers the first GPU.

    Raises:
        UserError: another text, or this machine (or this build of torch) has no such device.
    """
    name = device.strip().lower()
    if name == "cpu":
        return "cpu"
    if "," in name or name == _ALL:
        raise UserError(
            f"device {device!r} is a list of devices: only `autotune search fusion`, `autotune search --missed` and"
            " autotune.search take a list; name one device, such as cuda:0"
        )
    if name == "auto":
        return "cuda:0" if _cuda_count() else "cpu"
    prefix, _, index = name.partition(":")
    if prefix != "cuda" or (":" in name and not index.isdecimal()):
        raise UserError(f"unknown device {device!r}: use auto, cpu, cuda or cuda:N")
    count, number = _cuda_count(), int(index or 0)
    if not count:
        raise UserError(f"device {device!r} does not exist: torch finds no CUDA device; use --device cpu")
    if number >= count:
        last = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UserError(f"device {device!r} does not exist: this machine has {last}")
    return f"cuda:{number}"


_ALL = "cuda:all"


def resolve_devices(devices: str | Sequence[str]) -> list[str]:
    """Resolve several equal devices for a parallel search: "cuda:0,cuda:2" (or a list), "cuda:all", or a single one.

    Raises:
        UserError: as :func:`resolve_device`; or a device named twice, the CPU among several, or unequal devices.
    """
    names = devices.split(",") if isinstance(devices, str) else list(devices)
    if not names:
        raise UserError("name a device: auto, cpu, cuda, cuda:N, a list such as cuda:0,cuda:1, or cuda:all")
    if names[0].strip().lower() == _ALL and len(names) == 1:
        resolve_device("cuda")  # raises UserError without a GPU
        names = [f"cuda:{i}" for i in range(_cuda_count())]
    if len(names) == 1:
        return [resolve_device(names[0])]
    found = [resolve_device(name) for name in names]
    if "cpu" in found:
        raise UserError(
            f"device {devices!r}: a list of devices cannot include a CPU; name GPUs, such as cuda:0,cuda:1, or cpu"
        )
    if (twice := next((name for name in found if found.count(name) > 1), None)) is not None:
        raise UserError(f"device {devices!r} names {twice} twice: name every device once")
    check_equal(found)
    return found


def check_equal(devices: Sequence[str]) -> None:
    """Check that a measurement on one of these devices holds for all, by their names, units and memory.

    A lower power limit or other users of a device are not detected.

    Raises:
        UserError: the devices differ.
    """
    first = identify(devices[0])
    for name in devices[1:]:
        if (other := identify(name)).fingerprint != first.fingerprint:
            raise UserError(
                f"{devices[0]} is {first.label}, {name} is {other.label}: one search takes equal devices; name those"
                " of one kind, and search for the others apart"
            )


def identify(device: str) -> DeviceIdentity:
    """The identity of ``device`` ("cpu" or "cuda:N"), the same in every process with the same CPU affinity.

    Call it before threads are pinned: a CPU's cores are those that this process may run on.
    """
    return _identify(resolve_device(device))


def environment(device: str) -> Environment:
    """The software in use on ``device`` ("cpu" or "cuda:N"). Imports torch for a GPU only, and Numba never."""
    return _environment(resolve_device(device).partition(":")[0])


def usable_processors() -> int:
    """Hardware threads in the calling thread's affinity.

    The affinity includes a cgroup's cpuset, but not its limit on processor time (``cpu.max``). Every call queries the
    system, so pinning changes the result, unlike that of :func:`identify`.
    """
    return len(_usable_cpus(0))


def one_each_core() -> list[int]:
    """One processor of each core in the calling thread's affinity.

    If only one core is usable (a virtual machine with two hardware threads of one core), all of its processors.
    """
    return list(_one_each_core(tuple(_usable_cpus(0))))


@lru_cache(maxsize=16)
def _one_each_core(allowed: tuple[int, ...]) -> tuple[int, ...]:
    cores: dict[str, int] = {}
    for cpu in allowed:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, cpu)
    return tuple(sorted(cores.values())) if len(cores) > 1 else allowed


def describe_cuda(device: str) -> tuple[str, int]:
    """("sm_90", 132) for a CUDA device, queried from the driver without creating a context.

    ``AUTOTUNE_CUDA_TARGET`` ("sm_90" or "sm_90:132") replaces the device on machines that only compile.

    Raises:
        UserError: no such device.
    """
    named = os.environ.get("AUTOTUNE_CUDA_TARGET")
    if named:
        arch, _, sms = named.partition(":")
        return arch, int(sms or 132)
    import ctypes

    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise UserError(f"{device}: no CUDA driver on this machine; use --device cpu") from None
    handle, major, minor, sms_ = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    index = int(device.partition(":")[2] or 0)
    if lib.cuInit(0) or lib.cuDeviceGet(ctypes.byref(handle), index):
        raise UserError(f"{device}: no such CUDA device")
    for out, attribute in ((major, 75), (minor, 76), (sms_, 16)):
        lib.cuDeviceGetAttribute(ctypes.byref(out), attribute, handle)
    return f"sm_{major.value}{minor.value}", sms_.value


@lru_cache(maxsize=64)
def _identify(device: str) -> DeviceIdentity:
    if device == "cpu":
        import psutil

        gib = psutil.virtual_memory().total / 2**30
        return DeviceIdentity(
            kind="cpu",
            name=_cpu_name(),
            units=_physical_cores(),
            memory_mib=int(-(-gib // 4)) * 4 * _GIB_IN_MIB,
            capability=platform.machine(),
            threads=len(_usable_cpus()),
        )
    import torch

    props = torch.cuda.get_device_properties(int(device.partition(":")[2]))
    return DeviceIdentity(
        kind="cuda",
        name=props.name,
        units=props.multi_processor_count,
        memory_mib=-(-props.total_memory // 2**30) * _GIB_IN_MIB,
        capability=f"{props.major}.{props.minor}",
    )


@lru_cache(maxsize=2)
def _environment(kind: str) -> Environment:
    common = {
        "torch": package_version("torch"),
        "numba": package_version("numba"),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "os": f"{platform.system()} {platform.machine()}",
    }
    if kind == "cpu":
        return Environment(kind="cpu", isa=cpu_isa(), **common)
    import torch

    return Environment(
        kind="cuda",
        numba_cuda=package_version("numba-cuda"),
        cuda=str(torch.version.cuda or ""),
        driver=_driver_version(),
        **common,
    )


def _cuda_count() -> int:
    if "torch" not in sys.modules and not _has_driver():
        return 0  # avoids importing torch, which takes seconds
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_driver() -> bool:
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def package_version(package: str) -> str:
    """The version of an installed package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: an empty name
        return ""


def _minor(version: str) -> str:
    """Major and minor: "2.11" of "2.11.0+cu130"."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def _driver_version() -> str:
    """The kernel driver's version ("580.159"); the CUDA version that it supports if /proc has no driver version."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("\n", 1)[0].split()
        return next(w for w in words if w[0].isdigit() and "." in w)
    except (OSError, StopIteration):
        pass
    try:
        from cuda.bindings import driver

        error, version = driver.cuDriverGetVersion()
        return f"cuda {version // 1000}.{version % 1000 // 10}" if int(error) == 0 else ""
    except Exception:  # no driver bindings: the version is a record, not a requirement
        return ""


def _usable_cpus(thread: int | None = None) -> list[int]:
    """Processors in a thread's affinity: 0 for the calling thread, None for the main one, so that pinning other threads
    does not change the device's identity."""
    return sorted(os.sched_getaffinity(os.getpid() if thread is None else thread))


def _physical_cores() -> int:
    """Physical cores of the usable processors; without a topology in sysfs, psutil's count, at most the processors."""
    cores = set()
    for cpu in _usable_cpus():
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            import psutil

            return min(psutil.cpu_count(logical=False) or len(_usable_cpus()), len(_usable_cpus()))
    return len(cores)


def _cpuinfo(key: str) -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return ""


def _cpu_name() -> str:
    name = _cpuinfo("model name")
    if not name and _cpuinfo("CPU part"):  # Arm has no model name: implementer and part number identify it
        name = f"Arm {_cpuinfo('CPU implementer')} {_cpuinfo('CPU part')}"
    return name or platform.processor() or platform.machine() or "unknown CPU"


_VECTOR_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16",
                 "avx512_fp16", "amx_tile", "asimd", "asimdhp", "bf16", "sve", "sve2")  # fmt: skip


@lru_cache(maxsize=1)
def cpu_isa() -> str:
    """Vector extensions of this machine's processor, as in :attr:`Environment.isa`."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return " ".join(f for f in _VECTOR_FLAGS if f in flags)
