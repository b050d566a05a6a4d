"""Train a small sharded model with ``autotune.fsdp``: one line after ``fully_shard``.

torchrun --nproc-per-node 2 examples/fsdp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import autotune

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")

width = 4096 if cuda else 128
blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)]
model = nn.Sequential(*blocks).to(device)
for block in blocks:
    fully_shard(block)
fully_shard(model)
handle = autotune.fsdp(model, steps=60)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(70):
    loss = model(torch.randn(512, width, device=device)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(handle)
dist.destroy_process_group()
