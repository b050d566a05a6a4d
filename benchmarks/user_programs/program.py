"""A program, what it is made for, and how a contender compiles it."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real.vision import declare_operators

COLD = ("compile", "attention", "unsearched", "search")
WARM = {"again": "search", "unsearched again": "unsearched", "compile again": "compile"}
"""Contenders of a second process, and the one whose database and caches each starts with."""
CONTENDERS = (*COLD, *WARM)
EAGER = "eager"
MODES = ("default", "max-autotune")


@dataclass
class Program:
    """A program that is ready to run.

    Attributes:
        train: its step updates weights.
        step: one step as launched from Python, its optimizer included; returns the loss, or the results of inference.
    """

    train: bool
    step: Callable[[], Tensor]


@dataclass(frozen=True)
class Compiler:
    """The way in which a contender compiles what a program's user gives to ``torch.compile``.

    Attributes:
        contender: one of :data:`CONTENDERS`, or "eager".
        mode: of ``torch.compile``; one other than "default" replaces a program's own.
        seconds: of the option "search".
        took: seconds of each call of ``torch.compile``, which imports Inductor.
    """

    contender: str = EAGER
    mode: str = "default"
    seconds: float = 0.0
    took: list[float] = field(default_factory=list, compare=False)

    def __call__(self, target: Any, **own: Any) -> Any:
        """Compile a function or module.

        Args:
            own: arguments that the program's user gives to ``torch.compile``.
        """
        if self.contender == EAGER:
            return target
        begin = time.perf_counter()
        made = torch.compile(target, **self.arguments(**own))
        self.took.append(time.perf_counter() - begin)
        return made

    def arguments(self, mode: str | None = None, **own: Any) -> dict[str, Any]:
        """Arguments of ``torch.compile``.

        Args:
            mode: the program's own.
            own: further arguments of the program's own.
        """
        made: dict[str, Any] = dict(own)
        if self.mode != "default":
            mode = self.mode
        if mode is not None:
            made["mode"] = mode
        kind = WARM.get(self.contender, self.contender)
        if kind == "compile":
            return made
        made["backend"] = _backend()
        if kind == "search":
            # torch.compile takes a mode or options, not both.
            if mode is None:
                made["options"] = {"search": self.seconds}
            else:
                os.environ["AUTOTUNE_SEARCH"] = f"{self.seconds:g}"
        if kind == "unsearched":
            os.environ["AUTOTUNE_UNSEARCHED"] = "default"
        return made


def _backend() -> Any:
    """The backend of the package that is imported, which need not be the one that is installed."""
    import autotune

    return sys.modules[autotune.compile.__module__].dynamo_backend


@dataclass(frozen=True)
class Setup:
    """Device and size of a program that is made.

    Attributes:
        device: "cpu" or "cuda:N".
        tiny: small sizes, to try a program on a CPU.
        compile: of the contender.
        capturable: that argument of the optimizers that have it.
    """

    device: str
    tiny: bool = False
    compile: Compiler = field(default_factory=Compiler)
    capturable: bool = False

    @property
    def kind(self) -> str:
        """Device type, as ``torch.autocast`` takes it."""
        return torch.device(self.device).type

    def size(self, full: Any, tiny: Any) -> Any:
        """One of two sizes."""
        return tiny if self.tiny else full

    def tokens(self, vocabulary: int, *shape: int) -> Tensor:
        """Random token numbers; the first few are special tokens."""
        return torch.randint(4, vocabulary, shape, device=self.device)

    def autocast(self, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
        """Autocast of a step; bf16 on a CPU."""
        return torch.autocast(self.kind, dtype if self.kind == "cuda" else torch.bfloat16)

    def half(self, dtype: torch.dtype = torch.bfloat16) -> torch.dtype:
        """The type of weights in half precision; fp32 on a CPU."""
        return dtype if self.kind == "cuda" else torch.float32

    def scaler(self) -> torch.amp.GradScaler:
        """A gradient scaler, which does nothing on a CPU."""
        return torch.amp.GradScaler(self.kind, enabled=self.kind == "cuda")


def library(name: str) -> Any:
    """Import a library of models; torchvision's operators are declared where they do not load."""
    declare_operators()
    return importlib.import_module(name)


Maker = Callable[[Setup], Program]


@dataclass(frozen=True)
class Known:
    """A program that the benchmark has.

    Attributes:
        about: in a line.
        make: builds it.
        library: has to be installed, "" for plain torch.
    """

    name: str
    about: str
    make: Maker
    library: str = ""

    def lacks(self) -> str:
        """The reason why it cannot be made here, "" where it can."""
        if self.library and importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed"
        return ""


def batches(make: Callable[[], Any], count: int = 4) -> Callable[[], Any]:
    """The next of a few batches that are made beforehand, in turn."""
    turn = cycle([make() for _ in range(count)])
    return lambda: next(turn)


def fitted(
    loss_of: Callable[..., Tensor],
    following: Callable[[], Any],
    optimizer: torch.optim.Optimizer,
    *,
    clip: float | None = None,
) -> Program:
    """Training by the shortest loop: a loss, its gradients, the optimizer's step.

    Args:
        loss_of: of a batch's parts.
        following: the next batch.
        clip: largest norm of all gradients together; None to leave them.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]

    def step() -> Tensor:
        loss = loss_of(*following())
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
        return loss

    return Program(True, step)


def decayed(model: nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    """Groups of parameters: matrices with weight decay, the rest without."""
    weights = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in weights if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
    ]


def right_padded(lengths: Sequence[int], longest: int, device: str) -> Tensor:
    """An attention mask [B, longest], ones first."""
    return (torch.arange(longest) < torch.tensor(lengths)[:, None]).long().to(device)


def lengths(count: int, least: int, longest: int) -> list[int]:
    """Random lengths of a batch's sequences; the longest fills the batch."""
    found = torch.randint(least, longest + 1, (count,)).tolist()
    return [longest, *found[1:]]


def named(programs: Iterable[Known]) -> dict[str, Known]:
    """Programs by their names."""
    return {known.name: known for known in programs}
