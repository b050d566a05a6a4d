"""The computation of a scenario, ready to run: a GEMM on tensors of its own, whole or by row panels, or a program."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol

import torch

from autotune.domains.c3.scenario import Compute, Gemm, Program
from autotune.errors import UserError, first_line
from autotune.measure.verify import compare
from autotune.task import Verdict

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_BLOCK = 1 << 28  # elements of a reference's operands that are widened at a time


class Computation(Protocol):
    """A computation with inputs and outputs of its own.

    Attributes:
        panels: pieces that it runs in; all of them are the computation.
    """

    panels: int

    def run(self, panel: int) -> None:
        """Enqueue piece ``panel`` on the current stream (CUDA), or run it (CPU)."""
        ...

    def in_panels(self, panels: int) -> Computation:
        """The same computation, on the same tensors, in so many pieces."""
        ...

    def output(self) -> Tensor:
        """What the last run computed."""
        ...

    def reference(self) -> Tensor:
        """What it should be, computed once, alone."""
        ...

    def poison(self) -> None:
        """Overwrite the output, so that what is not computed again shows."""
        ...

    def check(self) -> Verdict:
        """The last run's output against the reference. Waits for the device."""
        ...

    def bytes_moved(self) -> int:
        """Bytes of inputs and outputs."""
        ...


def open_compute(compute: Compute, device: torch.device | str, panels: int = 1, seed: int = 0) -> Computation:
    """The computation with random inputs on ``device``.

    Args:
        panels: row panels of a GEMM; a program has one.
        seed: of the inputs.

    Raises:
        UserError: a program that is not there, or does not run.
    """
    where = torch.device(device)
    if isinstance(compute, Gemm):
        return GemmComputation.make(compute, where, seed).in_panels(panels)
    return ProgramComputation(compute, where)


class GemmComputation:
    """``C = A @ B``.

    Args:
        a, b: of m x k and k x n elements, views where they are stored transposed.
        c: of m x n elements.
        gemm: for the label of an error.
    """

    def __init__(self, gemm: Gemm, a: Tensor, b: Tensor, c: Tensor, panels: int, shared: dict[str, Tensor]) -> None:
        self.gemm, self.a, self.b, self.c, self.panels = gemm, a, b, c, panels
        self._shared = shared
        bounds = [gemm.m * i // panels for i in range(panels + 1)]
        self._rows = [(a[lo:hi], c[lo:hi]) for lo, hi in itertools.pairwise(bounds)]

    @classmethod
    def make(cls, gemm: Gemm, device: torch.device, seed: int) -> GemmComputation:
        """One panel, on new random inputs."""
        generator = torch.Generator(device).manual_seed(seed)

        def matrix(rows: int, columns: int, stored: str) -> Tensor:
            shape = (rows, columns) if stored == "n" else (columns, rows)
            made = torch.randn(shape, dtype=DTYPES[gemm.dtype], device=device, generator=generator)
            return made if stored == "n" else made.t()

        a, b = matrix(gemm.m, gemm.k, gemm.layout[0]), matrix(gemm.k, gemm.n, gemm.layout[1])
        c = torch.zeros(gemm.m, gemm.n, dtype=DTYPES[gemm.dtype], device=device)
        return cls(gemm, a, b, c, 1, {})

    def in_panels(self, panels: int) -> GemmComputation:
        return GemmComputation(self.gemm, self.a, self.b, self.c, panels, self._shared)

    def run(self, panel: int) -> None:
        a, c = self._rows[panel]
        torch.mm(a, self.b, out=c)

    def output(self) -> Tensor:
        return self.c

    def reference(self) -> Tensor:
        """In fp32, or fp64 where the inputs are fp32."""
        if "reference" not in self._shared:
            wide = torch.float64 if self.gemm.dtype == "f32" else torch.float32
            made = torch.empty(self.gemm.m, self.gemm.n, dtype=wide, device=self.c.device)
            step = max(1, _BLOCK // self.gemm.k)
            for left in range(0, self.gemm.n, step):
                b = self.b[:, left : left + step].to(wide)
                for top in range(0, self.gemm.m, step):
                    made[top : top + step, left : left + step] = self.a[top : top + step].to(wide) @ b
            self._shared["reference"] = made
        return self._shared["reference"]

    def poison(self) -> None:
        self.c.fill_(float("nan"))

    def check(self) -> Verdict:
        return compare(self.c, self.reference(), DTYPES[self.gemm.dtype], self.gemm.k)

    def bytes_moved(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.a, self.b, self.c))


class ProgramComputation:
    """A built-in fusion workload, with the kernels that are stored for it, or the user's callable as it is.

    It runs once when it is made, so that what it compiles lazily is compiled.

    Raises:
        UserError: there is no such program, or it fails.
    """

    panels = 1

    def __init__(self, program: Program, device: torch.device) -> None:
        from autotune.domains.fusion.program_spec import resolve

        self._fn, (self._args, self._kwargs), self._label = resolve(program.name, program.inputs or None, str(device))
        if ":" not in program.name:
            from autotune.runtime.backend import dynamo_backend

            self._fn = torch.compile(self._fn, backend=dynamo_backend, dynamic=False)
        self._last: Any = None
        try:
            self.run(0)
            first = self._floats()
            self.run(0)
            again = self._floats()
        except Exception as error:
            raise UserError(f"{self._label} failed on its inputs: {first_line(error)}") from error
        # Random numbers, or inputs that it writes to: then no two runs agree, and there is nothing to compare with.
        self._steady = torch.equal(first.nan_to_num(1e30), again.nan_to_num(1e30))
        self._reference = again

    def in_panels(self, panels: int) -> ProgramComputation:
        if panels != 1:
            raise ValueError(f"{self._label} cannot run in {panels} panels: only a GEMM has row panels")
        return self

    def run(self, panel: int) -> None:
        with torch.no_grad():
            self._last = self._fn(*self._args, **self._kwargs)

    def _results(self) -> list[Tensor]:
        from torch.utils import _pytree as pytree

        return [t for t in pytree.tree_leaves(self._last) if isinstance(t, torch.Tensor)]

    def _floats(self) -> Tensor:
        """All results end to end, as fp32 on the device."""
        flat = [t.detach().reshape(-1).float() for t in self._results()]
        return torch.cat(flat) if flat else torch.zeros(0)

    def output(self) -> Tensor:
        return self._floats()

    def reference(self) -> Tensor:
        return self._reference

    def poison(self) -> None:
        inputs = {t.untyped_storage().data_ptr() for t in self._tensors()}
        for t in self._results():
            if t.is_floating_point() and t.untyped_storage().data_ptr() not in inputs:
                t.detach().fill_(float("nan"))

    def _tensors(self) -> list[Tensor]:
        """Every tensor that it is given, its parameters and buffers included."""
        from torch.utils import _pytree as pytree

        found = [t for t in pytree.tree_leaves((self._args, self._kwargs)) if isinstance(t, torch.Tensor)]
        for owner in (self._fn, getattr(self._fn, "__self__", None)):
            if isinstance(owner, torch.nn.Module):
                found += [*owner.parameters(), *owner.buffers()]
        return found

    def check(self) -> Verdict:
        """By the tolerance of the coarsest type among the results: kernels may be chosen anew for another run."""
        if not self._steady:
            return Verdict(True, 0.0)
        types = {t.dtype for t in self._results() if t.is_floating_point()}
        coarse = min(types, key=lambda t: torch.finfo(t).bits, default=torch.float32)
        found = self._floats()
        return compare(found.to(coarse), self._reference.to(torch.float64), coarse)

    def bytes_moved(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._tensors(), *self._results()))
