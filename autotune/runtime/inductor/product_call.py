"""A matrix product with an epilogue inside Inductor's generated code, which replaces a product and a region.

A look-up only reads the database, for exactly this workload, device and library. The product must be faster by
:data:`MARGIN` than Inductor's product and kernel, and than Inductor's product with the region's own stored kernel.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autotune.device import DeviceIdentity, Environment, environment, identify
from autotune.errors import UserError, first_line
from autotune.runtime.deployment import deployment
from autotune.runtime.ladder import Level, Match
from autotune.runtime.launch import cublaslt
from autotune.runtime.launch.prepared import TensorSpec
from autotune.store.records import Schedule
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.compiler.lower.facts import GraphFacts
    from autotune.compiler.regions.epilogues import Product
    from autotune.compiler.regions.find import Region
    from autotune.store.reading import Match as How
    from autotune.store.reading import Reader

log = logging.getLogger("autotune")

PREFIX = "product:"
"""Prefix of a call's text; the text of a region's call has no colon."""
MARGIN = 0.03
"""Fraction of the replaced code's time that a product must save."""


@dataclass(frozen=True)
class ProductCall:
    """A product, its region, and the algorithm that computes both.

    Attributes:
        label: for messages. ``tuned``: the workload's fingerprint.
        spec: of the workload. ``source``: its operators, which run if the library fails.
        algorithm: of the stored configuration.
        inputs, outputs: layouts of the tensors. ``device``: "cuda:N".
    """

    label: str
    tuned: str
    spec: Mapping[str, Any]
    source: Mapping[str, Any]
    algorithm: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    device: str
    overwrites: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, product: Product, schedule: Schedule) -> ProductCall:
        """The call of a product by a stored schedule, which has a configuration."""
        workload, config = product.workload, schedule.config
        assert config is not None
        given, made = (
            tuple(TensorSpec.of(n.meta["val"]) for n in nodes) for nodes in (product.inputs, product.outputs)
        )
        algorithm = int(config["algorithm"])
        name, device = workload.fingerprint, product.device
        return cls(workload.label, name, workload.spec, workload.source, algorithm, given, made, device)

    def text(self) -> str:
        """The call as one ASCII word, without the layouts."""
        fields = {"spec": self.spec, "source": self.source, "algorithm": self.algorithm, "device": self.device}
        fields |= {"label": self.label, "tuned": self.tuned, "counts": [len(self.inputs), len(self.outputs)]}
        data = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return PREFIX + base64.b85encode(zlib.compress(data.encode(), 9)).decode()


def load(text: str, operators: Callable[[Any], Any]) -> Callable[..., None]:
    """The function for a call's text: it takes the inputs, the outputs to write, and the raw stream.

    Args:
        operators: returns a function that runs a call's operators.
    """
    fields = json.loads(zlib.decompress(base64.b85decode(text.removeprefix(PREFIX))))
    inputs, outputs = fields.pop("counts")
    call = ProductCall(inputs=(_ANY,) * inputs, outputs=(_ANY,) * outputs, **fields)
    instead = operators(call)
    try:
        if call.spec["library"] != cublaslt.version():
            raise cublaslt.CublasError(f"the measurement used {call.spec['library']}")
        run = bound(call.spec, call.source, call.algorithm, torch.device(call.device).index or 0, inputs)
    except Exception as error:
        instead.warn(f"is not used: {first_line(error)}")
        return instead  # type: ignore[no-any-return]
    failed = False

    def write(*tensors: Any) -> None:
        nonlocal failed
        if not failed:
            try:
                run(*tensors)
                return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failed = True
                instead.warn(f"failed and is not used any more: {first_line(error)}")
        instead(*tensors)

    return write


_ANY = TensorSpec((), (), torch.bfloat16)


def bound(
    spec: Mapping[str, Any], source: Mapping[str, Any], algorithm: int, device: int, inputs: int
) -> Callable[..., None]:
    """A product as a function of ``inputs`` inputs, its outputs and the raw stream.

    Raises:
        Unsupported, CublasError: the library cannot compute it with this algorithm.
    """
    run = cublaslt.plan(matmul_of(spec), device, algorithm)
    a, b, bias, other = (int(place) for place in source["roles"])
    y, kept = (int(place) for place in source["results"])
    large = other if kept < 0 else inputs + kept

    def call(*tensors: Any) -> None:
        small, whole = (None if place < 0 else tensors[place] for place in (bias, large))
        run(tensors[a], tensors[b], tensors[inputs + y], small, whole, tensors[-1])

    return call


def matmul_of(spec: Mapping[str, Any]) -> cublaslt.Matmul:
    """The product that a workload describes.

    Raises:
        KeyError, TypeError, ValueError: the spec is not a valid product.
    """
    (lda, ta), (ldb, tb) = spec["a"], spec["b"]
    numbers = [spec["m"], spec["n"], spec["k"], lda, ldb]
    if not all(type(n) is int and 0 < n < 1 << 31 for n in numbers) or spec["epilogue"] not in cublaslt.EPILOGUES:
        raise ValueError("its sizes or its epilogue are damaged")
    m, n, k = numbers[:3]
    types = ("bfloat16", "float16", "float32") if spec["epilogue"] in ("", "bias") else ("bfloat16", "float16")
    if lda < (m if ta else k) or ldb < (k if tb else n) or spec["dtype"] not in types:
        raise ValueError("its matrices are damaged")
    return cublaslt.Matmul(m, n, k, lda, ldb, bool(ta), bool(tb), getattr(torch, spec["dtype"]), str(spec["epilogue"]))


def searched_products(facts: GraphFacts, regions: Sequence[Region]) -> list[Product]:
    """The products of a graph that the settings ask for. Look-ups warn of a setting that cannot be read."""
    from autotune.compiler.regions.epilogues import products_of

    try:
        asked = deployment().settings.products == "search"
    except UserError:
        return []
    return products_of(facts, regions, cublaslt.version()) if asked else []


def look_up(workload: Workload, device: str) -> Match:
    """The stored schedule of a product on "cuda:N". Never raises: an error logs one warning."""
    try:
        own = deployment()
        return match(workload, own.store(), identify(device), environment(device), own.settings.environment)
    except Exception as error:
        deployment().warn_once(
            f"match {workload.fingerprint}", f"autotune: looking up {workload.label} failed: {error!r}"
        )
        return Match(Level.NONE, reason="the look-up failed")


def match(workload: Workload, store: Reader | None, device: DeviceIdentity, env: Environment, how: How) -> Match:
    """Look a product up in a database, for exactly this device and library; arguments as of
    :func:`autotune.runtime.match.match`.

    Raises:
        UserError: the database failed.
    """
    if store is None:
        return Match(Level.NONE, reason="there is no database")
    found = store.get_schedule(workload.fingerprint, device.fingerprint, env, match=how)
    if found is None or deployment().disabled(found) or not _is_proper(found):
        return Match(Level.NONE, reason="not tuned on this device")
    return Match(Level.EXACT, found, workload)


def _is_proper(schedule: Schedule) -> bool:
    """True for a baseline or a valid number of an algorithm, since a database may be damaged."""
    if schedule.config is None:
        return True
    algorithm = schedule.config.get("algorithm")
    return type(algorithm) is int and 0 <= algorithm < cublaslt.ALGORITHMS


def is_faster(product: Schedule, others: Iterable[Schedule | None], rest: Schedule | None = None) -> bool:
    """True if a product's schedule beats Inductor's code with the stored schedules of its parts.

    Args:
        others: schedules of parts: of the region after Inductor's product, and of the product alone.
        rest: the schedule of the rest of the region.
    """
    theirs = product.baselines.get("inductor")
    if product.config is None or theirs is None:
        return False
    return product.latency_us - _won(rest) < (1 - MARGIN) * (theirs - sum(map(_won, others)))


def _won(schedule: Schedule | None) -> float:
    """Microseconds by which a stored kernel beats Inductor's."""
    if schedule is None or schedule.config is None:
        return 0.0
    return max(0.0, schedule.baselines.get("inductor", 0.0) - schedule.latency_us)
