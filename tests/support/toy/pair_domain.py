"""A domain with parts: two toy workloads one after the other, apart ("apart") or in the other order ("swapped").

Each part is a workload of :mod:`toy_domain`. ``spec["skewed"]`` names a composition whose predicted time is
nothing; the truth is in the measurements. ``spec["rival"]`` is a toy in the place of the first part, in a third one.
A composition "gone" is one that an earlier version had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.domain import Domain
from autotune.errors import BuildError, Unsupported, UserError
from autotune.space import Parameter, Space
from autotune.task import Artifact, Bench, Composition, Config, Kernel, Ranked, Runnable, Task, Verdict
from autotune.workload import Workload
from tests.support.toy.toy_domain import BLOCKS, ToyBench, ToyTask
from tests.support.toy.toy_domain import workload as toy

KIND = "pair"


def workload(a: dict[str, Any], b: dict[str, Any], **more: Any) -> Workload:
    spec = {"a": a, "b": b, "eager_us": 100_000, **more}
    return Workload(KIND, spec, label=f"pair {a.get('rows', 64)} {b.get('rows', 64)}")


class PairTask(Task):
    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device
        self.parts = [toy(**workload.spec["a"]), toy(**workload.spec["b"])]
        self.tasks = [ToyTask(p, device) for p in self.parts]
        self.method = ""

    def under(self, method: str, figures: Mapping[str, float]) -> PairTask:
        if method not in ("", "short"):
            raise UserError(f"no method {method!r}")
        self.method = method
        return self

    def compositions(self, limit: int) -> Sequence[Composition]:
        def made(name: str) -> Composition:
            parts = self.parts if name == "apart" else [replace(p, label="other") for p in reversed(self.parts)]
            if name == "rival":
                parts = [toy(**self.workload.spec["rival"]), self.parts[1]]
            if name == "costly":
                parts = [toy(rows=48, slow_us=1), *self.parts]
            weights = tuple(p.spec["slow_us"] + 1.0 for p in parts)
            expected = 1e6 if name == "costly" else sum(weights)

            def combine(choices: Sequence[Sequence[Ranked]]) -> list[Ranked]:
                best = [c[0] for c in choices]
                config: Config = {"plan": name} if name != "apart" else {}
                for k, (part, _) in enumerate(best if name == "apart" else reversed(best)):
                    config |= {f"g{k}.{n}": v for n, v in part.items()}
                return [(config, sum(us for _, us in best))]

            return Composition(name, tuple(parts), weights, expected, combine)

        names = ("apart", "swapped", *(["rival"] if "rival" in self.workload.spec else []), "costly")
        return [made(n) for n in names][: 1 if self.method == "short" else limit]

    def space(self, file: str | None = None) -> Space:
        return self.space_for({}, file)

    def space_for(self, config: Config, file: str | None = None) -> Space:
        if config.get("plan") == "gone":
            raise Unsupported("a plan of an earlier version")
        one = self.tasks[0].space(file)
        both = [replace(p, name=f"g{k}.{p.name}") for k in range(2) for p in one.parameters]
        plan = [Parameter("plan", (config["plan"],))] if "plan" in config else []
        return replace(one, parameters=(*both, *plan))

    def predict(self, config: Config) -> float | None:
        return self.workload.spec.get("predicted")

    def least_us(self) -> float | None:
        return self.workload.spec.get("least_us")

    def default(self) -> Config:
        return {f"g{k}.{n}": v for k in range(2) for n, v in self.tasks[k].default().items()}

    def seeds(self) -> Sequence[Config]:
        return []

    def reject(self, config: Config) -> str | None:
        return None

    def normalize(self, config: Config) -> Config:
        return config

    def adapt(self, config: Config) -> Config | None:
        return None

    def build(self, config: Config) -> Artifact:
        if config.get("plan") == "gone":
            raise BuildError("a plan of an earlier version")
        return Artifact("cpu", (Kernel("pair"),), generator="pair")


class PairBench(Bench):
    def __init__(self, workload: Workload) -> None:
        self.spec = workload.spec
        self.benches = [ToyBench(toy(**workload.spec[k])) for k in ("a", "b")]

    def load(self, config: Config, artifact: Artifact) -> Runnable:
        runs = []
        for k, bench in enumerate(self.benches):
            assert config[f"g{k}.block"] in BLOCKS
            runs.append(bench.load({"how": config[f"g{k}.how"], "block": config[f"g{k}.block"]}, artifact))
        self.runs = runs
        order = reversed(runs) if config.get("plan") == "swapped" else runs
        chosen = list(order)
        return lambda: [run() for run in chosen]

    def verify(self, run: Runnable, seed: int) -> Verdict:
        verdicts = [bench.verify(own, seed) for bench, own in zip(self.benches, self.runs, strict=True)]
        return next((v for v in verdicts if not v.ok), verdicts[0])

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        eager = ToyBench(toy(rows=64, eager_us=self.spec["eager_us"])).baselines()["eager"]
        return {"eager": eager}

    def bytes_moved(self) -> int:
        return sum(bench.bytes_moved() for bench in self.benches)


class Pair(Domain):
    """See ``autotune.domain.Domain``."""

    def open_task(self, workload: Workload, device: str) -> PairTask:
        return PairTask(workload, device)

    def open_bench(self, workload: Workload, device: str) -> PairBench:
        return PairBench(workload)


DOMAIN = Pair()
