"""Whole models in plain PyTorch: the five of FusionStitching (arXiv 2009.10924) at its batch sizes, and a Llama block.

    autotune search fusion examples.models.bert:train --inputs examples.models.bert:train_inputs

Every module of this package has ``infer`` and ``infer_inputs``, ``train`` and ``train_inputs``, or both; ``model`` and
``inputs`` are the first of them. A training module returns its loss. Sizes: :mod:`examples.models.family`.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass

from torch import Tensor, nn

from examples.models.family import DEPTHS, SIZES, Family

NAMES = (
    "bert_train",
    "bert_infer",
    "transformer_train",
    "dien_train",
    "dien_infer",
    "asr_infer",
    "crnn_infer",
    "llama_train",
    "llama_infer",
)


@dataclass(frozen=True)
class Example:
    """A model with its inputs on a device.

    Attributes:
        name: one of :data:`NAMES`.
        train: whether a step is forward and backward (``module`` returns the loss) or forward only.
        module, inputs: ``module(*inputs)``.
    """

    name: str
    train: bool
    module: nn.Module
    inputs: tuple[Tensor, ...]


def make(name: str, device: str, size: str = "gpu", **changes: object) -> Example:
    """Build a model and its inputs; weights and inputs are random and always the same.

    Args:
        name: one of :data:`NAMES`.
        device: "cpu" or "cuda:N".
        size: one of :data:`SIZES`.
        changes: fields of the model's configuration to replace, such as ``layers=2``; those it has not are left out.

    Raises:
        ValueError: an unknown name or size.
    """
    if name not in NAMES:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(NAMES)}")
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; there are {', '.join(SIZES)}")
    module, _, kind = name.rpartition("_")
    family: Family = importlib.import_module(f"examples.models.{module}").FAMILY
    config = family.config(size)
    fields = {f.name for f in dataclasses.fields(config)}
    config = dataclasses.replace(config, **{k: v for k, v in changes.items() if k in fields})
    inputs = family.batch(config, kind == "train", device)
    return Example(name, kind == "train", family.module(kind, config, device), inputs)


__all__ = ["DEPTHS", "NAMES", "SIZES", "Example", "Family", "make"]
