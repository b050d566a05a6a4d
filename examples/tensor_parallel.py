"""Train a small model with tensor and sequence parallelism by DTensor, and search its products in the loop.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autotune

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (dist.get_world_size(),))

width, rows = (4096, 1024) if device == "cuda" else (64, 16)  # rows of a rank
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))
plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
model = parallelize_module(model.to(device, dtype), mesh, plan)
compiled = torch.compile(model, backend="autotune")
handle = autotune.tensor_parallel(compiled, steps=60)  # before the first step

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(70):
    loss = compiled(torch.randn(rows, width, device=device, dtype=dtype)).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(handle)
dist.destroy_process_group()
