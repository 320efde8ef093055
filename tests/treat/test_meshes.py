"""Meshes of two dimensions: replicas of shards (HSDP) are one process; ranks that hold other heads are never added."""

import pytest

import forked

RANK = """
import warnings
import torch, attemper
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from attemper.watch.observer import EXCHANGED
from attemper.watch.record import ranks

import sys
rank, world, folder, case, tests = int(argv[0]), int(argv[1]), argv[2], argv[3], argv[4]
sys.path.insert(0, tests)
from close import assert_float64, in_float64

HEADS, EACH, WIDTH = (3, 6, 18) if case == "replicas" else (4, 4, 16)
torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (made(x).unflatten(-1, (-1, EACH)).transpose(1, 2) for made in (self.q, self.k, self.v))
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def step(module, x, optimizer):
    with warnings.catch_warnings(record=True, action="always") as said, attemper.watch(module) as watch:
        module(x).square().sum().backward()
    optimizer.step()
    return watch.record, [str(one.message).removeprefix("watch(): ") for one in said if "watch()" in str(one.message)]


def same(record, expected):
    for one, other in zip(record.to_dicts(), expected.to_dicts(), strict=True):
        assert one["rows"] == other["rows"], (one["rows"], other["rows"])
        assert all(one[name] == in_float64(other[name], 10.0) for name in one if isinstance(one[name], float)), (one, other)


copies = world if case == "replicas" else world // 2  # parts of the data
x = torch.randn(2 * copies, 7, WIDTH, generator=torch.Generator().manual_seed(5))
x = x * torch.arange(1, 2 * copies + 1).view(-1, 1, 1)
mine = x.chunk(copies)[rank if case == "replicas" else rank // 2]
alone = model()
whole, _ = step(alone, x, torch.optim.SGD(alone.parameters(), lr=1e-3 / copies))  # ranks average
attemper.projections(alone, x[:1])
TAU = sum(sorted(row["peak"] for row in whole.to_dicts())[HEADS - 1 : HEADS + 1]) / 2  # half of the heads are above it

distributed.init_process_group("gloo", init_method=f"file://{folder}/meet-{case}", rank=rank, world_size=world)
module = model()
if case == "replicas":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
else:
    mesh = init_device_mesh("cpu", (copies, 2), mesh_dim_names=("data", "heads"))
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    for block in module:
        parallelize_module(block, mesh["heads"], plan)
if case != "heads":
    for part in (*module, module):
        fully_shard(part, mesh=mesh if case == "replicas" else mesh["data"])
if case == "replicas":
    attemper.projections(module, x[:1])
record, said = step(module, mine, torch.optim.SGD(module.parameters(), lr=1e-3))
if case == "replicas":
    assert said == [], said
    same(record, whole)  # every row is counted once
    expected, clip = attemper.qk_clip(alone, whole, TAU), attemper.qk_clip(module, record, TAU)
    assert len(expected) == HEADS, expected
    assert [one[:3] for one in clip] == [one[:3] for one in expected], (clip, expected)
    assert len(module[0].q.weight.to_local()) % EACH, "the shard does not cut a head"
    for name, parameter in alone.state_dict().items():
        now = module.state_dict()[name]
        every = [torch.empty_like(now.to_local()) for _ in range(2)]
        distributed.all_gather(every, now.to_local(), mesh.get_group("replicate"))
        assert torch.equal(*every), name  # replicas: to the bit
        assert_float64(now.full_tensor(), parameter, name)
    assert_float64(module(mine), alone(mine))  # the next forward uses what was written
else:
    exchanged = EXCHANGED.format(layer="0", op="_c10d_functional::all_reduce", calls="")
    expected = [ranks.TENSOR] if case == "heads" else [ranks.PART.format(size=2, world=4), exchanged]
    assert said == expected, said
    assert all(info.local for info in record.info.values())
    first = HEADS // 2 * (rank % 2)
    same(record, whole.filter(heads=list(range(first, first + HEADS // 2))))
    named = attemper.Projections.named(module, heads=HEADS, q="*.q.*", k="*.k.*")
    before = {name: one.to_local().clone() for name, one in module.named_parameters() if hasattr(one, "to_local")}
    for clip in (lambda: attemper.projections(module, mine), lambda: attemper.qk_clip(module, record, TAU, projections=named)):
        try:
            clip()
        except attemper.errors.InputError as error:
            assert "0.q.weight over ranks (tensor parallel)" in str(error), error
        else:
            raise AssertionError("no error")
    now = dict(module.named_parameters())
    assert all(torch.equal(now[name].to_local(), one) for name, one in before.items())
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("case", "world"), [("replicas", 4), ("heads", 2), ("shards and heads", 4)])
def test_a_mesh(case, world, tmp_path, request):
    tests = request.config.rootpath / "tests"
    forked.run(RANK, [(rank, world, tmp_path, case, tests) for rank in range(world)], tmp_path, timeout=120)
