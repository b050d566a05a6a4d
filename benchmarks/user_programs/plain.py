"""Programs of plain torch: an encoder of ``torch.nn``, a 3D convolutional network, a graph network."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.user_programs.program import Known, Program, Setup, batches, fitted, named


def encoder(setup: Setup) -> Program:
    """Classification of sequences by ``nn.TransformerEncoder`` in fp32, products in TF32, dropout."""
    torch.set_float32_matmul_precision("high")
    count, length, width, heads, inner, layers = setup.size((32, 512, 768, 12, 3072, 6), (2, 8, 32, 2, 64, 2))
    with torch.device(setup.device):
        layer = nn.TransformerEncoderLayer(width, heads, inner, dropout=0.1, batch_first=True, norm_first=True)
        body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        model = nn.Sequential(body, nn.LayerNorm(width), nn.Linear(width, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=setup.capturable)
    compiled = setup.compile(model)

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(count, length, width, device=setup.device)
        return x, torch.randint(0, 16, (count,), device=setup.device)

    following = batches(batch)

    def step() -> Tensor:
        x, labels = following()
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(x).mean(dim=1), labels)
        loss.backward()
        optimizer.step()
        return loss

    return Program(True, step)


class Double(nn.Sequential):
    """Two 3D convolutions, each with an instance norm and a leaky ReLU."""

    def __init__(self, given: int, made: int, stride: int = 1) -> None:
        parts: list[nn.Module] = []
        for first, size in ((True, given), (False, made)):
            parts += [nn.Conv3d(size, made, 3, stride if first else 1, padding=1)]
            parts += [nn.InstanceNorm3d(made, affine=True), nn.LeakyReLU(0.01)]
        super().__init__(*parts)


class Volumes(nn.Module):
    """A UNet for volumes."""

    def __init__(self, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        given = [1, *widths]
        self.down = nn.ModuleList(Double(given[k], w, stride=2 if k else 1) for k, w in enumerate(widths))
        pairs = list(itertools.pairwise(widths))[::-1]
        self.across = nn.ModuleList(nn.ConvTranspose3d(deep, w, 2, 2) for w, deep in pairs)
        self.up = nn.ModuleList(Double(2 * w, w) for w, _ in pairs)
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, 1, D, H, W]."""
        kept = []
        for part in self.down:
            x = part(x)
            kept.append(x)
        kept.pop()
        for across, part in zip(self.across, self.up, strict=True):
            x = part(torch.cat([across(x), kept.pop()], dim=1))
        found: Tensor = self.head(x)
        return found


def volumes(setup: Setup) -> Program:
    """Segmentation of volumes in fp16 by a gradient scaler: cross-entropy and Dice loss, SGD with momentum."""
    classes = 4
    with torch.device(setup.device):
        model = Volumes(classes, setup.size((32, 64, 128, 256, 320), (4, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.99, nesterov=True, weight_decay=3e-5)
    scaler = setup.scaler()
    compiled = setup.compile(model)
    count, side = setup.size((2, 128), (1, 8))

    def batch() -> tuple[Tensor, Tensor]:
        shape = (count, side, side, side)
        return torch.randn(count, 1, *shape[1:], device=setup.device), torch.randint(
            0, classes, shape, device=setup.device
        )

    following = batches(batch)

    def dice(logits: Tensor, labels: Tensor) -> Tensor:
        shares = logits.float().softmax(dim=1)
        wanted = F.one_hot(labels, classes).permute(0, 4, 1, 2, 3)
        both, all_ = (shares * wanted).sum(dim=(2, 3, 4)), shares.sum(dim=(2, 3, 4)) + wanted.sum(dim=(2, 3, 4))
        return 1 - (2 * both / (all_ + 1e-5)).mean()

    def step() -> Tensor:
        x, labels = following()
        optimizer.zero_grad()
        with setup.autocast(torch.float16):
            logits = compiled(x)
            loss = F.cross_entropy(logits, labels) + dice(logits, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 12.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Program(True, step)


class Passing(nn.Module):
    """A round of messages along edges, each node and edge with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge, self.node = _layers(3 * width, width), _layers(2 * width, width)

    def forward(self, nodes: Tensor, edges: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """``nodes`` [N, C], ``edges`` [E, C], ``ends`` [2, E]: senders and receivers."""
        sent = self.edge(torch.cat([nodes[ends[0]], nodes[ends[1]], edges], dim=-1))
        got = torch.zeros_like(nodes).index_add_(0, ends[1], sent.to(nodes.dtype))
        return nodes + self.node(torch.cat([nodes, got], dim=-1)), edges + sent


def _layers(given: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(given, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width),
        nn.LayerNorm(width),
    )  # fmt: skip


class Mesh(nn.Module):
    """Encodes a mesh's nodes and edges, passes messages, decodes accelerations."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.nodes, self.edges = _layers(12, width), _layers(7, width)
        self.rounds = nn.ModuleList(Passing(width) for _ in range(rounds))
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, nodes: Tensor, edges: Tensor, ends: Tensor) -> Tensor:
        """``nodes`` [N, 12], ``edges`` [E, 7], ``ends`` [2, E]."""
        nodes, edges = self.nodes(nodes), self.edges(edges)
        for part in self.rounds:
            nodes, edges = part(nodes, edges, ends)
        found: Tensor = self.head(nodes)
        return found


def mesh(setup: Setup) -> Program:
    """Simulation on a mesh: messages gathered and added along edges, in fp32 with TF32."""
    torch.set_float32_matmul_precision("high")
    count, each, width, rounds = setup.size((40_000, 6, 128, 10), (20, 3, 16, 2))
    with torch.device(setup.device):
        model = Mesh(width, rounds)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True, capturable=setup.capturable)
    compiled = setup.compile(model)

    def batch() -> tuple[Tensor, ...]:
        ends = torch.randint(0, count, (2, count * each), device=setup.device)
        ends = ends[:, ends[1].argsort()]
        sizes = ((count, 12), (count * each, 7), (count, 3))
        nodes, edges, wanted = (torch.randn(size, device=setup.device) for size in sizes)
        return nodes, edges, ends, wanted

    def loss_of(nodes: Tensor, edges: Tensor, ends: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(compiled(nodes, edges, ends), wanted)

    return fitted(loss_of, batches(batch), optimizer)


PLAIN = named(
    [
        Known("encoder_train", "nn.TransformerEncoder, fp32 with TF32, dropout, 32 x 512", encoder),
        Known("volumes_train", "3D UNet, fp16 by GradScaler, 2 x 128 x 128 x 128", volumes),
        Known("mesh_train", "graph network, 40 000 nodes, 240 000 edges, TF32", mesh),
    ]
)
"""Programs by name."""
