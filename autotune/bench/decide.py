"""Decision by the whole step: stored kernels against ``torch.compile`` in the program that they were found for.

A kernel that is faster alone need not make its step faster. If the step is slower, families of regions are left to
Inductor, the least gain first, and the step is timed with each choice. The best choice is stored as a verdict on the
step's graphs, and deployment applies it.

If attention is rewritten, families are compared with a step that has the rewrite and leaves all of them to Inductor. A
gain of attention thus cannot hide a loss of the families.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from autotune import numerics
from autotune.bench.contenders import ProcessLock, inductor_takes_lock, room_for, templates_in_threads
from autotune.bench.kernels import kernels_of
from autotune.bench.step import COMPILE, lead_s, seeded, step_of, timed, trainable
from autotune.errors import UserError, first_line
from autotune.measure.outcome import spread
from autotune.measure.policy import Policy, default_policy
from autotune.runtime.backend import trial_backend
from autotune.runtime.deployment import deployment
from autotune.runtime.inductor.verdict import Family, Trial, base_mode
from autotune.store.records import BUSY, Verdict
from autotune.words import microseconds
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.store import Store

SMALL = 0.05
"""Gain, timed alone, that may vanish in a step: families below it are left out first."""

MARGIN = 0.002
"""Relative gain of the step above noise that is required to leave a family out."""

_CONTENDERS = 64
_ALL, _BEST, _TRY, _NONE = "autotune", "best", "try", "no kernel"


@dataclass(frozen=True)
class Decision:
    """The result of timing a step. Times are medians in microseconds.

    Attributes:
        mode: of :func:`autotune.runtime.inductor.verdict.base_mode`.
        compile_us: of ``torch.compile``.
        attention_us: with attention rewritten and no stored kernel; None if no attention is rewritten.
        all_us: with every stored kernel.
        autotune_us: with the kept kernels; equal to ``attention_us`` if everything is left to Inductor.
        ratio: median over rounds of ``torch.compile``'s time over autotune's, for the best choice measured.
        kernels_ratio: the same ratio, but over the step of ``attention_us`` if attention is rewritten.
        noise: interquartile range over median, the larger of both.
        tries: number of sets of families left out and measured.
        seconds: total duration.
        cut: True if the time was up before all tries.
        others: processors that other processes kept busy in the most disturbed timing (CPU).
        left: workloads left to Inductor.
        families: all families that stored kernels run, by workload.
        counts: occurrences of each family in the step.
        gains: gain of each family for the step in microseconds, None if unknown.
        in_step: families whose kernels' time in the step is known from the profiler; the others' time is measured
            alone.
        graphs: see :class:`autotune.runtime.inductor.verdict.Trial`.
        missed: regions of the step without a stored kernel: by fingerprint, the device and the workload.
    """

    mode: str
    compile_us: float
    attention_us: float | None
    all_us: float
    autotune_us: float | None
    ratio: float
    kernels_ratio: float
    noise: float
    tries: int
    seconds: float
    cut: bool
    others: float
    left: frozenset[str]
    families: Mapping[str, Family]
    counts: Mapping[str, int]
    gains: Mapping[str, float | None]
    in_step: frozenset[str]
    graphs: Mapping[tuple[str, str], Mapping[str, int]]
    missed: Mapping[str, tuple[str, Workload]] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """True if the machine was too busy to trust the decision; the next search repeats it."""
        return self.others > BUSY

    def record(self) -> dict[str, Any]:
        """Return the JSON that is stored with the verdict and printed by ``--json``."""
        return {
            "mode": self.mode,
            "compile_us": round(self.compile_us, 3),
            "attention_us": None if self.attention_us is None else round(self.attention_us, 3),
            "all_us": round(self.all_us, 3),
            "autotune_us": None if self.autotune_us is None else round(self.autotune_us, 3),
            "ratio": round(self.ratio, 4),
            "noise": round(self.noise, 4),
            "tries": self.tries,
            "seconds": round(self.seconds, 1),
            "cut": self.cut,
            "others_busy": round(self.others, 2),
            "graphs": len(self.graphs),
            "families": [
                {
                    "workload": f.workload,
                    "label": f.label,
                    "count": self.counts[f.workload],
                    "gain_us": None if (gain := self.gains[f.workload]) is None else round(gain, 3),
                    "gain_of": "step" if f.workload in self.in_step else "alone",
                    "kept": f.workload not in self.left,
                }
                for f in sorted(self.families.values(), key=lambda f: -(self.gains[f.workload] or 0.0))
            ],
        }

    @property
    def text(self) -> str:
        """The decision in one line."""
        theirs, ours = microseconds(self.compile_us), microseconds(self.all_us)
        line, ratio = f"step, mode {self.mode}: torch.compile {theirs}", f"median ratio {self.kernels_ratio:.3f}x"
        if self.attention_us is not None:
            line += f", {microseconds(self.attention_us)} with attention rewritten"
            slower = self.attention_us > self.compile_us * (1 + max(self.noise, MARGIN))
            line += " (slower; AUTOTUNE_ATTENTION=keep disables the rewriting)" if slower else ""
            ratio += " over that"
        line += f", autotune {ours}"
        if not self.left:
            return f"{line} ({ratio}): every stored kernel is used"
        many, of = len(self.left), len(self.families)
        every = "the only family is" if of == 1 else f"all {of} families are"
        if many == of and self.cut and not self.tries:
            short = "the time was up before any of them was left out: give more --step-timeout"
            return f"{line} with every stored kernel ({ratio}); {every} left to Inductor, as {short}"
        tried = f"{self.tries} {'try' if self.tries == 1 else 'tries'}{' before the time was up' if self.cut else ''}"
        if many == of:
            best = f"the best choice of kernels had a {ratio} in {tried}"
            return f"{line} with every stored kernel; {best}, so {every} left to Inductor"
        without = f"{microseconds(self.autotune_us or 0.0)} ({ratio}) without {many} of {of} families"
        return f"{line} with every stored kernel, {without}, which are left to Inductor (found in {tried})"


def decide_and_store(
    store: Store,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool,
    device: str,
    modes: Sequence[str],
    limit_s: float,
    note: Mapping[str, Any],
    say: Callable[[str], None],
    searched: Collection[str] | None = None,
) -> list[Decision]:
    """Decide a step in each mode and store the verdicts.

    An error is reported through ``say``, and the stored verdict stays. It also stays if the machine is busy now and was
    quiet for the stored decision.

    A training step gets its arguments from :func:`autotune.domains.fusion.program_spec.training`.

    Inductor may give the activations saved for the backward pass another memory layout than in the searched graph. On a
    GPU it pads rows of more than 1024 elements to multiples of 128 bytes. Such a region is another workload, which is
    stored as missed and reported.

    Args:
        store: contains the schedules.
        fn, args, kwargs, train: see :func:`autotune.bench.step.compare`.
        limit_s: seconds for each mode.
        note: entries stored with the verdicts: "target" and "command".
        say: called with a line on each decision or error.
        searched: the workloads of the search; the step's other regions are stored as missed.
    """
    from autotune.device import environment, identify
    from autotune.domains.fusion.program_spec import training

    found = []
    for mode in dict.fromkeys(map(base_mode, modes)):
        try:
            with deployment().deploying_from(store.url), training(fn, args, kwargs, train=train) as (given, named):
                decision = decide(fn, given, named, train=train, device=device, mode=mode, limit_s=limit_s)
            if decision is None:
                say(f"step, mode {mode}: no verdict, since the step runs no stored kernel")
                continue
            own = numerics.read([device])
            record = {**decision.record(), "lead_s": lead_s(device), "numerics": own, **note, "train": train}
            strict = store.put_environment(here := environment(device))
            verdicts = [
                Verdict(graph, store.put_device(identify(where)), strict, mode,
                        tuple(sorted(decision.left & workloads.keys())), record, time.time())
                for (graph, where), workloads in decision.graphs.items()
            ]  # fmt: skip
            before = (store.get_verdict(v.graph, v.device, here, mode, match="strict") for v in verdicts)
            stays = decision.busy and any(old is not None and not old.busy for old in before)
            if not stays:
                store.put_verdicts(verdicts)
        except Exception as error:
            why = str(error) if isinstance(error, UserError) else first_line(error)
            say(f"WARNING: step, mode {mode}: no verdict: {why}")
            continue
        under = numerics.text(own)
        say(f"{decision.text}; timed with {under}" if under else decision.text)
        if decision.busy:
            earlier = "the earlier verdict stays; " if stays else ""
            disturbed = f"other processes kept {decision.others:.1f} processors busy; {earlier}"
            say(f"WARNING: step, mode {mode}: {disturbed}search again on a quiet machine")
        found.append(decision)
    if searched is not None:
        others = regions_in_other_layout(found, searched)
        for where, workload in others.values():
            store.add_miss(workload, store.put_device(identify(where)), "has another memory layout in the step")
        if others:
            many = "1 region of the step has" if len(others) == 1 else f"{len(others)} regions of the step have"
            say(f"{many} another memory layout than the search saw: recorded for `autotune search --missed`")
    return found


def regions_in_other_layout(found: Sequence[Decision], searched: Collection[str]) -> dict[str, tuple[str, Workload]]:
    """Return the steps' missed workloads outside ``searched``: by fingerprint, the device and the workload."""
    return {name: miss for decision in found for name, miss in decision.missed.items() if name not in searched}


def decide(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool,
    device: str,
    mode: str = "default",
    limit_s: float = 120.0,
) -> Decision | None:
    """Choose the families of regions to leave to Inductor by timing the whole step; nothing is stored.

    Dynamo's compiled code in this process is reset.

    Args:
        fn, args, kwargs, train: see :func:`autotune.bench.step.compare`.
        mode: of ``torch.compile``.
        limit_s: no further try is begun that would probably end later.

    Returns:
        None if no stored kernel is used.

    Raises:
        UserError: nothing requires grad, or the step fails under a compiler.
    """
    begin = time.monotonic()
    policy = default_policy(device, "warm")  # caches stay as the previous step leaves them
    policy = replace(policy, final_s=min(policy.final_s, limit_s / 10), quiet_s=min(policy.quiet_s, limit_s / 20))
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    lock = ProcessLock(device, policy.lock_s)
    torch._dynamo.reset()
    try:
        with (
            room_for(_CONTENDERS),
            inductor_takes_lock(lock),
            templates_in_threads(device.startswith("cuda") and "max-autotune" in mode),
            deployment().unrecorded() as missed,
        ):
            steps = _Steps(fn, args, kwargs or {}, train, device, base_mode(mode), policy, lock)
            decision = _decided(steps, begin, limit_s)
            return decision and replace(decision, missed=dict(missed))
    finally:
        torch._dynamo.reset()


class _Steps:
    """The step under ``torch.compile``, and with sets of families left out."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        train: bool,
        device: str,
        mode: str,
        policy: Policy,
        lock: ProcessLock,
    ) -> None:
        self.fn, self.args, self.kwargs, self.mode = fn, args, kwargs, mode
        self.device, self.policy, self.lock = device, policy, lock
        self.others = 0.0  # processors that others kept busy in the most disturbed timing
        self.wanted = trainable(fn, args, kwargs) if train else []

    def compiled(self, **options: Any) -> Callable[[], object]:
        """Return a step, compiled and called once."""
        if self.mode != "default":
            options["mode"] = self.mode
        compiled: Callable[..., Any] = torch.compile(self.fn, dynamic=False, **options)
        step = step_of(compiled, self.args, self.kwargs, self.wanted)
        seeded(step, 0, self.device)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return step

    def times(self, steps: Mapping[str, Callable[[], object]]) -> Mapping[str, Sequence[float]]:
        """Return samples in microseconds, one per step and round. Raises UserError if a step cannot be timed."""
        with self.lock.exclusive():
            found = timed(steps, self.policy, self.device)
        for name, why in found.failed.items():
            raise UserError(f"{name} failed: {why}")
        self.others = max(self.others, found.others)
        return found.samples


def _decided(steps: _Steps, begin: float, limit_s: float) -> Decision | None:
    plain = steps.compiled()
    trial = Trial()
    first = time.monotonic()
    best = steps.compiled(backend=trial_backend(trial))
    if not trial.families:
        return None
    every = frozenset(trial.families)
    cost = time.monotonic() - first
    # The reference of each family: the step with all families left to Inductor.
    peer = steps.compiled(backend=trial_backend(Trial(every))) if trial.attention else plain
    first = time.monotonic()
    samples = steps.times({COMPILE: plain, **({_NONE: peer} if trial.attention else {}), _ALL: best})
    cost += time.monotonic() - first  # estimate for a try, which also compiles and times
    beside = _NONE if trial.attention else COMPILE
    compile_us, by_attention = statistics.median(samples[COMPILE]), _over(samples[COMPILE], samples[beside])
    del plain  # its CUDA graph may hold half of the device's memory
    all_us, ratio = statistics.median(samples[_ALL]), _over(samples[beside], samples[_ALL])
    ours, counts = samples[_ALL], _counts(trial)
    gains, in_step = _gains(trial, counts, best, steps.device)
    left: frozenset[str] = frozenset()
    queue, tries, cut = _groups(trial.families) if ratio < 1 else [], 0, False
    while queue:
        group = queue.pop(0)
        if ratio >= 1 and not group <= left:
            continue  # fast enough: only restore families left out without need
        if time.monotonic() - begin + cost > limit_s:
            cut = True
            break
        again, tries = time.monotonic(), tries + 1
        changed = left ^ group
        step = steps.compiled(backend=trial_backend(Trial(changed)))
        found = steps.times({beside: peer, _BEST: best, _TRY: step})
        halves = _halves(group, trial.families)
        if _over(found[_BEST], found[_TRY]) > 1 + MARGIN:
            left, best, samples, ours = changed, step, found, found[_TRY]
            ratio = _over(found[beside], ours)
            queue[:0] = halves
        else:
            queue += halves
        cost = max(cost / 2, time.monotonic() - again)
    attention_us = statistics.median(samples[_NONE]) if trial.attention else None
    kept_us: float | None = statistics.median(ours)
    if ratio < 1:
        left, kept_us = every, attention_us
    return Decision(
        mode=steps.mode,
        compile_us=compile_us,
        attention_us=attention_us,
        all_us=all_us,
        autotune_us=kept_us,
        ratio=by_attention * (1.0 if trial.attention and left == every else ratio),
        kernels_ratio=ratio,
        noise=max(spread(samples[beside]), spread(ours)),
        tries=tries,
        seconds=time.monotonic() - begin,
        cut=cut,
        others=steps.others,
        left=left,
        families=trial.families,
        counts=counts,
        gains=gains,
        in_step=in_step,
        graphs=trial.graphs,
    )


def _over(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def _gain(family: Family) -> float:
    """Return the gain over Inductor's kernel, both timed alone, as a fraction of the kernel's time."""
    return 0.0 if family.inductor_us is None else family.inductor_us / family.latency_us - 1


def _groups(families: Mapping[str, Family]) -> list[frozenset[str]]:
    """Return the first sets to leave out: families of small gain, then both halves of the others, lower gain first."""
    small = frozenset(name for name, f in families.items() if _gain(f) < SMALL)
    others = frozenset(families) - small
    found = [small, *(_halves(others, families) if len(others) > 1 else [others])]
    return [group for group in found if group]


def _halves(group: frozenset[str], families: Mapping[str, Family]) -> list[frozenset[str]]:
    """Return a group's halves, the one of lower gain first; none for a single family."""
    ordered = sorted(group, key=lambda name: (_gain(families[name]), name))
    middle = (len(ordered) + 1) // 2
    return [frozenset(ordered[:middle]), frozenset(ordered[middle:])] if len(ordered) > 1 else []


def _counts(trial: Trial) -> Counter[str]:
    counts: Counter[str] = Counter()
    for workloads in trial.graphs.values():
        counts.update(workloads)
    return counts


def _gains(
    trial: Trial, counts: Mapping[str, int], step: Callable[[], object], device: str
) -> tuple[dict[str, float | None], frozenset[str]]:
    """Return the gain of each family in microseconds, and the families whose kernels were profiled in the step.

    The gain is the time of Inductor's kernels for the regions, measured alone, minus that of the stored kernels. The
    latter is from the step's profile if no other family has kernels of the same names, and else measured alone.
    """
    seen = kernels_of({_ALL: step}).get(_ALL, {}) if device.startswith("cuda") else {}
    us: Mapping[str, float] = seen.get("names_us", {})
    shared = Counter(entry for f in trial.families.values() for entry in set(f.entries))
    gains, in_step = dict[str, float | None](), set[str]()
    for name, f in trial.families.items():
        taken = counts[name] * f.latency_us
        if f.entries and all(shared[entry] == 1 and entry in us for entry in f.entries):
            in_step.add(name)
            taken = sum(us[entry] for entry in set(f.entries))
        gains[name] = None if f.inductor_us is None else counts[name] * f.inductor_us - taken
    return gains, frozenset(in_step)
