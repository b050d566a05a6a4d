"""Times of a search's first schedules: the default and the seeds of one function, verified and timed.

    python tests/gpu/seeds_check.py [--only NAME] [--set KEY=VALUE ...] [--device cuda:0] [--dry]

``--set`` lets only configurations through that have these values (``--set prefetch=true``). Prints a line each, fastest
first: microseconds with a cold L2, what its first kernel needs of an SM, and the configuration where it differs from
the default. ``--dry`` only compiles, without a GPU: all take no time then. Exit code 1 if a schedule is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from autotune.domains.fusion.bench import FusionBench
from autotune.domains.fusion.task import FusionTask
from autotune.errors import BuildError
from autotune.task import Artifact, Config
from benchmarks.fusion.cases.backward import layer_norm_backward
from benchmarks.fusion.cases.mixed import mixed_axes
from tests.gpu import command
from tests.gpu.timed import timed
from tests.support.zoo import (
    BF16,
    F16,
    F32,
    I8,
    I64,
    Case,
    T,
    candidates,
    dequantized_vector,
    dropout_residual_ln,
    embeddings_ln_dropout,
    gated_vector,
    gru_step,
    heads,
    lstm_steps,
    packed_backward,
    scatter_tied,
    window_backward,
    workloads_of,
)

GN = torch.nn.functional.group_norm


def norm_backward(name: str, rows: int, cols: int, d: torch.dtype) -> Case:
    """Layer norm's backward from saved statistics, as the suite has it."""
    x, column = T(rows, cols, d=d), T(cols, d=d)
    return Case(name, layer_norm_backward, (x, x, T(rows, 1), T(rows, 1), column, column))


def loss_backward(logp: Tensor, target: Tensor, grad: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """A cross entropy's backward to bf16 logits, and the gradient of the bias that made them."""
    aten = torch.ops.aten
    d = aten.nll_loss_backward(grad, logp, target, None, 1, -100, total)
    d = aten._log_softmax_backward_data(d, logp, 1, torch.float32).to(torch.bfloat16)
    return d, d.sum(0)


def image_norm_backward(grad: Tensor, score: Tensor, scale: Tensor, inverse: Tensor) -> tuple[Tensor, ...]:
    """A norm's gradient with a scale and a shift for each image."""
    d = grad.float() * (1 + scale.float()[:, None])
    dx = inverse * (d - d.mean(-1, keepdim=True) - score * (d * score).mean(-1, keepdim=True))
    return dx.to(grad.dtype), (grad * score).sum(1), grad.float().sum(1)


ROWS, COLUMN, IDS = T(4096, 768, d=BF16), T(768, d=BF16), T(32, 128, d=I64)  # of BERT's training step
WIDE = T(14336, 4096, d=BF16)
CASES = {
    "loss_backward": Case("loss_backward", loss_backward, (T(640, 30522), T(640, d=torch.int64), T(), T())),
    "layer_norm_dropout": Case("layer_norm_dropout", dropout_residual_ln, (ROWS, ROWS, COLUMN, COLUMN)),
    "embedding_layer_norm_dropout": Case(
        "embedding_layer_norm_dropout",
        embeddings_ln_dropout,
        (T(30522, 768, d=BF16), IDS, T(128, 768, d=BF16), T(2, 768, d=BF16), IDS, COLUMN, COLUMN),
    ),
    "norm_backward": norm_backward("norm_backward", 8192, 1024, F32),
    "norm_backward_narrow": norm_backward("norm_backward_narrow", 32768, 256, F32),
    "norm_backward_bf16": norm_backward("norm_backward_bf16", 2048, 4096, BF16),
    "window_backward": Case(
        "window_backward", window_backward, (T(256, 16, 49, 49), T(256, 16, 49, 49, d=F16))
    ),  # of Swin-B
    "image_norm_backward": Case(  # of a diffusion transformer
        "image_norm_backward",
        image_norm_backward,
        (T(48, 256, 1152, d=BF16), T(48, 256, 1152), T(48, 1152, d=BF16), T(48, 256, 1)),
    ),
    "packed_backward": Case("packed_backward", packed_backward, heads(32, 12, 128, 64, BF16)),
    "mixed_axes": Case("mixed_axes", mixed_axes, (T(16384, 512),)),
    "outer_softmax": Case("outer_softmax", lambda x: torch.softmax(x, 0), (T(4096, 2048),)),
    "embedding_backward": Case(
        "embedding_backward", scatter_tied(30522, 0), (T(32, 128, 768, d=BF16), IDS, T(30522, 768, d=BF16))
    ),
    "type_embedding_backward": Case(
        "type_embedding_backward",
        lambda g, ids: torch.ops.aten.embedding_dense_backward(g, ids, 2, -1, False),
        (T(32, 128, 768, d=BF16), IDS),
    ),
    "gru_step": Case("gru_step", gru_step, (T(256, 36), T(256, 108), T(108, 36), T(108))),  # of DIEN
    "lstm_steps": Case(  # of CRNN
        "lstm_steps",
        lstm_steps,
        (T(2, 8, 256, d=F16), T(2, 8, 256, d=F16), T(2, 8, 1024, d=F16), T(2, 256, 1024, d=F16)),
    ),
    "gated_vector": Case("gated_vector", gated_vector, (T(1, 4096, d=BF16), WIDE, WIDE)),  # of Llama, a token
    "dequantized_vector": Case(
        "dequantized_vector",
        dequantized_vector,
        (T(1, 4096, d=BF16), T(14336, 4096, d=I8), T(14336, 1, d=BF16), T(14336, d=BF16)),
    ),
    "group_norm_silu": Case(
        "group_norm_silu",
        lambda x, w, b: torch.nn.functional.silu(GN(x, 32, w, b)),
        (T(16, 320, 64, 64, d=F16), T(320, d=F16), T(320, d=F16)),
    ),
}


def task_of(name: str, device: str) -> FusionTask:
    (work,) = workloads_of(CASES[name])
    return FusionTask(work, device)


def compiled(name: str, config: Config, device: str) -> Artifact | str:
    """The artifact, or why there is none; runs in the pool."""
    try:
        return task_of(name, device).build(config)
    except BuildError as error:
        return str(error)


def differences(config: Config, default: Config) -> str:
    return json.dumps({k: v for k, v in config.items() if v != default.get(k)})


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--only", default="outer_softmax", choices=list(CASES))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="only configurations that have these")
    options = command.parsed(parser, argv)
    wanted = [text.partition("=")[::2] for text in options.set]
    task = task_of(options.only, options.device)
    default = task.default()
    configs = [c for c in candidates(task, 0, 0) if all(str(c.get(k)).lower() == v.lower() for k, v in wanted)]
    print(f"{len(configs)} schedules of {options.only}; the default is {json.dumps(default)}", flush=True)
    lines: list[tuple[float, str]] = []
    bad = 0
    bench = None if options.dry else FusionBench(task.workload, options.device)
    with command.pool(options) as pool:
        n = len(configs)
        built = pool.map(compiled, [options.only] * n, configs, [options.device] * n)
        for seed, (config, artifact) in enumerate(zip(configs, built, strict=True)):
            if isinstance(artifact, str):
                print(f"refused: {artifact} {differences(config, default)}", flush=True)
                continue
            need = artifact.kernels[0].resources
            text = ", ".join(f"{k} {need[k]}" for k in ("registers", "shared_total", "threads", "blocks_per_sm"))
            took = 0.0
            if bench is not None:
                found = timed(bench, config, artifact, seed, options.device, 50)
                if found is None:
                    bad += 1
                    continue
                _, took = found
            lines.append((took, f"{took:8.2f} us  {text}  {differences(config, default)}"))
    print("\n".join(text for _, text in sorted(lines)))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
