"""Intercepted passes: the same bits and the same record as full ones, on every model of the zoo and in every setting."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
import zoo
from attemper.heads import HeadSummary
from attemper.watch.record import buffer
from attemper.watch.record import entry as entries
from watched import Block, Checkpointed, bits, compare, same, same_record, stack, steps

pytestmark = [
    pytest.mark.usefixtures("nothing_is_left_behind"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
]

BY_HAND = {"gemma2", "gpt_neo", "bloom", "deberta", "by_hand"}  # their attention is product, softmax, product
DROPPING = {"bert", "gpt2", "t5"}  # with dropout, SDPA on the CPU is product, softmax, product too


@pytest.fixture(scope="module", autouse=True)
def _name_is_registered():
    """replace=True leaves its name in the tables of transformers, from the first time on."""
    subject = zoo.make("llama")
    with attemper.watch(subject.model, replace=True):
        subject.run()


def train(subject, watch, step):
    subject.model.zero_grad()
    torch.manual_seed(step)  # dropout
    output = subject.run()
    output.square().mean().backward()
    return [output.detach(), *(parameter.grad for parameter in subject.model.parameters())]


def infer(subject, watch, step):
    with torch.no_grad():
        return [subject.run()]


def of_zoo(name, run, full, passes=1, **options):
    subject = zoo.make(name)
    subject.model.train(run is train)
    seen = []
    with attemper.watch(subject.model, full=full, gradients=run is train, **options) as watch:
        for step in range(3):
            for _ in range(passes):
                seen += bits(run(subject, watch, step))
            watch.step()
    return seen, watch.record


@pytest.mark.parametrize("run", [infer, train])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_zoo(name, run, kinds):
    full = of_zoo(name, run, True)
    assert set(kinds) == {"full"}
    kinds.clear()
    intercepted = of_zoo(name, run, False)
    followed = name in BY_HAND or (run is train and name in DROPPING)
    assert kinds == ["full"] * 3 if followed else ["full", "intercepted", "intercepted"]
    assert intercepted[0] == full[0]
    same_record(intercepted[1], full[1])


@pytest.mark.parametrize("run", [infer, train])
@pytest.mark.parametrize("name", [name for name in zoo.ZOO if zoo.make(name).replaceable])
def test_the_zoo_replaced_with_two_passes_a_step(name, run, kinds):
    full = of_zoo(name, run, True, 2, replace=True)
    kinds.clear()
    intercepted = of_zoo(name, run, False, 2, replace=True)
    assert kinds == ["full", *["intercepted"] * 5]
    assert intercepted[0] == full[0]
    same_record(intercepted[1], full[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("as_function", [False, True])
def test_gradient_checkpointing(reentrant, as_function, kinds):
    def make():
        return Checkpointed(reentrant, as_function, Block(), Block())

    def drive(model, watch):
        seen = []
        for _ in range(3):
            x = torch.randn(2, 5, 16, requires_grad=True)
            output = model(x)
            output.square().mean().backward()
            seen += [output.detach(), x.grad]
            watch.step()
        return seen

    found = compare(make, drive, kinds)
    assert found.count("intercepted") >= 2
    assert "converted" not in found


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_cache_that_grows(context, kinds):
    def drive(model, watch):
        with context():
            inputs = torch.arange(3, 12)[None]
            return [model.generate(inputs, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(inputs))]

    def make():
        config = zoo.config(zoo.transformers.GPT2Config)
        return zoo.transformers.GPT2LMHeadModel(config).eval()

    found = compare(make, drive, kinds)
    assert found.count("intercepted") >= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, kinds):
    class Rotated(Block):
        """q and k in float32, as rotary embeddings leave them."""

        def forward(self, x):
            q, k, v = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            q, k = q.float() * 1.5, k.float() * 0.5
            return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def drive(model, watch):
        with torch.autocast("cpu", dtype=dtype):
            return steps(model, watch, count=3)

    found = compare(lambda: nn.Sequential(Rotated(), Block()), drive, kinds)
    assert found == ["full", "intercepted", "intercepted"]


def test_a_parameter_that_autocast_lowers(kinds):
    """Autocast keeps its copy of a parameter for all its uses, and only the op shows that copy: no such call is intercepted."""

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.packed = nn.Parameter(torch.randn(2, 2, 3, 8)), nn.Linear(16, 32)

        def forward(self, x):
            k, v = self.packed(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
            both = F.scaled_dot_product_attention(self.query, k, v) + F.scaled_dot_product_attention(self.query, v, k)
            return both.float()

    def drive(model, watch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return steps(model, watch, count=4)

    assert "intercepted" not in compare(Learned, drive, kinds)


def test_an_exception_in_the_middle(kinds):
    class Failing(Block):
        fails = False

        def forward(self, x):
            if self.fails:
                raise ValueError("in the middle")
            return super().forward(x)

    def drive(model, watch):
        seen = steps(model, watch, count=3)
        model[1].fails = True
        with pytest.raises(ValueError, match="in the middle"):
            model(torch.randn(2, 5, 16))
        model[1].fails = False
        return seen + steps(model, watch, count=3)

    found = compare(lambda: nn.Sequential(Block(), Failing()), drive, kinds)
    assert found == ["full", *["intercepted"] * 6]


def test_nested_watches(kinds):
    records = []
    for full in (True, False):
        torch.manual_seed(0)
        kinds.clear()
        model, x = stack(), torch.randn(2, 5, 16)
        inside = attemper.watch(model[1], full=full, signs=("entropy",))
        with attemper.watch(model, full=full, gradients=True) as watch:
            for step in range(5):
                if step == 2:
                    inside.__enter__()
                model(x).square().mean().backward()
                watch.step()
            inside.__exit__(None, None, None)
            model(x)
        records.append((watch.record, inside.record))
    for first, second in zip(*records, strict=True):
        same_record(first, second)
    assert kinds == ["full", *["intercepted"] * 5]


def test_one_full_watch_makes_every_pass_full(kinds):
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model), attemper.watch(model[0], full=True):
        model(x), model(x)
    assert kinds == ["full", "full"]


def test_threads(kinds):
    def drive(model, watch):
        steps(model, watch, count=2)
        inputs, outputs = torch.randn(4, 2, 5, 16), [None] * 4
        barrier = threading.Barrier(4)

        def work(place):
            barrier.wait()
            for _ in range(5):
                outputs[place] = model(inputs[place])

        threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [output.detach() for output in outputs]

    found = {}
    for full in (True, False):
        torch.manual_seed(0)
        model = stack().double()
        kinds.clear()
        torch.set_default_dtype(torch.float64)
        try:
            with attemper.watch(model, full=full) as watch:
                outputs = bits(drive(model, watch))
        finally:
            torch.set_default_dtype(torch.float32)
        found[full] = outputs, watch.record.to_dicts()
    assert kinds.count("intercepted") == 21
    assert found[True][0] == found[False][0]
    for row, expected in zip(found[False][1], found[True][1], strict=True):
        same(row, expected)  # threads add in any order


def test_attempers_own_module(kinds):
    def make():
        return attemper.MultiHeadAttention(16, 2, rule="learned", batch_first=True)

    def drive(model, watch):
        seen, x = [], torch.randn(2, 5, 16)
        for _ in range(3):
            output, _ = model(x, x, x, need_weights=False)
            output.square().mean().backward()
            seen += [output.detach(), *(parameter.grad for parameter in model.parameters())]
            watch.step()
        return seen

    assert compare(make, drive, kinds) == ["full", "intercepted", "intercepted"]


def test_an_interrupt_in_the_middle(kinds):
    class Interrupted(Block):
        now = False

        def forward(self, x):
            if self.now:
                raise KeyboardInterrupt
            return super().forward(x)

    def drive(model, watch):
        seen = steps(model, watch, count=3)
        model[1].now = True
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 5, 16))
        model[1].now = False
        return seen + steps(model, watch, count=3)

    found = compare(lambda: nn.Sequential(Block(), Interrupted()), drive, kinds)
    assert found == ["full", *["intercepted"] * 6]


def test_a_mask_that_is_written_again_between_layers(kinds):
    class Masked(nn.Module):
        """One buffer for the masks of both layers."""

        def __init__(self):
            super().__init__()
            self.packed = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

        def forward(self, x):
            mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
            for index, packed in enumerate(self.packed):
                mask[:, :, :, 3 + index :] = False
                q, k, v = (part[:, None] for part in packed(x).chunk(3, -1))
                x = x + F.scaled_dot_product_attention(q, k, v, mask.fill_(True) if index else mask)[:, 0]
            return x

    assert compare(Masked, lambda m, w: steps(m, w, count=3), kinds) == ["full", "intercepted", "intercepted"]


def test_what_was_learned_keeps_no_model_alive():
    model = stack()
    with attemper.watch(model):
        model(torch.randn(1, 5, 16)), model(torch.randn(1, 5, 16))
    gone = weakref.ref(model), weakref.ref(model[0])
    del model
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_no_number_is_read_while_an_intercepted_pass_runs(monkeypatch, kinds):
    model, x = stack(), torch.randn(1, 5, 16)

    def read(*_):
        raise AssertionError("a number was read while the model ran")

    with attemper.watch(model, gradients=True, kernel="reference") as watch:
        model(x).sum().backward()
        watch.step()
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, read)
        model(x).sum().backward()
        watch.step()
        monkeypatch.undo()
    assert kinds == ["full", "intercepted"]
    assert len(watch.record.steps) == 2


@pytest.mark.parametrize("gradients", [False, True])
def test_the_numbers_of_a_step_come_in_one_transfer(gradients, monkeypatch):
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model, gradients=gradients) as expected:
        model(x).sum().backward()
    transfers = []
    monkeypatch.setattr(buffer, "is_on_host", lambda tensor: False)  # as if they were on a device
    monkeypatch.setattr(buffer, "to_cpu", lambda tensor: transfers.append(len(tensor)) or tensor.clone())
    with attemper.watch(model, gradients=gradients) as watch:
        model(x).sum().backward()
        assert transfers == []
    same_record(watch.record, expected.record)
    assert len(transfers) == 1


def test_parts_of_one_memory_are_copied_with_it(monkeypatch):
    """As the GPU's fold writes them: the sums and peaks of all layers in one block."""
    block = torch.randn(6, 5, dtype=torch.float64)
    parts = [block[:2], block[2:]]
    made = [
        entries.Entry(
            1, str(n), "self", (0,), HeadSummary(("rows", "sum_p2", "lse", "mean", "peak"), part[:, :4], part[:, 4])
        )
        for n, part in enumerate(parts)
    ]
    monkeypatch.setattr(buffer, "is_on_host", lambda tensor: False)
    copied = []
    monkeypatch.setattr(buffer, "to_cpu", lambda tensor: copied.append(tensor.clone()) or copied[-1])
    moved = buffer.to_host(made)
    assert [one.numel() for one in copied] == [block.numel()]
    for entry, part in zip(moved, parts, strict=True):
        assert torch.equal(entry.summary.sums, part[:, :4])
        assert torch.equal(entry.summary.peaks, part[:, 4])
