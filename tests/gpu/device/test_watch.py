"""watch() on a GPU: the record that a CPU gives, nothing of the model changed, and no wait for the device while it runs."""

import pytest
import torch

import attemper
from attemper.watch.attach.running import Pass
from gpu.device.plain import HEADS, LENGTH, MODELS, made, run, watched

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch finds as cuda"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
KEYS = ("step", "layer", "kind", "head")
each = pytest.mark.parametrize("name", MODELS)
in_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
passes = pytest.mark.parametrize("train", [False, True], ids=["forward", "backward"])


def table(record):
    """The numbers of a record by column, and what the rows are called."""
    rows = record.to_dicts()
    numbers = {name: torch.tensor([row[name] for row in rows]).double() for name in rows[0] if name not in KEYS}
    return numbers, [tuple(row[key] for key in KEYS) for row in rows]


def rms(numbers):
    return numbers.square().mean().sqrt().item()


@each
@in_dtype
@passes
def test_the_record_is_as_right_as_on_a_cpu(name, dtype, train):
    """float64 decides: the error of a GPU's record is within 2 × (the CPU's in the same dtype + rounding)."""
    _, record = watched(*made(name, torch.float64, "cpu", dtype), train, kernel="reference")
    truth, places = table(record)
    found = {}
    for device in ("cpu", "cuda"):
        _, record = watched(*made(name, dtype, device, dtype), train)
        found[device], seen = table(record)
        assert seen == places
        assert set(found[device]) == set(truth)
        assert not record.notes
    assert len(places) == 2 * HEADS
    assert truth["rows"].tolist() == [3.0 * LENGTH] * len(places)
    for column, expected in truth.items():
        if column.endswith("rows") or column == "visible":
            assert torch.equal(found["cuda"][column], expected), column
            continue
        # the number itself in its dtype, and a sum over the keys in float32
        rounding = (torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * LENGTH**0.5) * rms(expected)
        cpu, cuda = (rms(found[device][column] - expected) for device in ("cpu", "cuda"))
        assert cuda <= 2 * (cpu + rounding), (column, cuda, cpu, rounding)


@each
@in_dtype
@passes
def test_not_a_bit_of_the_model_changes(name, dtype, train):
    model, x = made(name, dtype, "cuda", dtype)
    expected, again = run(model, x, train), run(model, x, train)
    found, _ = watched(model, x, train)
    for one, two, three in zip(expected, again, found, strict=True):
        assert torch.equal(one, two), "the model itself does not repeat: nothing can be said"
        assert torch.equal(one, three)


@pytest.fixture
def no_waiting():
    """Whoever waits for the device in here raises."""
    before = torch.cuda.get_sync_debug_mode()

    def forbid(forbidden=True):
        torch.cuda.set_sync_debug_mode("error" if forbidden else before)

    yield forbid
    torch.cuda.set_sync_debug_mode(before)


def test_a_wait_would_show(no_waiting):
    x = torch.ones(3, device="cuda")
    no_waiting()
    with pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


@each
@passes
def test_a_pass_waits_for_nothing(name, train, no_waiting):
    model, x = made(name, torch.bfloat16, "cuda", torch.bfloat16)
    run(model, x, train)  # what torch sets up once may wait
    with attemper.watch(model, gradients=train) as watch:
        no_waiting()
        for _ in range(2):
            run(model, x, train)
        no_waiting(False)
    assert {row["rows"] for row in watch.record.to_dicts()} == {6.0 * LENGTH}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True], ids=["masked", "nested"])
def test_padding_is_left_out(nested):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval().cuda()
    padding = torch.zeros(2, 20, dtype=torch.bool, device="cuda")
    padding[1, 15:] = True
    with torch.no_grad(), attemper.watch(model) as watch:
        model(torch.randn(2, 20, 32, device="cuda"), src_key_padding_mask=padding)
    assert {row["rows"] for row in watch.record.to_dicts()} == {35.0}
    assert {row["visible"] for row in watch.record.to_dicts()} == {(20 * 20 + 15 * 15) / 35}


def test_rows_may_be_given_on_the_cpu():
    model, x = made("SDPA", torch.float32, "cuda", torch.float32)
    keep = torch.zeros(3, LENGTH, dtype=torch.bool)
    keep[:, :7] = True
    with attemper.watch(model) as watch:
        watch.rows(keep)
        for _ in range(3):
            run(model, x, False)
            watch.step()
    assert {row["rows"] for row in watch.record.to_dicts()} == {21.0}


@pytest.mark.parametrize("name", ["SDPA", "TransformerEncoder"])
@in_dtype
def test_calls_like_earlier_ones_have_the_same_bits(name, dtype, monkeypatch):
    """They go the short way: the launch of the first, all signs in one block, one table for the fold."""
    kernel, used = attemper.kernels.load("triton"), []
    add_sums = Pass.add_sums
    monkeypatch.setattr(Pass, "add_sums", lambda *args: used.append(args) or add_sums(*args))
    kernel._launch.PLANS.clear()
    attemper.kernels.extension().forget()
    model, x = made(name, dtype, "cuda", dtype)
    with attemper.watch(model) as watch:
        for _ in range(5):
            run(model, x, False)
            watch.step()
    first, *others = (watch.record.filter(steps=[step]).to_dicts() for step in range(5))
    for rows in others:
        assert [{**row, "step": 0} for row in rows] == first
    if name == "SDPA":
        assert len(used) == 2 * 4  # the first pass is a full one


@in_dtype
@passes
def test_replaced_calls_like_earlier_ones_have_the_same_bits(dtype, train, monkeypatch):
    """The same with replace=True, where the launch also computes the output."""
    transformers = pytest.importorskip("transformers")
    kernel, used = attemper.kernels.load("triton"), []
    signs = kernel.Signs
    monkeypatch.setattr(kernel, "Signs", lambda *args: used.append(args) or signs(*args))
    kernel._launch.PLANS.clear()
    attemper.kernels.extension().forget()
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 1}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = transformers.GPT2Config(**sizes, **off)
    model = transformers.GPT2LMHeadModel(config).to("cuda", dtype).train(train)
    ids, found = torch.randint(0, 64, (3, 150), device="cuda"), []
    with attemper.watch(model, replace=True) as watch:
        for _ in range(4):
            model.zero_grad()
            with torch.set_grad_enabled(train):
                logits = model(ids).logits
            if train:
                logits.float().logsumexp(-1).mean().backward()
            watch.step()
            found.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(used) >= 3 * 2  # the first call makes the plan
    first, *others = (watch.record.filter(steps=[step]).to_dicts() for step in range(4))
    for rows in others:
        assert [{**row, "step": 0} for row in rows] == first
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


@pytest.mark.parametrize("keep", [None, 1, 3])
def test_steps_end_while_the_device_is_busy(keep):
    """Nothing waits for the device before the record is read, unless more steps are on their way than are kept."""
    model, x = made("SDPA", torch.float32, "cuda", torch.float32)
    busy, done = torch.randn(8192, 8192, device="cuda"), torch.cuda.Event()
    with attemper.watch(model, keep_steps=keep) as watch:
        run(model, x, False)
        watch.step()
        for _ in range(30):
            busy = busy @ busy * 1e-3
        done.record()
        for _ in range(3):
            run(model, x, False)
            watch.step()
        assert done.query() == (keep == 1)
    steps = sorted({row["step"] for row in watch.record.to_dicts()})
    assert steps == list(range(4))[-(keep or 4) :]
    found = [table(watch.record.filter(steps=[step]))[0]["entropy"] for step in steps]
    assert all(torch.equal(found[0], other) for other in found)


def test_steps_and_microbatches_add_up():
    model, x = made("SDPA", torch.float32, "cuda", torch.float32)
    with attemper.watch(model) as watch:
        for part in x.split(1):
            run(model, part, False)
        watch.step()
        run(model, x, False)
    first, second = (table(watch.record.filter(steps=[step]))[0] for step in (0, 1))
    for column, expected in second.items():
        torch.testing.assert_close(first[column], expected, rtol=1e-5, atol=1e-6)


def test_layers_with_a_learned_scale_are_measured_in_every_step():
    """Their scale is a tensor, which no launch of an earlier call has."""
    torch.manual_seed(0)
    layers = [attemper.MultiHeadAttention(64, HEADS, batch_first=True, rule="qk_norm") for _ in range(2)]
    model, x = torch.nn.ModuleList(layers).cuda(), torch.randn(2, 40, 64, device="cuda")
    records = []
    for full in (True, False):
        with attemper.watch(model, full=full) as watch:
            for _ in range(3):
                for layer in layers:
                    layer(x, need_weights=False)
                watch.step()
        records.append(watch.record)
    expected, record = records
    assert not record.notes
    assert {row["rows"] for row in record.to_dicts()} == {80.0}
    assert record.to_dicts() == expected.to_dicts()
