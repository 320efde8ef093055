"""A loop like torchtitan's, with FSDP2, and attention in its metrics: torchrun --nproc-per-node 2 examples/fsdp2_loop.py"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from attemper.integrations import monitor

WIDTH, HEADS, LENGTH, WORDS = 64, 4, 32, 64
STEPS = 11 if "--quick" in sys.argv else 301


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256), nn.SiLU(), nn.Linear(256, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Sequential):
    def forward(self, text: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(text[:, :-1]).mT, text[:, 1:])


def show(metrics: dict[str, float], step: int) -> None:  # called on rank 0 alone
    print(f"step {step:3}  largest logit {metrics['attemper/peak']:5.2f}")


device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)  # the same weights on every rank; the data is not
model = Model(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS)).to(device)
for block in model[1:3]:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
draw = torch.Generator().manual_seed(distributed.get_rank())
with monitor(model, every=10, log=show, path="run.jsonl", clip=100, optimizer=optimizer) as watching:
    for _ in range(STEPS):
        half = torch.randint(WORDS, (8, LENGTH // 2), generator=draw)
        loss = model(half.repeat(1, 2).to(device))  # the second half can be copied from the first
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad(), warm.step()
        watching.step(loss=loss)
distributed.barrier()  # a rank that exits while others still run may be aborted
distributed.destroy_process_group()
