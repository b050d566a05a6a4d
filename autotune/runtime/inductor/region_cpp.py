"""C++ that launches the stored kernels of a region, for Inductor's code that runs without Python.

Inductor generates C++ with ``cpp_wrapper`` and for AOTInductor's packages. The code contains the cubins, so that
running it needs neither a database nor autotune. A region's code does the same as
:meth:`autotune.runtime.launch.executor.Executor.writer`: addresses, copies of misaligned inputs, scratch, launches. It
does not verify results, and has no fallback: an error of the driver is raised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.runtime.inductor.region_call import RegionCall, found_for
from autotune.runtime.launch.cuda import asks_for_shared
from autotune.runtime.launch.prepared import CudaLaunch, Prepared, prepare
from autotune.runtime.launch.verify import checked_calls
from autotune.workload import Workload

MOST_ARGUMENTS = 64
"""Maximum number of arguments of a kernel that C++ launches."""

LAUNCHER = f"""
class AutotuneKernel {{
  // A kernel whose cubin is part of this file; loaded once a device, and never unloaded: a CUDA graph may hold it.
 public:
  AutotuneKernel(const char* cubin, const char* entry, uint32_t threads, uint32_t shared, bool asks)
      : cubin_(cubin), entry_(entry), threads_(threads), shared_(shared), asks_(asks) {{}}

  void launch(int32_t device, cudaStream_t stream, uint32_t grid, std::initializer_list<uint64_t> values) {{
    void* arguments[{MOST_ARGUMENTS}];
    size_t n = 0;
    for (const uint64_t& value : values) {{
      arguments[n++] = const_cast<uint64_t*>(&value);
    }}
    check(
        cuLaunchKernel(function(device), grid, 1, 1, threads_, 1, 1, shared_, stream, arguments, nullptr), "launching");
  }}

 private:
  CUfunction function(int32_t device) {{
    if (device < 0 || device >= kDevices) {{
      throw std::runtime_error("autotune: device numbers end at 127");
    }}
    CUfunction found = functions_[device].load(std::memory_order_acquire);
    if (found == nullptr) {{
      std::lock_guard<std::mutex> guard(lock_);
      found = functions_[device].load(std::memory_order_relaxed);
      if (found == nullptr) {{
        CUmodule module;
        check(cuModuleLoadData(&module, cubin_), "loading");
        check(cuModuleGetFunction(&found, module, entry_), "finding");
        if (asks_) {{
          check(
              cuFuncSetAttribute(found, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(shared_)),
              "asking for the shared memory of");
        }}
        functions_[device].store(found, std::memory_order_release);
      }}
    }}
    return found;
  }}

  void check(CUresult code, const char* doing) const {{
    if (code != CUDA_SUCCESS) {{
      const char* text = nullptr;
      cuGetErrorString(code, &text);
      throw std::runtime_error(
          std::string("autotune: ") + doing + " " + entry_ + ": " + (text == nullptr ? "unknown error" : text) +
          " (CUDA error " + std::to_string(static_cast<int>(code)) + ")");
    }}
  }}

  static constexpr int32_t kDevices = 128;
  const char* cubin_;
  const char* entry_;
  const uint32_t threads_, shared_;
  const bool asks_;
  std::mutex lock_;
  std::atomic<CUfunction> functions_[kDevices] = {{}};
}};

[[maybe_unused]] static cudaStream_t autotune_stream(int32_t device) {{
  void* stream = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}}

[[maybe_unused]] static uint64_t autotune_address(AtenTensorHandle tensor) {{
  return reinterpret_cast<uint64_t>(get_data_ptr_wrapper(tensor));
}}

[[maybe_unused]] static uint64_t autotune_aligned(
    AtenTensorHandle tensor, uint64_t mask, RAIIAtenTensorHandle& copied) {{
  // Vector loads ask for aligned addresses: what is not aligned is copied, and lives until the launches are enqueued.
  uint64_t address = autotune_address(tensor);
  if (address & mask) {{
    AtenTensorHandle copy = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_clone_preserve_strides(tensor, &copy));
    copied = RAIIAtenTensorHandle(copy);
    address = autotune_address(copied);
  }}
  return address;
}}

[[maybe_unused]] static RAIIAtenTensorHandle autotune_scratch(int64_t elements, int32_t dtype, int32_t device) {{
  const int64_t stride = 1;
  AtenTensorHandle made = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &elements, &stride, dtype, aoti_torch_device_type_cuda(), device, &made));
  return RAIIAtenTensorHandle(made);
}}
"""

INCLUDES = "".join(f"#include <{name}>\n" for name in ("atomic", "initializer_list", "mutex", "stdexcept", "string"))
"""Headers for :data:`LAUNCHER`, in addition to Inductor's own."""


def prepared(call: RegionCall) -> Prepared:
    """The launches of a call, checked for code generation in C++.

    Raises:
        Unsupported: the call needs a feature that only Python code has.
        BuildError, RuntimeError: its schedule does not fit, or is damaged.
    """
    if call.device == "cpu":
        raise Unsupported("CPU kernels are launched from Python only")
    if call.symbols:
        raise Unsupported("kernels for sizes known at run time are chosen in Python only")
    found = found_for(call)
    assert found.schedule is not None
    exact = Workload("fusion", call.spec).fingerprint == call.tuned
    if checked_calls(found.proven and exact, call.verify) is not None:
        raise Unsupported("the settings require verified results, which Python alone supports")
    graph = Graph.from_json(call.spec)
    made = prepare(graph, found.schedule, call.tensors, "cuda")
    for one in made.launches:
        # The name is from the database, and becomes part of source text.
        if not (one.kernel.entry.isascii() and one.kernel.entry.isidentifier()):
            raise Unsupported("its kernel's name is not valid in C++")
        if not one.kernel.code:
            raise Unsupported(f"the stored kernel {one.kernel.entry!r} has no code")
        if len(one.pointers) + one.dynamic > MOST_ARGUMENTS:
            raise Unsupported(f"its kernel has more than {MOST_ARGUMENTS} arguments")
    return made


class RegionCpp:
    """The C++ for one of Inductor's files: a function for each different region, after its cubins."""

    def __init__(self) -> None:
        self._functions: dict[str, str] = {}
        self._cubins: dict[str, str] = {}
        self._kernels: dict[tuple[str, str, int, int], str] = {}
        self._lines: list[str] = []

    def function(self, text: str, label: str) -> tuple[str, str]:
        """The name of a region's function, and the code to insert before its first call.

        Args:
            text: of a :class:`RegionCall` that :func:`prepared` accepts.
            label: part of generated names.
        """
        if text in self._functions:
            return self._functions[text], ""
        self._lines = [] if self._functions else [LAUNCHER]
        name = self._functions[text] = f"autotune_{label}_{len(self._functions)}"
        call = RegionCall.of(text)
        self._write(name, call, prepared(call))
        return name, "\n".join(self._lines) + "\n"

    def _write(self, name: str, call: RegionCall, made: Prepared) -> None:
        kernels = [self._kernel(one) for one in made.launches]
        takes = [f"AtenTensorHandle x{i}" for i in range(len(call.inputs))]
        takes += [f"AtenTensorHandle y{k}" for k in range(len(call.outputs))]
        pointers, body = self._pointers(call, made)
        for kernel, one in zip(kernels, made.launches, strict=True):
            values = [pointers[p] for p in one.pointers]
            if one.dynamic:
                values.append(f"static_cast<uint64_t>({one.extent0})")
            body.append(f"{kernel}.launch(device, stream, {one.grid}u, {{{', '.join(values)}}});")
        self._lines += [
            f"static void {name}(int32_t device, cudaStream_t stream, {', '.join(takes)}) {{",
            *(f"  {line}" for line in (body if made.launches else [])),
            "}",
        ]

    def _pointers(self, call: RegionCall, made: Prepared) -> tuple[list[str], list[str]]:
        """Names of the addresses, by the indices in launches, and the statements that declare them."""
        used = {p for one in made.launches for p in one.pointers}
        body: list[str] = []
        for slot, (i, align) in enumerate(zip(call.slots, made.aligned, strict=True)):
            if slot not in used:
                continue
            if align > 1:
                body.append(f"RAIIAtenTensorHandle copied{slot};")
                body.append(f"const uint64_t p{slot} = autotune_aligned(x{i}, {align - 1}u, copied{slot});")
            else:
                body.append(f"const uint64_t p{slot} = autotune_address(x{i});")
        names = [f"p{slot}" for slot in range(len(call.slots))]
        for i in call.results:
            body += [f"const uint64_t p{len(names)} = autotune_address(y{i});"] if len(names) in used else []
            names.append(f"p{len(names)}")
        for k, (dtype, elements) in enumerate(made.scratch):
            if len(names) in used:
                storage = str(dtype).removeprefix("torch.")
                body.append(
                    f"RAIIAtenTensorHandle z{k} = autotune_scratch({elements}, aoti_torch_dtype_{storage}(), device);"
                )
                body.append(f"const uint64_t p{len(names)} = autotune_address(z{k});")
            names.append(f"p{len(names)}")
        return names, body

    def _kernel(self, one: CudaLaunch) -> str:
        """The name of a kernel's object, declared at its first use."""
        kernel = one.kernel
        sha = hashlib.sha256(kernel.code).hexdigest()
        threads, shared = int(kernel.launch["block"]), int(kernel.launch.get("shared", 0))
        key = sha, kernel.entry, threads, shared
        if key not in self._kernels:
            if sha not in self._cubins:
                self._cubins[sha] = f"autotune_cubin_{len(self._cubins)}"
                self._lines.append(f"alignas(16) static const char {self._cubins[sha]}[] =")
                self._lines += [*literal(kernel.code), ";"]
            self._kernels[key] = f"autotune_kernel_{len(self._kernels)}"
            asks = "true" if asks_for_shared(kernel) else "false"
            self._lines.append(
                f"static AutotuneKernel {self._kernels[key]}"
                f'({self._cubins[sha]}, "{kernel.entry}", {threads}u, {shared}u, {asks});'
            )
        return self._kernels[key]


_PLAIN = frozenset(range(0x20, 0x7F)) - frozenset(b"\"'?\\")
"""Bytes that need no escape in a C++ literal inside a raw string of Python."""


def literal(data: bytes, width: int = 64) -> list[str]:
    """Bytes as C++ literals, one per line. Octal escapes of three digits need no terminator."""
    words = [chr(b) if b in _PLAIN else f"\\{b:03o}" for b in data]
    return ['"' + "".join(words[i : i + width]) + '"' for i in range(0, len(words), width)]


def write_call(
    wrapper: Any, text: str, label: str, arguments: Sequence[str], device: int, *, ahead_of_time: bool
) -> None:
    """Write a region's call into the C++ of ``wrapper``, one of Inductor's, and its function at the first use.

    Args:
        arguments: handles of its inputs, then of its outputs.
        device: index of their device; an ahead-of-time package has its own.
    """
    written: RegionCpp | None = wrapper.__dict__.get("_autotune_cpp")
    if written is None:
        written = wrapper.__dict__["_autotune_cpp"] = RegionCpp()
        wrapper.header.splice(INCLUDES)
    name, before = written.function(text, label)
    if before:
        wrapper.prefix.splice(before)
    where = "this->device_idx_" if ahead_of_time else str(device)
    # Inductor declares its stream helper once, at the first call it writes, which may be after this one.
    stream = "stream" if ahead_of_time else f"autotune_stream({device})"
    wrapper.writeline(f"{name}({where}, {stream}, {', '.join(arguments)});")
