"""Matrix products by cuBLASLt with an epilogue, through ctypes and the library that torch has loaded.

torch calls the same library with the first algorithm of its heuristics, and only has one epilogue: a bias with ReLU or
GELU. :func:`plan` supports the other algorithms and epilogues.

cuBLASLt is column-major. A row-major matrix is the transpose of a column-major one. So the product ``y = a @ b`` is
computed as ``y.T = b.T @ a.T``, and the bias of a column of ``y`` is that of a row of ``y.T``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from autotune.errors import Unsupported

ALGORITHMS = 8
"""Number of the library's heuristic algorithms to try, from the first on."""
WORKSPACE = 32 << 20
"""Bytes of workspace for an algorithm, the same as torch's on an H100."""
_ALIGNMENT = 16
"""Minimum alignment of each tensor in bytes, which the tensor-core kernels require."""

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_COMPUTE = {torch.float32: 77, torch.float16: 68, torch.bfloat16: 68}
"""cublasComputeType_t: sums in fp32, and fp32 factors as TF32."""
# cublasLtMatmulDescAttributes_t
_TRANSA, _TRANSB, _EPILOGUE, _BIAS, _AUX, _AUX_LD, _BIAS_TYPE = 3, 4, 7, 8, 11, 12, 26
# cublasLtMatmulPreferenceAttributes_t
_MOST_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_IN_FP32 = 2
"""The only reduction scheme for split-K: in fp32, through the workspace, in a fixed order."""

EPILOGUES = {"": 1, "bias": 4, "add": 1, "bias_add": 4, "relu": 6, "gelu": 36, "gelu_aux": 164, "dgelu": 192}
"""cublasLtEpilogue_t by autotune's names. ``relu`` and the two ``gelu`` add a bias; ``gelu`` is the tanh form.

``gelu_aux`` also writes the argument of GELU. ``dgelu`` multiplies by the derivative of GELU at such a matrix.
``add`` and ``bias_add`` add another matrix, which is the library's C.
"""


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Matmul:
    """A product ``y = a @ b``, of shapes [m, k] and [k, n], and its epilogue.

    Attributes:
        lda, ldb: stride between the rows of a factor, or between its columns if it is transposed, in elements.
        ta, tb: True if the factor's columns are contiguous in memory.
        dtype: of all matrices; fp32 is computed in TF32.
        epilogue: of :data:`EPILOGUES`.
    """

    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ta: bool
    tb: bool
    dtype: torch.dtype
    epilogue: str = ""


Run = Callable[..., None]
"""Takes a, b, y, the bias, the other matrix, and the raw stream; None for those that the epilogue lacks."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded.

    Raises:
        Unsupported: torch has none, as a build for CPUs.
    """
    try:
        with open("/proc/self/maps") as maps:
            paths = [line.split(maxsplit=5)[-1].strip() for line in maps if "libcublasLt" in line]
    except OSError:
        paths = []
    if not paths:
        raise Unsupported("torch has loaded no cuBLASLt")
    found = ctypes.CDLL(paths[0])
    found.cublasLtGetVersion.restype = ctypes.c_size_t
    return found


def version() -> str:
    """The library's version, such as ``cublasLt 130100``; "" without the library."""
    try:
        return f"cublasLt {library().cublasLtGetVersion()}"
    except Unsupported:
        return ""


class CublasError(RuntimeError):
    """The library refused a call."""


def _check(status: int, doing: str) -> None:
    if status:
        raise CublasError(f"cuBLASLt: {doing}: status {status}")


@lru_cache(maxsize=8)
def _handle(device: int) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(found)), "creating a handle")
    return found


def _layout(dtype: torch.dtype, rows: int, columns: int, ld: int) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    made = library().cublasLtMatrixLayoutCreate(
        ctypes.byref(found), _TYPES[dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(ld)
    )
    _check(made, "describing a matrix")
    return found


class _Plan:
    """The library's descriptors of a product and its algorithms, which are never destroyed."""

    def __init__(self, what: Matmul, device: int) -> None:
        self.what, self.device, self.lock = what, device, threading.Lock()
        lib, self.handle = library(), _handle(device)
        self.description = ctypes.c_void_p()
        _check(
            lib.cublasLtMatmulDescCreate(ctypes.byref(self.description), _COMPUTE[what.dtype], 0),
            "describing a product",
        )
        # y.T = b.T @ a.T: the library's first factor is the product's second.
        self._put(_TRANSA, ctypes.c_int32(what.tb))
        self._put(_TRANSB, ctypes.c_int32(what.ta))
        self._put(_EPILOGUE, ctypes.c_uint32(EPILOGUES[what.epilogue]))
        if what.epilogue not in ("", "add", "dgelu"):
            self._put(_BIAS_TYPE, ctypes.c_int32(_TYPES[what.dtype]))
            self._put(_BIAS, ctypes.c_void_p(_ALIGNMENT))  # never read: the heuristics need its alignment
        if what.epilogue in ("gelu_aux", "dgelu"):
            self._put(_AUX, ctypes.c_void_p(_ALIGNMENT))
            self._put(_AUX_LD, ctypes.c_int64(what.n))
        m, n, k, dtype = what.m, what.n, what.k, what.dtype
        self.a = _layout(dtype, *((m, k) if what.ta else (k, m)), what.lda)
        self.b = _layout(dtype, *((k, n) if what.tb else (n, k)), what.ldb)
        self.y = _layout(dtype, n, m, n)
        self.found = self._algorithms()

    def _put(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        put = library().cublasLtMatmulDescSetAttribute(self.description, attribute, ctypes.byref(value), size)
        _check(put, f"attribute {attribute} of a product")

    def _algorithms(self) -> list[_Found]:
        lib, limits, count = library(), ctypes.c_void_p(), ctypes.c_int()
        _check(lib.cublasLtMatmulPreferenceCreate(ctypes.byref(limits)), "describing a preference")
        wanted: list[tuple[int, Any]] = [(_MOST_WORKSPACE, ctypes.c_size_t(WORKSPACE))]
        wanted += [(_REDUCTIONS, ctypes.c_uint32(_IN_FP32))]
        wanted += [(attribute, ctypes.c_uint32(_ALIGNMENT)) for attribute in _ALIGNMENTS]
        for attribute, value in wanted:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            put = lib.cublasLtMatmulPreferenceSetAttribute(limits, attribute, ctypes.byref(value), size)
            _check(put, "a preference")
        found = (_Found * ALGORITHMS)()
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle,
            self.description,
            self.b,
            self.a,
            self.y,
            self.y,
            limits,
            ALGORITHMS,
            found,
            ctypes.byref(count),
        )
        lib.cublasLtMatmulPreferenceDestroy(limits)
        return [] if status else [one for one in found[: count.value] if not one.state]

    def run(self, algorithm: int, tensors: Sequence[Any], stream: int) -> None:
        a, b, y, bias, other = tensors
        for tensor in tensors:
            if tensor is not None and tensor.data_ptr() % _ALIGNMENT:
                raise CublasError("cuBLASLt: a tensor is not aligned")
        one, adds = self.found[algorithm], self.what.epilogue.endswith("add")
        # From torch's allocator: used by this call on this stream, and by a CUDA graph that captures it.
        scratch = torch.empty(one.workspace, dtype=torch.uint8, device=y.device) if one.workspace else None
        with self.lock:
            if bias is not None:
                self._put(_BIAS, ctypes.c_void_p(bias.data_ptr()))
            if other is not None and not adds:
                self._put(_AUX, ctypes.c_void_p(other.data_ptr()))
            status = library().cublasLtMatmul(
                self.handle,
                self.description,
                ctypes.byref(_ONE),
                ctypes.c_void_p(b.data_ptr()),
                self.b,
                ctypes.c_void_p(a.data_ptr()),
                self.a,
                ctypes.byref(_ONE if adds else _ZERO),
                ctypes.c_void_p((other if adds else y).data_ptr()),
                self.y,
                ctypes.c_void_p(y.data_ptr()),
                self.y,
                ctypes.byref(one.algorithm),
                ctypes.c_void_p(scratch.data_ptr() if scratch is not None else None),
                ctypes.c_size_t(one.workspace),
                ctypes.c_void_p(stream),
            )
        _check(status, "multiplying")


_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@lru_cache(maxsize=256)
def _planned(what: Matmul, device: int) -> _Plan:
    return _Plan(what, device)


def plan(what: Matmul, device: int, algorithm: int) -> Run:
    """The product by one of the library's algorithms.

    Args:
        device: index of the GPU.
        algorithm: index among the algorithms of the library's heuristics.

    Raises:
        Unsupported: the library has no such algorithm for it.
        CublasError: the library refused the description.
    """
    planned = _planned(what, device)
    if not 0 <= algorithm < len(planned.found):
        raise Unsupported(f"cuBLASLt has {len(planned.found)} algorithms for this product")

    def run(a: Any, b: Any, y: Any, bias: Any, other: Any, stream: int) -> None:
        planned.run(algorithm, (a, b, y, bias, other), stream)

    return run
