"""Several processes: FSDP2 with shards that cut heads equals one process; DDP replicas stay equal; ranks must agree."""

import pytest

import forked

RANK = """
import torch, attemper
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

rank, world, folder, case = int(argv[0]), int(argv[1]), argv[2], argv[3]
HEADS, EACH, WIDTH, TAU = 5, 6, 30, 0.02
torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    "Five heads of six channels: 30 rows on 2 or 3 ranks cut a head."

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.q_norm = nn.RMSNorm(EACH) if case.startswith("norm") else nn.Identity()

    def forward(self, x):
        q = self.q_norm(self.q(x).unflatten(-1, (HEADS, EACH))).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, HEADS, EACH)).permute(2, 0, 3, 1, 4)
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def step(module, optimizer, x):
    with attemper.watch(module.module if "inside" in case else module) as watch:
        module(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return watch.record


x = torch.randn(2 * world, 7, WIDTH, generator=torch.Generator().manual_seed(5)) * torch.arange(1, 2 * world + 1).view(-1, 1, 1)
mine = x[2 * rank : 2 * rank + 2]
# one process with the whole batch, and gradients averaged as ranks average them
alone = model()
whole = torch.optim.SGD(alone.parameters(), lr=1e-3 / world)
attemper.projections(alone, x[:1])
case, asked = "alone", case
expected = attemper.qk_clip(alone, step(alone, whole, x), TAU)
case = asked
assert 0 < len(expected) <= 2 * HEADS, expected

backend = None if "unnamed" in case else "gloo"  # without a name get_backend() is "undefined"
distributed.init_process_group(backend, init_method=f"file://{folder}/meet-{case}-{world}", rank=rank, world_size=world)
module = model()
if "fsdp" in case:
    from torch.distributed.fsdp import fully_shard

    for block in module:
        fully_shard(block)
    fully_shard(module)
    if "kept" in case:
        module.set_reshard_after_backward(False)
else:
    module = DistributedDataParallel(module)
optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
if "before" not in case:
    attemper.projections(module, x[:1])
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    if "before" in case:  # found in the watched step itself, by an examiner
        finder = attemper.treat.Finder(module)
        with finder, attemper.watch(module, examiners=[finder]) as watch:
            module(mine).square().sum().backward()
        optimizer.step()
        record = watch.record
    else:
        record = step(module, optimizer, mine)
if case == "differ":
    try:
        attemper.qk_clip(module, record, TAU * (1 + rank))
    except attemper.errors.InputError as error:
        assert "ranks were called with different arguments" in str(error), error
    else:
        raise AssertionError("no error")
    distributed.barrier()
    raise SystemExit
clip = attemper.qk_clip(module, record, TAU, optimizer=optimizer)
assert [(one.layer, one.head) for one in clip] == [(one.layer, one.head) for one in expected], (clip, expected)
state = module.module.state_dict() if case.startswith("ddp") else module.state_dict()
for name, parameter in alone.state_dict().items():
    now = state[name]
    now = now.full_tensor() if hasattr(now, "full_tensor") else now
    error = (now - parameter).abs().max() / parameter.abs().max()
    assert error < 1e-12, (name, error)
    gathered = [torch.empty_like(now) for _ in range(world)]
    distributed.all_gather(gathered, now.contiguous())
    assert all(torch.equal(one, now) for one in gathered), name  # to the bit
if "fsdp" in case:
    local = module[0].q.weight.to_local() if hasattr(module[0].q.weight, "to_local") else None
    assert local is not None and len(local) % EACH, "the shard does not cut a head"
    out = module(mine)  # the next forward uses what was written
    right = alone(x)[2 * rank : 2 * rank + 2]
    assert (out - right).abs().max() / right.abs().max() < 1e-12
distributed.barrier()
distributed.destroy_process_group()
"""
CASES = [
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp unnamed", 2),
    ("fsdp kept", 2),
    ("fsdp before", 2),
    ("norm fsdp", 2),
    ("ddp", 2),
    ("ddp inside", 2),
    ("differ", 2),
]


@pytest.mark.parametrize(("case", "world"), CASES)
def test_as_one_process(case, world, tmp_path):
    forked.run(RANK, [(rank, world, tmp_path, case) for rank in range(world)], tmp_path)
