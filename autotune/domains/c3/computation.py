"""The computation of a scenario with its own input tensors: a GEMM, or a program."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autotune.domains.c3.collectives.nccl import DTYPES
from autotune.domains.c3.scenario import Compute, Gemm, Program
from autotune.domains.fusion.program_spec import resolve
from autotune.errors import UserError, first_line
from autotune.measure.verify import compare
from autotune.task import Verdict

_BLOCK = 1 << 28  # operand elements that a reference widens at a time


def open_compute(compute: Compute, device: torch.device | str, seed: int = 0) -> Computation:
    """Open the computation with random inputs on ``device``.

    Args:
        seed: seed of the inputs.

    Raises:
        UserError: the program does not exist, or fails.
    """
    where = torch.device(device)
    return GemmComputation(compute, where, seed) if isinstance(compute, Gemm) else ProgramComputation(compute, where)


class GemmComputation:
    """``C = A @ B`` on random matrices; a matrix stored transposed is a view."""

    def __init__(self, gemm: Gemm, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def matrix(rows: int, columns: int, stored: str) -> Tensor:
            shape = (rows, columns) if stored == "n" else (columns, rows)
            made = torch.randn(shape, dtype=DTYPES[gemm.dtype], device=device, generator=generator)
            return made if stored == "n" else made.t()

        self.gemm = gemm
        self.a, self.b = matrix(gemm.m, gemm.k, gemm.layout[0]), matrix(gemm.k, gemm.n, gemm.layout[1])
        self.c = torch.zeros(gemm.m, gemm.n, dtype=DTYPES[gemm.dtype], device=device)

    def run(self) -> None:
        """Enqueue the GEMM on the current stream (CUDA), or run it (CPU)."""
        torch.mm(self.a, self.b, out=self.c)

    def output(self) -> Tensor:
        """The result of the last run."""
        return self.c

    @cached_property
    def reference(self) -> Tensor:
        """The expected result in fp32, or in fp64 for fp32 inputs."""
        wide = torch.float64 if self.gemm.dtype == "f32" else torch.float32
        made = torch.empty(self.gemm.m, self.gemm.n, dtype=wide, device=self.c.device)
        step = max(1, _BLOCK // self.gemm.k)
        for left in range(0, self.gemm.n, step):
            b = self.b[:, left : left + step].to(wide)
            for top in range(0, self.gemm.m, step):
                made[top : top + step, left : left + step] = self.a[top : top + step].to(wide) @ b
        return made

    def poison(self) -> None:
        """Overwrite the output with NaN, so that unwritten elements are detected."""
        self.c.fill_(float("nan"))

    def check(self) -> Verdict:
        """Compare the last run's output with the reference. Waits for the device."""
        return compare(self.c, self.reference, DTYPES[self.gemm.dtype], self.gemm.k)

    def bytes_moved(self) -> int:
        """Bytes of inputs and outputs."""
        return sum(t.numel() * t.element_size() for t in (self.a, self.b, self.c))


class ProgramComputation:
    """A built-in fusion workload with its stored kernels, or the user's callable unchanged.

    It has the methods of :class:`GemmComputation`. The constructor runs it, so that lazy compilation is complete.

    Raises:
        UserError: the program does not exist, or fails.

    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self._fn, (self._args, self._kwargs), self._label = resolve(program.name, program.inputs or None, str(device))
        if ":" not in program.name:
            from autotune.runtime.backend import deploy_backend

            self._fn = torch.compile(self._fn, backend=deploy_backend, dynamic=False)
        self._last: Any = None
        try:
            self.run()
            first = self._floats()
            self.run()
            again = self._floats()
        except Exception as error:
            raise UserError(f"{self._label} failed on its inputs: {first_line(error)}") from error
        # A program with random numbers, or one that modifies its inputs, differs between runs and cannot be compared.
        self._steady = torch.equal(first.nan_to_num(1e30), again.nan_to_num(1e30))
        self.reference = again

    def run(self) -> None:
        with torch.no_grad():
            self._last = self._fn(*self._args, **self._kwargs)

    def _results(self) -> list[Tensor]:
        return [t for t in tree_leaves(self._last) if isinstance(t, torch.Tensor)]

    def _floats(self) -> Tensor:
        """All results, flattened and concatenated as fp32 on the device."""
        flat = [t.detach().reshape(-1).float() for t in self._results()]
        return torch.cat(flat) if flat else torch.zeros(0)

    def output(self) -> Tensor:
        return self._floats()

    def poison(self) -> None:
        inputs = {t.untyped_storage().data_ptr() for t in self._tensors()}
        for t in self._results():
            if t.is_floating_point() and t.untyped_storage().data_ptr() not in inputs:
                t.detach().fill_(float("nan"))

    def _tensors(self) -> list[Tensor]:
        found = [t for t in tree_leaves((self._args, self._kwargs)) if isinstance(t, torch.Tensor)]
        for owner in (self._fn, getattr(self._fn, "__self__", None)):
            if isinstance(owner, torch.nn.Module):
                found += [*owner.parameters(), *owner.buffers()]
        return found

    def check(self) -> Verdict:
        """Compare by the tolerance of the coarsest dtype among the results: another run may select other kernels."""
        if not self._steady:
            return Verdict(True, 0.0)
        types = {t.dtype for t in self._results() if t.is_floating_point()}
        coarse = min(types, key=lambda t: torch.finfo(t).bits, default=torch.float32)
        found = self._floats()
        return compare(found.to(coarse), self.reference.to(torch.float64), coarse)

    def bytes_moved(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._tensors(), *self._results()))


Computation = GemmComputation | ProgramComputation
