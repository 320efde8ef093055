"""Processes under DistributedDataParallel: heads merge over its own ranks, one writes, and ranks that differ keep apart."""

import pytest
import torch
from torch import nn

import attemper
import forked
from attemper.watch.record.ranks import ALONE
from close import in_float64

RANK = """
import datetime, time, warnings, torch, attemper
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from attemper.watch.record import ranks

rank, world, folder, case = int(argv[0]), int(argv[1]), argv[2], argv[3]
path = f"{folder}/{case}.jsonl"
LONG = datetime.timedelta(seconds=300)  # more processes than cores: a rank may be late for no reason of its own
ranks.PATIENCE = datetime.timedelta(seconds=0.5) if case in ("missing", "late") else LONG
torch.set_default_dtype(torch.float64)
early = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
watch = attemper.watch(early, gradients=True, path=path)  # made before there are ranks
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet-{case}", rank=rank, world_size=world)
torch.manual_seed(0)
layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)


class Half(nn.Module):
    "Four heads of which each rank runs two."

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        if case == "a part":
            self.num_heads = 4

    def forward(self, q):
        mine = q[:, 2 * rank : 2 * rank + 2]
        return nn.functional.scaled_dot_product_attention(mine * self.gain, mine, mine)


def on_dtensors():
    "Each way to attend, on DTensors whose heads lie on different ranks: the same output, and a sentence."
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.experimental import register_sharding

    op = torch.ops.attemper.forward.default

    @register_sharding(op)
    def rule(*given):  # as somebody else may register one
        tensors = [None if part is None else Replicate() for part in given[:7]]
        return [([Replicate()] * len(op._schema.returns), tensors + [None] * 7)]

    ways = {
        "a softmax, which may be attention, of": lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v,
        "attemper.forward": lambda q, k, v: attemper.attention(q, k, v).output,
    }
    mesh = init_device_mesh("cpu", (2,))
    given = [distribute_tensor(torch.randn(1, 4, 16, 8), mesh, [Shard(1)]) for _ in range(3)]
    for words, attend in ways.items():
        model = type("Model", (nn.Module,), {"forward": lambda self, *given: attend(*given)})()
        expected = model(*given)
        with warnings.catch_warnings(record=True) as said, attemper.watch(model, gradients=True) as watch:
            warnings.simplefilter("always")
            assert torch.equal(model(*given).to_local(), expected.to_local())
            watch.step()
        (sentence,) = [str(one.message) for one in said if "not measured" in str(one.message)]
        assert words in sentence and "DTensors; call attention on their to_local()" in sentence, sentence
        assert len(watch.record) == 0


if case == "dtensors":
    on_dtensors()
    distributed.barrier()
    raise SystemExit

x = torch.randn(4, 9, 16)[2 * (rank % 2) : 2 * (rank % 2) + 2]
members = distributed.new_group([1, 2]) if case == "some" else None
if case == "some" and rank == 0:  # has nothing to do with the model
    distributed.barrier()
    raise SystemExit
module = early if case == "alone" else Half() if case in ("heads", "a part") else layers
model = DistributedDataParallel(module, process_group=members)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
if case == "different" and rank == 1:
    layers.layers = layers.layers[:1]
if case in ("heads", "a part"):
    x = torch.randn(1, 4, 16, 8) * torch.tensor([1.0, 2, 4, 8]).view(1, 4, 1, 1)
    x = x + rank if case == "a part" else x
watched = case != "missing" or rank == 0
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    if case != "alone":
        passes = "all" if case == "uneven" else "training"
        target = model if watched else nn.Identity()
        watch = attemper.watch(target, optimizer=optimizer, gradients=True, path=path, passes=passes)
    if watched:
        watch.__enter__()
    for step in range(3 if case == "late" else 2):
        out = layers(x) if case == "different" or step == 2 else model(x)
        if step < 2 or rank == 1:
            out.square().sum().backward()
        if case == "late" and step == 0 and rank == 0:
            while not watch.observer.ranks.meeting.store.check(["0/answer"]):  # until the other has given up
                time.sleep(0.01)
        optimizer.step()
        ranks.PATIENCE = LONG if case == "late" else ranks.PATIENCE
    if case in ("uneven", "rest") and rank == 0:
        layers(x)  # a pass of its own, after the last step
    if watched:
        watch.__exit__(None, None, None)
watch.record.write(f"{folder}/{case}-{rank}.jsonl")
said = {str(warning.message).removeprefix("watch(): ") for warning in said}
expected = {
    "different": {ranks.DIFFERENT},
    "uneven": {ranks.DIFFERENT},
    "alone": {ranks.ALONE},
    "some": {ranks.PART.format(size=2, world=3)},
    "heads": {ranks.SAME},
    "a part": {"Half: 2 of its 4 heads run on this rank, counted from 0.", ranks.SPLIT},
    "missing": {ranks.LATE.format(step=0)} if rank == 0 else set(),
    "late": {ranks.LATE.format(step=0)},
}
assert said == expected.get(case, set()), said
if case == "missing" and watched:
    assert watch.observer.ranks.meeting.next == 1  # nobody waits twice
distributed.barrier()
distributed.destroy_process_group()
"""
CASES = {
    **dict.fromkeys(
        ("same", "different", "uneven", "rest", "alone", "heads", "a part", "missing", "late", "dtensors"), 2
    ),
    "some": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All cases at once, with their processes."""
    folder = tmp_path_factory.mktemp("ranks")
    forked.run(RANK, [(rank, world, folder, case) for case, world in CASES.items() for rank in range(world)], folder)
    return folder


def read(folder, case, ranks=(0, 1)):
    return [attemper.Record.read(folder / f"{case}-{rank}.jsonl") for rank in ranks]


@pytest.mark.usefixtures("float64")
def test_heads_merge_over_ranks_and_rank_0_writes(folder):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
    x = torch.randn(4, 9, 16)
    with attemper.watch(model, gradients=True) as watch:
        for part in x.split(2):
            model(part).square().sum().backward()
    ranks = [attemper.Record.read(folder / f"same-{rank}.jsonl") for rank in range(2)]
    assert repr(ranks[0].to_dicts()) == repr(ranks[1].to_dicts())
    assert repr(attemper.Record.read(folder / "same.jsonl").to_dicts()) == repr(ranks[0].to_dicts())
    assert ranks[0].steps == [0, 1]
    for found, expected in zip(ranks[0].filter(steps=0).to_dicts(), watch.record.to_dicts(), strict=True):
        assert found["rows"] == 36  # and the layers are named as without the wrapper
        for name, value in expected.items():
            wanted = in_float64(value) if isinstance(value, float) else value
            assert found[name] == wanted, name


def test_ranks_that_saw_different_layers_keep_their_own(folder):
    first, second = (attemper.Record.read(folder / f"different-{rank}.jsonl") for rank in range(2))
    assert (len(first.layers), len(second.layers)) == (2, 1)
    assert first.to_dicts()[0]["rows"] == 18
    assert "ranks measured different layers" in first.notes[0]


def test_a_rank_with_rows_after_its_last_step_waits_for_nobody(folder):
    first, second = (attemper.Record.read(folder / f"uneven-{rank}.jsonl") for rank in range(2))
    assert (first.steps, second.steps) == ([0, 1, 2], [0, 1])
    assert [record.filter(steps=1).to_dicts()[0]["rows"] for record in (first, second)] == [36, 36]
    assert first.filter(steps=2).to_dicts()[0]["rows"] == 18
    for record in read(folder, "rest"):  # where it does not count nobody has rows
        assert [row["rows"] for row in record.to_dicts()] == [36] * 8


def test_a_model_inside_of_the_wrapped_one_is_not_joined_and_it_is_said(folder):
    """The watch was made before there were ranks, and still rank 0 alone writes."""
    ranks = [attemper.Record.read(folder / f"alone-{rank}.jsonl") for rank in range(2)]
    found = attemper.Record.read(folder / "alone.jsonl")
    assert [record.to_dicts()[0]["rows"] for record in (*ranks, found)] == [36, 36, 36]  # two passes of its own 18
    assert len(found) == len(ranks[0]) == 4
    assert found.to_dicts()[0]["entropy"] == ranks[0].to_dicts()[0]["entropy"] != ranks[1].to_dicts()[0]["entropy"]
    assert found.notes == [ALONE]
    assert found.layers == ["layers.0.self_attn", "layers.1.self_attn"]


def test_a_group_of_some_ranks_joins_its_own_and_its_first_writes(folder):
    first, second = read(folder, "some", (1, 2))
    written = attemper.Record.read(folder / "some.jsonl")
    assert repr(first.to_dicts()) == repr(second.to_dicts()) == repr(written.to_dicts())
    assert [row["rows"] for row in written.to_dicts()] == [36] * 8
    assert "spans 2 of 3 ranks" in written.notes[0]


@pytest.mark.parametrize("case", ["heads", "a part"])
def test_different_heads_are_never_added(folder, case):
    found = read(folder, case)
    for record in found:
        rows = record.filter(steps=0).to_dicts()
        assert [row["rows"] for row in rows] == [16, 16]
        assert ("the same input" in record.notes[-1]) == (case == "heads")
    entropies = [row["entropy"] for record in found for row in record.filter(steps=0).to_dicts()]
    assert entropies == sorted(entropies, reverse=True)  # each head is twice as sharp as the one before


def test_a_rank_that_does_not_watch_or_comes_late_stops_nobody(folder):
    (first,) = read(folder, "missing", (0,))
    assert [row["rows"] for row in first.to_dicts()] == [18] * 8
    for record in read(folder, "late"):
        assert record.steps == [0, 1, 2]
        assert [record.filter(steps=step).to_dicts()[0]["rows"] for step in range(3)] == [18, 36, 36]
        # one rank ran no backward in the last step
        assert all(row["grad_q_count"] == 2 * 9 * 8 for row in record.filter(steps=2).to_dicts())
