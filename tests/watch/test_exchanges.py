"""Processes that exchange tensors around attention: whole rows are added; of parts each rank keeps its own, and says so."""

import functools
import json

import pytest
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attemper
import forked
import zoo
from attemper.watch.routes.replace import check_known
from close import in_float64

RANK = """
import functools
import json, logging, warnings
import torch, attemper, transformers
import torch.distributed._functional_collectives as functional
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

rank, folder = int(argv[0]), argv[1]
HEADS, EACH, ROWS = 4, 4, 6
WIDTH, WORLD = HEADS * EACH, 2
torch.set_default_dtype(torch.float64)
logging.disable(logging.WARNING)
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
sdpa = nn.functional.scaled_dot_product_attention


def plain(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def gather(q, k, v):
    "Every rank has its own rows, and all keys."
    k, v = (torch.cat([*functional.all_gather_tensor_autograd(one, 2, distributed.group.WORLD).chunk(2, 2)], 2) for one in (k, v))
    rows = torch.arange(q.shape[2])[:, None] + rank * q.shape[2]
    return sdpa(q, k, v, attn_mask=rows >= torch.arange(k.shape[2]))


def ring(q, k, v):
    "Keys and values travel; the outputs of two calls are merged."
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, True)
    travelling = torch.stack([k, v])
    other = torch.empty_like(travelling)
    sent = distributed.P2POp(distributed.isend, travelling, 1 - rank)
    received = distributed.P2POp(distributed.irecv, other, 1 - rank)
    for one in distributed.batch_isend_irecv([sent, received]):
        one.wait()
    if rank == 0:
        return out
    more, its = op(q, *other, 0.0, False)
    total = torch.logaddexp(lse, its)
    return out * (lse - total).exp()[..., None] + more * (its - total).exp()[..., None]


def all_to_all(x):
    return functional.wait_tensor(functional.all_to_all_single_autograd(x.contiguous(), None, None, distributed.group.WORLD))


@torch.library.custom_op("outside::all_to_all", mutates_args=())
def hidden(x: torch.Tensor) -> torch.Tensor:
    "As DeepSpeed's: no mode sees the collective in it."
    out = torch.empty_like(x)
    distributed.all_to_all_single(out, x)
    return out


hidden.register_autograd(lambda ctx, gradient: hidden(gradient.contiguous()))


def ulysses(q, k, v, exchange=all_to_all):
    "Rows are exchanged for heads, and back."
    def heads(x):
        parts = exchange(x.unflatten(1, (2, 2)).movedim(1, 0).contiguous().flatten(0, 1)).unflatten(0, (2, -1))
        return torch.cat([*parts], 2)
    def rows(x):
        parts = exchange(torch.stack(x.chunk(2, 2)).flatten(0, 1)).unflatten(0, (2, -1))
        return torch.cat([*parts], 1)
    return rows(sdpa(*map(heads, (q, k, v)), is_causal=True))


def in_op(q, k, v):
    return ulysses(q, k, v, hidden)


class Attention(nn.Module):
    def __init__(self, attend, named):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attend = attend
        if named:
            self.num_heads = HEADS

    def forward(self, x):
        q, k, v = (made(x).unflatten(-1, (HEADS, EACH)).transpose(1, 2) for made in (self.q, self.k, self.v))
        return x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


def model(attend=plain, named=False, layers=2):
    torch.manual_seed(0)
    made = nn.Sequential(*(Attention(attend, named) for _ in range(layers)))
    with torch.no_grad():
        made[0].q.weight[3 * EACH :] *= 40  # head 3 has exploded
    return made


def watched(model, run, steps=3, **options):
    "The rows of a full and of an intercepted step, what was said, and whether the layers are local."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with attemper.watch(model, passes="all", **options) as watch:
            for step in range(steps):
                run(step)
                watch.step()
    said = [str(one.message).removeprefix("watch(): ") for one in said if "watch()" in str(one.message)]
    rows = watch.record.to_dicts()
    return {
        **{"full": [row for row in rows if row["step"] == 0], "intercepted": [row for row in rows if row["step"] == steps - 1]},
        **{"said": said, "local": sorted({info.local for info in watch.record.info.values()})},
    }, watch.record


def attempt(function):
    try:
        return str(function())
    except attemper.errors.InputError as error:
        return f"{type(error).__name__}: {error}"


found = {}
x = torch.randn(2, WORLD * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
batch = x.chunk(2)[rank]  # data parallel
mine = x.chunk(2, 1)[rank].contiguous()  # context parallel
alone = model()
found["truth"], _ = watched(alone, lambda step: alone(x))
right = alone(x).chunk(2, 1)[rank]

for name, attend, named in (
    *(("gather", gather, False), ("ring", ring, False), ("ring, named", ring, True)),
    *(("ulysses", ulysses, False), ("ulysses, named", ulysses, True), ("ulysses in an op", in_op, False)),
):
    for full in (False, True):
        subject = DistributedDataParallel(model(attend, named))
        with torch.set_grad_enabled("ring" not in name):
            def run(step):
                out = subject(mine)
                assert (out - right).abs().max() < 1e-10 * right.abs().max(), name
                if out.requires_grad:
                    out.square().sum().backward()
            path = f"{folder}/{name}-{full}.jsonl"
            found[f"{name}, full" if full else name], record = watched(subject, run, 1 if full else 3, full=full, path=path)
        if not full and name != "gather":
            named_rows = attemper.Projections.named(subject.module, heads=HEADS, q="*.q.*", k="*.k.*")
            before = [one.clone() for one in subject.parameters()]
            clip = lambda **more: attempt(lambda: attemper.qk_clip(subject, record, 1e-3, projections=named_rows, **more))
            found[name]["clip"] = clip()
            if "ulysses" in name:
                found[name]["clip of a group"] = clip(group=distributed.group.WORLD)
            found[name]["merge"] = attempt(lambda: record.merge(record))
            assert all(map(torch.equal, before, subject.parameters())), name

subject = model(gather)
found["gather, not joined"], _ = watched(subject, lambda step: subject(mine))
subject = DistributedDataParallel(model())
found["data"], _ = watched(subject, lambda step: subject(batch).square().sum().backward())
subject = model()
for part in (*(one for layer in subject for one in (layer.q, layer.o, layer)), subject):
    fully_shard(part)  # parameters are gathered inside the attention modules
found["shards"], _ = watched(subject, lambda step: subject(batch).square().sum().backward())

subject = model(layers=1)
stage = PipelineStage(subject, rank, WORLD, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: out.square().sum())
found["pipeline"], _ = watched(subject, lambda step: schedule.step(*(() if rank else (x,)), **({"target": x} if rank else {})))

told = []
logger = logging.getLogger("attemper.integrations")
logging.disable(logging.NOTSET)
logging.getLogger().handlers = [type("Kept", (logging.Handler,), {"emit": lambda self, one: told.append(one.getMessage())})()]
subject = DistributedDataParallel(model(ulysses))
before = [one.clone() for one in subject.parameters()]
with warnings.catch_warnings(action="ignore"), attemper.integrations.monitor(subject, every=1, clip=1e-3) as monitor:
    for _ in range(2):
        subject(mine).square().sum().backward()
        monitor.step()
assert all(map(torch.equal, before, subject.parameters()))
found["monitor"] = {"told": [one for one in told if "clip" in one]}
logging.disable(logging.WARNING)

# a Hugging Face function on a kernel that no mode follows, as ring-flash-attention's and verl's are
CONTEXT_PARALLEL = [False]


@torch.library.custom_op("outside::kernel", mutates_args=())
def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, first: int) -> torch.Tensor:
    hidden_keys = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + first
    return (q @ k.mT * scale).masked_fill(hidden_keys, float("-inf")).softmax(-1) @ v


def function(module, query, key, value, attention_mask, scaling=None, **options):
    first = 0
    if CONTEXT_PARALLEL[0]:
        def gathered(one):
            every = [torch.empty_like(one) for _ in range(2)]
            distributed.all_gather(every, one.contiguous())
            return torch.cat(every, 2)
        first, key, value = rank * query.shape[2], gathered(key), gathered(value)
    return kernel(query, key, value, scaling, first).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("outside", function)
transformers.AttentionMaskInterface.register("outside", lambda *args, **options: None)
config = transformers.LlamaConfig(
    **{"vocab_size": 32, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": HEADS},
    **{"num_key_value_heads": HEADS, "tie_word_embeddings": False},
)
torch.manual_seed(0)
llama = transformers.LlamaModel(config).double()
ids = torch.randint(0, 32, (2, WORLD * ROWS), generator=torch.Generator().manual_seed(2))
right = llama(ids).last_hidden_state.chunk(2, 1)[rank]
llama.set_attn_implementation("outside")
joined = DistributedDataParallel(llama)
places = torch.arange(WORLD * ROWS).chunk(2)[rank][None].expand(2, -1)


def part(step, begins=0):
    CONTEXT_PARALLEL[0] = step >= begins
    with torch.no_grad():
        out = joined(ids.chunk(2, 1)[rank].contiguous(), position_ids=places).last_hidden_state
    assert step < begins or (out - right).abs().max() < 1e-6


found["hugging face"], _ = watched(joined, part)
found["hugging face, later"], _ = watched(joined, lambda step: part(step, begins=2))
ways = {
    "replace": lambda: attemper.watch(llama, replace=True).__enter__(),
    "floor": lambda: attemper.floor(llama).__enter__(),
    "instrument": lambda: attemper.instrument(llama),
}
for way, run in ways.items():
    with warnings.catch_warnings(action="ignore"):
        found[way] = {"error": attempt(run)}
    part(0)  # its output is still right
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(found, file)
distributed.barrier()
distributed.destroy_process_group()
"""

EXCHANGED = "ranks exchange tensors around its attention"
APART = "a layer runs a part of its heads, rows or keys on each rank, so nothing is added"
WHOLE = ("data", "shards", "gather")
ULYSSES = ("ulysses", "ulysses, named", "ulysses in an op")
LOCAL = ("ring", "ring, named", *ULYSSES)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("exchanges")
    forked.run(RANK, [(rank, place) for rank in range(2)], place, timeout=40)
    return place


@pytest.fixture(scope="module", params=[0, 1], ids=["rank 0", "rank 1"])
def rank(request):
    return request.param


@pytest.fixture(scope="module")
def found(place, rank):
    return json.loads((place / f"{rank}.json").read_text())


def same(rows, expected):
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        for name in wanted.keys() - {"step", "head", "kind"}:  # with more keys than rows it seems to be cross-attention
            value = wanted[name]
            assert row[name] == (in_float64(value, 10.0) if isinstance(value, float) else value), name


@pytest.mark.parametrize("step", ["full", "intercepted"])
@pytest.mark.parametrize("case", [*WHOLE, "gather, full"])
def test_whole_rows_are_added(found, case, step):
    """Also where parameters are gathered inside the attention module, and where each rank has some rows and gathers the keys."""
    same(found[case][step], found["truth"][step])
    assert found[case]["local"] == [False]
    assert found[case]["said"] == []


@pytest.mark.parametrize("step", ["full", "intercepted"])
@pytest.mark.parametrize("case", [*LOCAL, *(f"{case}, full" for case in LOCAL)])
def test_parts_are_never_added(found, rank, case, step):
    said = " ".join(found[case]["said"])
    assert APART in said
    assert ("2 of its 4 heads run on this rank" if case.startswith("ulysses, named") else EXCHANGED) in said
    assert found[case]["local"] == [True]
    truth = found["truth"][step]
    if "ulysses" in case:  # this rank has the whole rows of two heads
        same(found[case][step], [row for row in truth if row["head"] // 2 == rank])
        assert [row["head"] for row in found[case][step]] == [0, 1, 0, 1]
    else:
        calls = 1 + rank
        assert [row["rows"] for row in found[case][step]] == [2.0 * 6 * calls] * 8
        assert ("2 calls are measured one by one" in said) == (rank == 1)


@pytest.mark.parametrize("case", LOCAL)
def test_the_file_says_it_and_nothing_is_clipped_or_merged_by_it(place, found, case):
    record = attemper.Record.read(place / f"{case}-False.jsonl")
    assert all(info.local for info in record.info.values())
    assert found[case]["clip"].startswith(
        "LocalHeads: qk_clip(): the heads of '0' in this record are those of one rank"
    )
    assert "of one rank" in found[case]["merge"]
    if "ulysses" in case:
        assert "the record has 2 heads in '0'" in found[case]["clip of a group"]
        assert "projections have 4" in found[case]["clip of a group"]


def test_a_monitor_goes_on_without_its_clip(found):
    (sentence,) = found["monitor"]["told"]
    said = (
        "attemper: no head is clipped from step 0 on: qk_clip(): the heads of '0' in this record are those of one rank"
    )
    assert said in sentence


def test_rows_that_no_wrapper_joins_are_local(found):
    assert found["gather, not joined"]["local"] == [True]
    assert EXCHANGED in found["gather, not joined"]["said"][-1]


def test_a_dry_pass_of_a_pipeline_does_not_count(found):
    assert {row["rows"] for row in found["pipeline"]["full"]} == {24.0}
    same(found["pipeline"]["intercepted"], found["pipeline"]["full"])
    assert found["pipeline"]["local"] == [False]


def test_a_function_that_exchanges_inside_is_not_measured_from_its_arguments(found):
    for case in ("hugging face", "hugging face, later"):
        assert "exchanges tensors with other ranks inside" in " ".join(found[case]["said"])
        assert found[case]["intercepted"] == []
    assert found["hugging face"]["full"] == []
    assert {row["rows"] for row in found["hugging face, later"]["full"]} == {24.0}  # before it exchanged anything


@pytest.mark.parametrize("way", ["replace", "floor", "instrument"])
def test_a_context_parallel_function_is_never_replaced(found, way):
    assert (
        "attends by function (attn_implementation='outside'), which is none of transformers' attention functions"
        in found[way]["error"]
    )


def _functions():
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(*args, **options):
        return sdpa(*args, **options)

    class Callable:
        def __call__(self, *args, **options):
            return sdpa(*args, **options)

    return {"wrapped": functools.wraps(sdpa)(mine), "partial": functools.partial(sdpa), "object": Callable()}


@pytest.mark.parametrize("kind", ["wrapped", "partial", "object"])
@pytest.mark.parametrize("way", ["replace", "floor", "instrument"])
def test_a_function_in_the_place_of_transformers_own_is_left(monkeypatch, kind, way):
    """As DeepSpeed's Ulysses takes the place of 'sdpa'."""
    subject = zoo.make("llama")
    subject.model.set_attn_implementation("sdpa")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", _functions()[kind])
    ways = {
        "replace": lambda: attemper.watch(subject.model, replace=True).__enter__(),
        "floor": lambda: attemper.floor(subject.model).__enter__(),
        "instrument": lambda: attemper.instrument(subject.model),
    }
    with pytest.raises(attemper.errors.InputError, match="none of transformers' attention functions"):
        ways[way]()
    assert subject.model.config._attn_implementation == "sdpa"


def test_transformers_own_functions_are_known():
    model = nn.Module()
    model.config = transformers.LlamaConfig()
    for name in ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"):
        model.config._attn_implementation_internal = name
        check_known("watch(): replace=True", model)
        check_known("watch(): replace=True", model)
