"""The Triton kernels without a GPU, by Triton's interpreter: `make triton`."""

import ctypes
import importlib
import importlib.util
import math
import os
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode

import attemper
from attemper import kernels
from attemper.errors import KernelUnavailable
from attemper.heads import COLUMNS, SATURABLE_KEYS, SATURATED_WEIGHT
from attemper.kernels.contract import ALL_SIGNS, OUTPUT_LOW_BIT, PACKED, Capabilities, Results, gathered, packed_size
from attemper.operation.ops import FORWARD
from attemper.vitals import SIGNS
from attemper.watch.call import UnfoldedRows
from cases import GRID, pairwise
from close import assert_reordered, in_float32
from judge import SIGNS as COMPARED
from judge import assert_within, by_definition, by_kernel, gradients, judge
from rounding import gradient_mass, reference_mass, sign_mass

READY = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not READY, reason="needs triton beside torch, and its interpreter: make triton"),
    # of the interpreter's own arithmetic, in numpy
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SMALL = {"dtype": ["f32"], "lengths": [(1, 1), (63, 63), (40, 70), (70, 33)], "dim": [(8, 8), (20, 24), (64, 64)]}
SMALL |= {"heads": [(2, 2), (2, 1)], "scale": ["default", "per_head"]}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setitem(kernels.KERNELS, "triton", Capabilities(additive=False))


@pytest.fixture
def hopper(monkeypatch):
    """Kernels are launched as on Hopper; the launches, as they are made."""
    triton = importlib.import_module("attemper.kernels.triton")
    monkeypatch.setattr(triton, "is_hopper", lambda device: True)
    launches, run = [], triton.Launch.run
    monkeypatch.setattr(triton.Launch, "run", lambda launch: launches.append(launch) or run(launch))
    return launches


@pytest.fixture
def bfloat16(monkeypatch):
    """The interpreter holds bfloat16 as 16 bits, multiplies these as whole numbers, and has no constants of it: mended here."""
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def wide(handle):
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, total, *how):
        if a.dtype.scalar != interpreter.tl.bfloat16:
            return multiply(self, a, b, total, *how)
        return interpreter.TensorHandle(np.matmul(wide(a), wide(b)) + total.data, total.dtype.scalar)

    def get_bf16(self, value):  # such as 1
        bits = np.array([value], dtype=np.float32).view(np.uint32) >> 16
        return interpreter.TensorHandle(bits.astype(np.uint16), interpreter.tl.bfloat16)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "get_bf16", get_bf16, raising=False)


@pytest.mark.parametrize("case", pairwise({**GRID, **SMALL}), ids=str)
def test_as_exact_as_plain_pytorch(case):
    judge(case.tensors(), case.options(), "triton")


@pytest.mark.parametrize("shape", [(), (7,), (5, 1), (4, 1, 7), (2, 1, 5, 7), (2, 4, 5, 7)], ids=str)
def test_the_gradient_of_a_mask_that_is_shared(shape):
    lengths = {"query": (4, 5), "key": (2, 7), "value": (2, 7)}
    tensors = {name: torch.randn(2, *length, 8) for name, length in lengths.items()}
    judge({**tensors, "mask": torch.randn(shape)}, {"causal": "lower_right"}, "triton")


def test_a_large_mask_that_is_shared_is_summed_in_float32(monkeypatch):
    kernel, mask = kernels.load("triton"), torch.randn(1, 1, 5, 7)
    tensors = {name: torch.randn(2, 2, n, 8) for name, n in (("query", 5), ("key", 7), ("value", 7))}
    problem = kernel.Problem(*tensors.values(), mask, *[None] * 5, 0.3, None, None, None, 0.0)
    assert kernel._sum_dtype(problem) == torch.float64
    assert kernel._sum_dtype(problem._replace(mask=torch.randn(2, 2, 5, 7))) == torch.float32
    monkeypatch.setattr(kernel, "MOST_WIDE", 34)
    assert kernel._sum_dtype(problem) == torch.float32
    judge({**tensors, "mask": mask}, {}, "triton")


@pytest.mark.parametrize(("rows", "keys", "heads", "groups"), [(1, 520, 2, 2), (2, 600, 2, 1)])
def test_decode_is_split_and_joined(rows, keys, heads, groups):
    tensors = {"query": torch.randn(2, heads, rows, 16)}
    tensors |= {name: torch.randn(2, groups, keys, 16) for name in ("key", "value")}
    judge(tensors, {"causal": "lower_right"}, "triton")
    judge({**tensors, "mask": torch.rand(2, 1, 1, keys) > 0.4}, {}, "triton")


@pytest.mark.parametrize("late", [False, True])
def test_a_reference_that_does_not_fit_is_left_for_a_running_maximum(late):
    """A key far above the first ones: exp of the distance overflows, and the careful pass computes the rows again."""
    query, key, value = (torch.randn(1, 1, n, 8) for n in (40, 150, 150))
    key[..., -1 if late else 0, :] = 200 * query[..., 3, :]
    judge({"query": query, "key": key, "value": value}, {}, "triton")


@pytest.mark.parametrize(("rows", "keys", "nats"), [(130, 9, 20.0), (40, 64, 15.0)])
def test_the_entropy_does_not_suffer_from_a_reference_far_below_the_largest_logit(rows, keys, nats):
    """Σe is then large, and the entropy a small difference of ln Σe and Σet / Σe, which are not."""
    query, key, value = (torch.randn(1, 1, n, 16) for n in (rows, keys, keys))
    query[..., 0], key[..., 0, 0] = 4.0, nats
    judge({"query": query, "key": key, "value": value}, {}, "triton")


def test_rows_of_many_calls_are_folded_at_once():
    summary = kernels.load("triton").summary  # as the watch finds it
    calls = []
    for batch, heads, rows in ((2, 3, 40), (1, 2, 300)):
        vitals = attemper.measure(*(torch.randn(batch, heads, rows, 8) * 2 for _ in range(2)), causal=True)
        calls.append((vitals, torch.rand(batch, 1, rows) > 0.3 if batch > 1 else None))
    rows = [UnfoldedRows.of(vitals, keep, None) for vitals, keep in calls]
    given = [(row.addresses, row.shape, row.rows) for row in rows]
    folded, first = summary.by_head(given, torch.device("cpu"), SATURABLE_KEYS, SATURATED_WEIGHT), 0
    for vitals, keep in calls:
        expected = vitals.by_head(keep)
        found = folded[first : first + expected.n_heads]
        sums, peaks, first = found[:, :-1], found[:, -1], first + expected.n_heads
        assert expected.columns == (*COLUMNS, "peak")
        assert torch.equal(peaks, expected.peaks)
        # each row's derived signs are float32, by another exp and log
        assert_reordered(
            (sums / expected.sums.abs().clamp(min=1.0)).float(),
            (expected.sums / expected.sums.abs().clamp(min=1.0)).float(),
            2,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 9])
def test_a_call_like_an_earlier_one_has_its_signs_in_one_block(rows, dtype):
    from attemper.kernels.triton.replay import Replay

    kernel = kernels.load("triton")
    query, key, value = (torch.randn(1, 3, n, 16).to(dtype) for n in (rows, 20, 20))
    problem = kernel.Problem(query, key, value, *[None] * 6, 0.25, None, 0, None, 0.0)
    bits = ALL_SIGNS | OUTPUT_LOW_BIT
    expected, given = gathered(*kernel.forward(problem, bits)), []

    class Plan:
        """Writes what the kernel would write, where it would."""

        def run(self, tensors):
            given.extend(tensors[:7])
            for source, target in zip(expected, tensors[7:], strict=True):
                if target is not None:
                    address = target if type(target) is int else target.data_ptr()
                    ctypes.memmove(address, source.data_ptr(), source.nbytes)

    replay = Replay.of(Plan(), problem, bits, expected.output_low is not None)
    output, low, memory, layout = replay.start(problem)
    wanted = (query, key, value, query, query, key, value)
    assert all(tensor is other for tensor, other in zip(given, wanted, strict=True))
    signs = kernel.Signs(memory, layout, low, False)
    found = gathered(output, signs)
    for name, right in expected._asdict().items():
        assert getattr(found, name) is right is None or torch.equal(getattr(found, name), right), name
        assert name == "output" or right is None or torch.equal(getattr(signs, name), right), name
    for name, address in zip((*SIGNS, "lse_low"), signs.addresses, strict=True):
        right = getattr(expected, name)
        there = torch.empty_like(right)
        ctypes.memmove(there.data_ptr(), address, right.nbytes)
        assert torch.equal(there, right), name
        assert memory.data_ptr() <= address < memory.data_ptr() + memory.nbytes, name


def packed(vitals):
    """All signs but `lse` in one tensor, each at a multiple of 16 bytes."""
    rows = vitals.lse.numel()
    memory = torch.full((len(PACKED), packed_size(rows)), float("nan"))
    for row, name in zip(memory, PACKED, strict=True):
        sign = getattr(vitals, name).flatten()
        row[:rows] = sign.view(torch.float32) if name == "visible" else sign
    return memory.flatten()


@pytest.mark.parametrize("shape", [(2, 4, 2, 9, 20), (1, 2, 2, 7, 7), (1, 2, 1, 1, 600), (2, 2, 2, 0, 7)], ids=str)
@pytest.mark.parametrize("options", [(None, 0, None, 0.0), (3, 3, 2.0, 0.0), (None, None, None, 0.4)], ids=str)
def test_packed_signs_are_those_of_the_forward(shape, options):
    batch, heads, groups, rows, keys = shape
    vectors = [torch.randn(batch, *size, 8) for size in ((heads, rows), (groups, keys), (groups, keys))]
    seed = torch.tensor(3) if options[-1] else None
    problem = (*vectors, *[None] * 5, seed, 0.3, *options, False)
    expected = Results(*FORWARD(*problem, ALL_SIGNS, "triton"))
    output, _, lse_low, lse, found = torch.ops.attemper.forward_packed(*problem, ALL_SIGNS, "triton")
    for one, other in ((output, expected.output), (lse, expected.lse), (lse_low, expected.lse_low)):
        assert torch.equal(one, other)
    count = lse.numel()
    for row, name in zip(found.view(len(PACKED), -1), PACKED, strict=True):
        sign = getattr(expected, name)
        held = row.view(torch.int32) if name == "visible" else row
        assert torch.equal(held[:count].view(sign.shape), sign), name


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 3, 0)], ids=str)
def test_a_call_without_rows_is_added_to_a_tally(shape):
    kernel = kernels.load("triton")
    tally, lse = torch.zeros(2, 3, 3, len(COLUMNS) + 3, dtype=torch.float64), torch.zeros(shape)
    rows = kernel.packed_rows(lse, lse.clone(), torch.zeros(0))
    kernel.summary.add_to(tally, (0, 1), rows, None, 4, SATURABLE_KEYS, SATURATED_WEIGHT)
    slot = tally[0, 1]
    assert slot[:, len(COLUMNS) + 1].tolist() == [1.0] * 3
    assert not slot[:, : len(COLUMNS)].any()


@pytest.mark.parametrize("as_rows", [False, True])
def test_calls_are_added_to_a_tally(as_rows):
    """As tensors, and as what a call with packed signs wrote."""
    kernel = kernels.load("triton")
    summary = kernel.summary
    for batch, heads, rows in ((2, 3, 40), (1, 2, 1100), (1, 3, 7)):
        tally, expected = torch.zeros(2, 3, heads + 1, len(COLUMNS) + 3, dtype=torch.float64), None
        slot = tally[1, 2]
        for number in (5, 7):
            vitals = attemper.measure(*(torch.randn(batch, heads, rows, 8) * 2 for _ in range(2)), causal=True)
            keep = torch.rand(batch, 1, rows) > 0.3 if batch > 1 else None
            signs = [*(getattr(vitals, name) for name in SIGNS), vitals._lse_low]
            if as_rows:
                signs = kernel.packed_rows(vitals.lse, vitals._lse_low, packed(vitals))
            summary.add_to(tally, (1, 2), signs, keep, number, SATURABLE_KEYS, SATURATED_WEIGHT)
            alone = vitals.by_head(keep)
            expected = alone if expected is None else expected.merge(alone)
        sums, (peaks, calls, numbers) = slot[:heads, : len(COLUMNS)], slot[:heads, len(COLUMNS) :].unbind(-1)
        assert torch.equal(peaks, expected.peaks)
        assert calls.tolist() == [2.0] * heads
        assert numbers.tolist() == [7.0] * heads
        assert not slot[heads].any()
        assert not tally.flatten(0, 1)[:-1].any()
        size = expected.sums.abs().clamp(min=1.0)
        assert_reordered((sums / size).float(), (expected.sums / size).float(), 2)


def test_lengths_are_compiled_once():
    """Each kernel is compiled for its features and head dims, and not for each length."""
    from attemper.kernels.triton import launch

    def call(rows, keys):
        query, key, value = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (rows, keys, keys))
        attended = attemper.attention(query, key, value, causal=True, kernel="triton")
        (attended.output.sum() + attended.vitals.entropy.sum()).backward()

    call(40, 50)
    compiled = len(launch.COMPILED)
    for rows, keys in ((41, 53), (64, 64), (65, 66), (33, 90)):
        call(rows, keys)
    assert len(launch.COMPILED) == compiled


def test_tiles_of_other_sizes_give_the_same(monkeypatch):
    """What tuning may choose is right too."""
    from attemper.kernels.triton import tune

    tensors = {name: torch.randn(1, 2, 70, 16) for name in ("query", "key", "value")}
    for number in range(1, 4):
        monkeypatch.setattr(
            kernels.load("triton"), "tuned", lambda block, make, at=number: make(tune.others(block)[at])
        )
        judge(tensors, {"causal": True}, "triton")


@pytest.mark.parametrize("keys", [40, 520])
def test_vectors_lie_as_those_of_the_inputs(keys):
    """What a projection leaves, (B, L, H, E) seen as (B, H, L, E), comes back so: what follows a call copies nothing."""

    def run(tensors):
        query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
        attended = attemper.attention(query, key, value, causal="lower_right", kernel="triton")
        (attended.output * weight).sum().backward()
        return [attended.output, query.grad, key.grad, value.grad, attended.vitals.entropy]

    rows, weight = 2, torch.randn(2, 4, 2, 16)
    tensors = [torch.randn(2, n, heads, 16).transpose(1, 2) for n, heads in ((rows, 4), (keys, 2), (keys, 2))]
    by_token, by_head = run(tensors), run([tensor.contiguous() for tensor in tensors])
    for one, other in zip(by_token, by_head, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(by_token[:4], by_head[:4], strict=True):
        assert one.transpose(1, 2).is_contiguous()
        assert other.is_contiguous()


@pytest.mark.parametrize("causal", [False, True])
def test_the_first_keys_may_be_unlike_the_others(monkeypatch, causal):
    """As in a model, where early tokens have attended to few others. The careful pass would double the time of a call."""
    forward = importlib.import_module("attemper.kernels.triton.forward")
    careful, online = [], forward.online
    monkeypatch.setattr(forward, "online", lambda *args, **how: careful.append(1) or online(*args, **how))
    query, key, value = (torch.randn(1, 1, 200, 16) for _ in range(3))
    query[..., 0] = 2.0
    key[:, :, :16, 0] += 8.0
    attemper.attention(query, key, value, causal=causal, kernel="triton")
    assert not careful
    key[:, :, 150] = 100 * query[:, :, 160]
    attemper.attention(query, key, value, causal=causal, kernel="triton")
    assert careful


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_many_keys_that_are_all_alike(monkeypatch, dtype):
    """The sum of their weights grows with their number, and is no reason to compute them again."""
    forward = importlib.import_module("attemper.kernels.triton.forward")
    careful, online = [], forward.online
    monkeypatch.setattr(forward, "online", lambda *args, **how: careful.append(1) or online(*args, **how))
    keys = 33_000
    query, key, value = torch.zeros(1, 1, 9, 16), torch.randn(1, 1, keys, 16), torch.ones(1, 1, keys, 16)
    output, vitals = attemper.attention(query.to(dtype), key.to(dtype), value.to(dtype), kernel="triton")
    assert not careful
    assert torch.equal(output, torch.ones_like(output))
    assert vitals.entropy[0, 0, 8].item() == in_float32(math.log(keys), terms=keys, logit=0.0)


def from_base(*order):
    """A tensor (B, H, L, E) whose dimensions lie in memory in this order."""
    return lambda *shape: torch.randn([shape[at] for at in order]).permute([order.index(at) for at in range(4)])


LAYOUTS = {
    "by head": from_base(0, 1, 2, 3),
    "by token": from_base(0, 2, 1, 3),
    "sequence first": from_base(2, 0, 1, 3),
    "heads first": from_base(1, 0, 2, 3),
    "no unit stride": from_base(0, 1, 3, 2),
    "every other entry": lambda *shape: torch.randn(*shape[:3], 2 * shape[3])[..., ::2],
    "part of a packed projection": lambda b, h, n, e: torch.randn(b, n, 3, h, e)[:, :, 1].transpose(1, 2),
    "expanded over heads": lambda b, h, n, e: torch.randn(b, 1, n, e).expand(b, h, n, e),
    "expanded over rows": lambda b, h, n, e: torch.randn(b, h, 1, e).expand(b, h, n, e),
    "expanded over batches": lambda b, h, n, e: torch.randn(1, h, n, e).expand(b, h, n, e),
}
SHAPES = [
    (2, 2, 2, 5, 7),
    (2, 4, 2, 1, 7),
    (2, 2, 2, 9, 1),
    (2, 1, 1, 5, 7),
    (1, 2, 1, 1, 600),
    (2, 2, 2, 0, 7),
    (2, 2, 2, 5, 0),
]
SHAPES += [(0, 2, 2, 5, 7)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_compiler_is_told_how_results_lie_in_memory(layout, shape):
    """Sizes and strides of the ops' results, as they are and as a graph that is compiled expects them."""
    batch, heads, groups, rows, keys = shape
    make, backward = LAYOUTS[layout], torch.ops.attemper.backward
    vectors = make(batch, heads, rows, 8), make(batch, groups, keys, 8), make(batch, groups, keys, 16)
    problem = (*vectors, *[None] * 6, 0.3, None, 0, None, 0.0, False)

    def run(problem, g_output):
        saved = FORWARD(*problem, (1 << 9) - 1, "triton")
        found = backward(*problem, *saved, g_output, *[None] * 6, [True] * 3 + [False] * 4, "triton")
        packed = torch.ops.attemper.forward_packed(*problem, ALL_SIGNS | OUTPUT_LOW_BIT, "triton")
        return [(tuple(one.shape), one.stride(), one.dtype) for one in (*saved, *found, *packed)]

    g_output = torch.randn(batch, heads, rows, 16)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) for one in vectors]
        expected = run((*fakes, *problem[3:]), mode.from_tensor(g_output))
    assert run(problem, g_output) == expected


def test_the_op_returns_nothing_that_was_not_written():
    """The fast pass looks for no arg-max: a backward finds it when it is needed."""
    from attemper.kernels.contract import ARGMAX_BIT, BIT

    query, key, value = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    args = (query, key, value, *[None] * 6, 0.25, None, 0, None, 0.0, False, sum(BIT.values()) | ARGMAX_BIT, "triton")
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.attemper.forward.default, args, test_utils=checks)


def test_what_is_saved_may_come_back_in_another_layout():
    """Hooks of saved tensors store them elsewhere; kernels read memory by its address."""

    def turned(tensor):
        return tensor if tensor.dim() < 3 else tensor.mT.contiguous().mT

    def gradients(hooks):
        tensors = [torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (40, 50, 50)]
        query, key, value = (tensor.requires_grad_() for tensor in tensors)
        with hooks:
            attended = attemper.attention(query, key, value, kernel="triton")
        (attended.output.square().sum() + attended.vitals.entropy.square().sum()).backward()
        return query.grad, key.grad, value.grad

    expected = gradients(nullcontext())
    found = gradients(torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, turned))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_no_launch_has_more_programs_along_a_dimension_than_cuda_starts(monkeypatch):
    """65,535 along the second and third one: many small images have more heads in a batch."""
    from attemper.kernels.triton import launch

    launched = []
    monkeypatch.setattr(launch.Launch, "_compile", lambda self: launched.append((self.kernel, self.programs)))
    monkeypatch.setattr(launch, "COMPILED", {})
    tensors = [torch.zeros(70_000, 1, 2, 8, requires_grad=True) for _ in range(3)]
    attended = attemper.attention(*tensors, kernel="triton")
    attended.output.sum().backward()
    names = {kernel.fn.__name__: programs for kernel, programs in launched}
    assert names["forward_kernel"] == names["rows_kernel"] == names["keys_kernel"] == (1, 35_000, 2)
    for heads in (1, 65_535, 65_536, 10**9):
        across, along = launch.across(heads)
        assert across * along == heads
        assert max(across, along) <= 65_535
    with pytest.raises(KernelUnavailable, match="Add a sequence to the batch"):
        launch.across(65_537)  # a prime


def test_a_plan_of_decode_is_used_again_only_for_what_was_compiled():
    from attemper.kernels.contract import OUTPUT_LOW_BIT, Problem
    from attemper.kernels.triton.decode import decode_key

    def key(keys, bits=0, dtype=torch.float16, cache=None, right=None):
        query = torch.empty(2, 2, 1, 16, dtype=dtype)
        found = torch.empty(2, 2, keys, 16, dtype=dtype) if cache is None else cache
        return decode_key(Problem(query, found, found, *[None] * 6, 0.25, None, right, None, 0.0), bits)

    assert key(640) == key(960)
    assert key(640, right=639) == key(960, right=959)  # lower right: the bound grows with the keys
    assert key(640) != key(640, right=639)
    far = torch.empty_strided((2, 2, 640, 16), (1 << 31, 640 * 16, 16, 1), dtype=torch.float16, device="meta")
    assert key(640) != key(640, cache=far)  # a stride of 64 bits
    # a call that is small keeps what rounding takes from its weights
    assert key(640, OUTPUT_LOW_BIT) != key(32_000, OUTPUT_LOW_BIT)


def test_long_vectors_in_float32():
    """Tiles of the backward are smaller where those of 32 vectors do not fit into a card's shared memory."""
    judge({name: torch.randn(1, 1, n, 136) for name, n in (("query", 20), ("key", 24), ("value", 24))}, {}, "triton")


def test_parts_of_a_row_that_sees_more_keys_than_float32_can_count():
    """2^24 + 1 is no float32."""
    from attemper.kernels import triton
    from attemper.kernels.contract import BIT, Problem, empty_results

    query = torch.zeros(1, 1, 1, 8)
    results = empty_results(Problem(query, query, *[None] * 7, 1.0, None, None, None, 0.0), BIT["visible"])
    parts = torch.zeros(triton._decode.N_PARTS, 2, 1)
    parts[2] = 1.0  # the sum of weights
    parts[8] = torch.tensor([[1 << 24], [1]], dtype=torch.int32).view(torch.float32)
    how = {"EV": 1, "BEV": 16, "SPLITS": 2, "VALUES": False, "BITS": BIT["visible"], "BY_TOKEN": False}
    triton._decode.join_kernel[(1,)](parts, parts, *results, 1, 1, 1, 2, **how)
    assert results.visible.item() == (1 << 24) + 1


@pytest.mark.parametrize(
    ("dtype", "rows", "keys", "heads", "dim", "options"),
    [
        (torch.bfloat16, 150, 130, 2, 64, {"causal": "lower_right"}),
        (torch.bfloat16, 130, 200, 4, 40, {"causal": "lower_right"}),
        (torch.bfloat16, 140, 140, 2, 32, {"causal": True, "window": 70}),
        (torch.float16, 150, 130, 2, 64, {"causal": "lower_right"}),
    ],
    ids=str,
)
def test_the_backward_of_a_training_step(hopper, bfloat16, dtype, rows, keys, heads, dim, options):
    """As on Hopper: tiles by descriptors, and in bfloat16 a row's numbers as columns."""
    lengths = {"query": (heads, rows), "key": (2, keys), "value": (2, keys)}
    tensors = {name: torch.randn(1, n, length, dim).to(dtype) for name, (n, length) in lengths.items()}
    judge(tensors, options, "triton", losses=("output",))
    appended = {launch.constants["APPENDED"] for launch in hopper if "APPENDED" in launch.constants}
    assert appended == {dtype == torch.bfloat16}


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=str)
def test_bfloat16(hopper, bfloat16, options):
    """All signs and their gradients, in calls that are not small."""
    tensors = {name: torch.randn(1, n, 130, 24).bfloat16() for name, n in (("query", 2), ("key", 1), ("value", 1))}
    judge(tensors, options, "triton")


@pytest.mark.parametrize(
    ("rows", "keys", "dim", "options"),
    [(150, 130, 128, {"causal": "lower_right"}), (260, 64, 96, {}), (460, 36, 72, {"causal": True})],
)
def test_products_ahead_of_the_sums(monkeypatch, hopper, rows, keys, dim, options):
    """As on Hopper, for head dims above 64: the scores of the next keys are computed first. That changes no bit."""
    triton = importlib.import_module("attemper.kernels.triton")
    lengths = {"query": (2, rows), "key": (1, keys), "value": (1, keys)}
    tensors = {name: torch.randn(2, heads, n, dim).half() for name, (heads, n) in lengths.items()}
    judge(tensors, options, "triton", losses=())
    ahead = attemper.attention(*tensors.values(), **options, kernel="triton")
    alone = attemper.measure(tensors["query"], tensors["key"], **options, kernel="triton")
    assert all(launch.constants["AHEAD"] for launch in hopper)
    monkeypatch.setattr(triton, "computes_ahead", lambda problem, sign_bits: False)
    plain = attemper.attention(*tensors.values(), **options, kernel="triton")
    assert not hopper[-1].constants["AHEAD"]
    assert torch.equal(ahead.output, plain.output)
    for sign in attemper.vitals.SIGNS:
        assert torch.equal(getattr(ahead.vitals, sign), getattr(plain.vitals, sign))
    again = attemper.measure(tensors["query"], tensors["key"], **options, kernel="triton")
    for sign in attemper.vitals.SIGNS:
        assert torch.equal(getattr(alone, sign), getattr(again, sign))


@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [(150, 300, {"causal": "lower_right"}), (200, 333, {}), (260, 70, {"causal": True}), (200, 100, {})],
)
def test_signs_in_wide_tiles(monkeypatch, hopper, rows, keys, options):
    """As on Hopper, for head dims up to 64: the last keys of a row are taken in by narrow tiles, which are loaded otherwise."""
    triton = importlib.import_module("attemper.kernels.triton")
    wide = triton.arguments._block(64, 128, 4, 2)
    monkeypatch.setattr(triton, "forward_block", lambda problem, fast, hopper: wide)
    lengths = {"query": (2, rows), "key": (1, keys), "value": (1, keys)}
    tensors = {name: torch.randn(2, heads, n, 56).half() for name, (heads, n) in lengths.items()}
    judge(tensors, options, "triton", losses=())
    together = attemper.attention(*tensors.values(), **options, kernel="triton").vitals
    alone = attemper.measure(tensors["query"], tensors["key"], **options, kernel="triton")
    assert {(launch.constants["BN"], launch.constants["TMA"]) for launch in hopper} == {(128, True)}
    for sign in attemper.vitals.SIGNS:
        assert torch.equal(getattr(alone, sign), getattr(together, sign))


def test_float16_gradients_are_lifted_by_what_counts():
    """Not by a finite bias that hides a key, nor to nothing by an infinite value of another sequence."""
    tensors = {name: torch.randn(2, 1, 20, 16).half() for name in ("query", "key", "value")}
    mask = torch.zeros(1, 1, 1, 20)
    mask[..., 5:9] = -3e38
    judge({**tensors, "mask": mask}, {}, "triton", losses=("variance",))
    found = []
    for far in (1.0, math.inf):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors.values()]
        value = torch.cat([leaves[2][:1], torch.full_like(leaves[2][1:], far)])
        output = attemper.attention(*leaves[:2], value, signs=(), kernel="triton").output
        found.append(torch.autograd.grad(output[0].float().sum(), leaves[0])[0][0])
    finite, beside_infinity = (gradient / found[0].abs().max() for gradient in found)
    assert_reordered(beside_infinity, finite, terms=20)


def test_p2_of_many_keys():
    """All its terms are positive, so that the sum grows, and each term that is added by itself is rounded more."""
    query, key = (torch.randn(1, 1, n, 16).half() for n in (64, 131_072))
    sum_p2 = attemper.measure(query, key, signs=["sum_p2"], kernel="triton").sum_p2.double()
    exact = attemper.measure(query.double(), key.double(), signs=["sum_p2"], kernel="blockwise").sum_p2
    levels = 1 + math.log2(key.shape[2])  # as tests/rounding.py counts them
    allowed = 2 * torch.finfo(torch.float32).eps * (1 + 2 * math.sqrt(levels)) * exact.max()
    assert (sum_p2 - exact).abs().max() <= allowed


@pytest.mark.parametrize("apart", ["one key", "sampled keys"])
def test_signs_of_many_small_terms(hopper, apart):
    """A sink as large as all other keys together, or keys that are all alike: small terms must not be lost in a large sum."""
    tensors = {name: torch.randn(1, 1, n, 16).half() for name, n in (("query", 16), ("key", 8192), ("value", 8192))}
    query, key, _ = tensors.values()
    if apart == "one key":
        query *= 0.1
        key[..., 0] = 0.0
        key[0, 0, 7, 0] = 8.5
    else:  # those that give the reference
        query *= 0.0
        key[..., 0] = 0.75
        key[:, :, ::512, 0] = 0.0
    query[..., 0] = 4.0
    _, exact, problem = by_definition(tensors, {}, torch.float64)
    _, plain, _ = by_definition(tensors, {}, torch.float32)
    mass, vitals = sign_mass(problem, exact), attemper.measure(query, key, kernel="triton")
    for name in COMPARED:
        rounding = torch.finfo(torch.float32).eps * (mass[name] + (reference_mass(exact) if name == "mean" else 0.0))
        assert_within(name, getattr(vitals, name), exact[name], plain[name], rounding)
    assert [launch.constants["FAST"] for launch in hopper] == [True]


def test_the_hardware_copies_what_its_descriptors_are_defined_for():
    from attemper.kernels.triton import arguments

    def copies(shape, steps, at=0):
        return arguments.copies(torch.zeros(40_000, dtype=torch.bfloat16).as_strided(shape, steps, at))

    shape, steps = (2, 2, 70, 64), (8960, 4480, 64, 1)
    assert copies(shape, steps)
    assert copies(shape, (8960, 64, 128, 1))  # by token
    assert copies(shape, steps, at=8)
    assert not copies(shape, steps, at=4)
    assert not copies(shape, (8960, 4480, 68, 1))
    assert not copies(shape, (8960, 0, 64, 1))
    assert not copies(shape, (8960, 4480, 8, 1))
    assert not copies((2, 2, 0, 64), steps)


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_documents_and_sinks(dtype, sink):
    """As the definition has them, with gradients; keys that share a part as large as themselves."""
    query, key, value = (torch.randn(1, 2, 40, 16) for _ in range(3))
    tensors = {"query": query, "key": key + 1, "value": value + 1}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()} | ({"sink": torch.randn(2)} if sink else {})
    options = {"documents": torch.tensor([0, 0, 9, 40]), "causal": "lower_right", "window": 12}
    leaves, exact, problem = by_definition(tensors, options, torch.float64)
    wide_leaves, plain, _ = by_definition(tensors, options, torch.float32)
    ours, actual = by_kernel(tensors, options, "triton")
    eps, mass = torch.finfo(torch.float32).eps, sign_mass(problem, exact)
    plain["output"] = plain["output"].to(dtype)
    for name in ("output", *COMPARED):
        assert_within(name, actual[name], exact[name].detach(), plain[name], eps * (mass[name] + reference_mass(exact)))
    for loss in ("output", *COMPARED):
        cotangent = torch.randn_like(exact[loss])
        cotangent = cotangent.to(dtype).double() if loss == "output" else cotangent
        found, wanted, usual = (
            gradients(of, results, {loss: cotangent})
            for of, results in ((ours, actual), (leaves, exact), (wide_leaves, plain))
        )
        moved = gradient_mass(problem, exact, loss, cotangent) | {"sink": 40.0}
        for name, grad in found.items():
            # a sink's is made of the output, for which weights were rounded
            once = usual[name].to(dtype)
            assert_within(f"d({loss})/d({name})", grad, wanted[name], once, eps * moved[name])
