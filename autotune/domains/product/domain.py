"""Matrix products and the regions after them, computed in one cuBLASLt call.

A workload is a product and one region (:mod:`autotune.compiler.regions.epilogues`). A candidate is one of cuBLASLt's
algorithms, with the epilogue that computes the region. The baselines run both as the original program does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.domain import Domain
from autotune.errors import Unsupported
from autotune.files import read_toml
from autotune.space import Space, load_space
from autotune.task import Artifact, Config, Kernel, Task
from autotune.workload import PRODUCT, Workload

if TYPE_CHECKING:
    from autotune.domains.product.bench import ProductBench

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MATRICES = {"gelu_aux": 2, "dgelu": 2, "add": 2, "bias_add": 2}
"""Number of matrices of the result's shape that an epilogue reads or writes, where that is more than one."""
_ALONE = 0.03
"""Share of a product's time that another algorithm usually saves, where it saves any."""
_BALANCE = 150
"""Floating-point operations of half precision that an H100 or H200 computes in the time of moving a byte."""
_SAVED = {"gelu": 2, "relu": 2, "dgelu": 2, "gelu_aux": 1, "add": 1, "bias_add": 1}
"""Number of matrices of the result's shape that an epilogue need not write or read."""


class ProductTask(Task):
    """See :class:`autotune.task.Task`.

    Raises:
        Unsupported: the device has no library that supports epilogues.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        from autotune.compiler.regions.epilogues import DEVICES

        self.workload, self.device, self.side = workload, device, device.partition(":")[0]
        if self.side not in DEVICES:
            raise Unsupported(f"products are searched on {' and '.join(sorted(DEVICES))}")

    def space(self, file: str | None = None) -> Space:
        # In a search of a program's regions, the file describes the regions' space.
        own = file is not None and read_toml(Path(file).expanduser(), "search-space file").get("domain") == PRODUCT
        return load_space(PRODUCT, "cuda", file if own else None)

    def default(self) -> Config:
        return {"algorithm": 0}

    def seeds(self) -> Sequence[Config]:
        return [{"algorithm": choice} for choice in self.space()["algorithm"].choices]

    def under(self, method: str, figures: Mapping[str, float]) -> Task:
        return self  # methods select how a region is split into groups

    def build(self, config: Config) -> Artifact:
        return Artifact(self.side, (Kernel(f"{PRODUCT}_{self.workload.spec['epilogue']}"),), generator=PRODUCT)


class Products(Domain):
    """See :class:`autotune.domain.Domain`."""

    def open_task(self, workload: Workload, device: str) -> ProductTask:
        return ProductTask(workload, device)

    def open_bench(self, workload: Workload, device: str) -> ProductBench:
        from autotune.domains.product.bench import ProductBench

        return ProductBench(workload, device)

    def compile_baselines(self, workload: Workload, device: str) -> None:
        from autotune.domains.product.bench import compile_baselines

        compile_baselines(workload, device)

    def bytes_moved(self, workload: Workload) -> int:
        m, n, k = (int(workload.spec[name]) for name in "mnk")
        whole = m * n * _MATRICES.get(str(workload.spec["epilogue"]), 1)
        return _BYTES[str(workload.spec["dtype"])] * (m * k + k * n + whole)

    def bytes_saved(self, workload: Workload) -> float:
        spec = workload.spec
        m, n, k = (int(spec[name]) for name in "mnk")
        size = _BYTES[str(spec["dtype"])]
        epilogue = size * m * n * _SAVED.get(str(spec["epilogue"]), 0)
        return epilogue + _ALONE * size * m * n * k / _BALANCE  # TF32 is half as fast as half precision

    def bytes_held(self, workload: Workload) -> int:
        return self.bytes_moved(workload)

    def damage(self, workload: Workload) -> str | None:
        from autotune.compiler.regions import aten
        from autotune.runtime.inductor.product_call import matmul_of

        try:
            matmul_of(workload.spec)
            aten.from_json(workload.source)
            if "rest" in workload.source:
                aten.from_json(workload.source["rest"]["program"])
        except (KeyError, TypeError, ValueError) as error:
            return f"it is no product ({error})"
        return None


DOMAIN = Products()
