"""Light passes: the same bits and the same record as full ones, on every model; and no change of a model goes unseen."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
import zoo
from attemper.watch.attach import learned
from attemper.watch.attach.light import Interception
from attemper.watch.record import entry as entries
from watched import Block, Checkpointed, stack
from watched import same as close

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


@pytest.fixture
def kinds(monkeypatch):
    """How each pass was followed: "full", "light", or "converted" from light to full."""
    found = []
    end = Interception.end

    def ended(self, current, complete):
        light = current.begun_light is not None
        found.append("full" if not light else "converted" if current.light is None else "light")
        end(self, current, complete)

    monkeypatch.setattr(Interception, "end", ended)
    return found


def same(first, second):
    """The whole record, to the bit."""
    assert repr(first.to_dicts()) == repr(second.to_dicts())
    assert list(first.facts.items()) == list(second.facts.items())
    assert first.notes == second.notes


def bits(tensors):
    return [None if tensor is None else (tensor.dtype, tensor.tolist()) for tensor in tensors]


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
    light = of_zoo(name, run, False)
    followed = name in BY_HAND or (run is train and name in DROPPING)
    assert kinds == ["full"] * 3 if followed else ["full", "light", "light"]
    assert light[0] == full[0]
    same(light[1], full[1])


@pytest.mark.parametrize("run", [infer, train])
@pytest.mark.parametrize("name", [name for name in zoo.ZOO if zoo.make(name).replaceable])
def test_the_zoo_replaced_with_two_passes_a_step(name, run, kinds):
    full = of_zoo(name, run, True, 2, replace=True)
    kinds.clear()
    light = of_zoo(name, run, False, 2, replace=True)
    assert kinds == ["full", *["light"] * 5]
    assert light[0] == full[0]
    same(light[1], full[1])


def compare(make, drive, kinds, **options):
    """Drive a model under a full watch and a light one; returns how the passes of the second were followed."""
    found = []
    for full in (True, False):
        torch.manual_seed(0)
        model = make()
        kinds.clear()
        with attemper.watch(model, full=full, gradients=True, **options) as watch:
            seen = bits(drive(model, watch))
        found.append((seen, watch))
    (expected, first), (output, second) = found
    assert output == expected
    same(second.record, first.record)
    assert second.unmeasured == first.unmeasured
    return list(kinds)


def steps(model, watch, change=lambda model, step: None, count=6):
    """Training passes on the same input, with a change of the model before each."""
    seen, x = [], torch.randn(2, 5, 16)
    for step in range(count):
        change(model, step)
        model.zero_grad()
        output = model(x)
        output.square().mean().backward()
        seen += [output.detach(), *(parameter.grad for parameter in model.parameters())]
        watch.step()
    return seen


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.packed = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.packed(x).chunk(3, -1)
        return x + (q @ k.mT / 4).softmax(-1) @ v


class Switching(nn.Module):
    """A layer that attends in another way when it is told to."""

    def __init__(self, **ways):
        super().__init__()
        self.packed, self.ways, self.way = nn.Linear(16, 48), ways, "none"

    def forward(self, x):
        q, k, v = (part[:, None] for part in self.packed(x).chunk(3, -1))
        return x + (v if self.way == "none" else self.ways[self.way](q, k, v))[:, 0]


def by_hand(q, k, v):
    return (q @ k.mT / 4).softmax(-1) @ v


def replaced(model, step):
    if step == 3:
        model[1] = Block()


def by_hand_in_a_new_module(model, step):
    if step == 3:
        model.append(ByHand())


def skipped(model, step):
    model[1].forward = (lambda x: x) if step == 3 else type(model[1]).forward.__get__(model[1])


def twice(model, step):
    if step == 3:
        model.append(model[0])


def reordered(model, step):
    if step == 3:
        first, second = model[0], model[1]
        model[0], model[1] = second, first


def frozen(model, step):
    model.requires_grad_(step != 3)
    model[0].packed.requires_grad_()


def in_evaluation(model, step):
    model.train(step < 3)


CHANGES = {
    change.__name__: change
    for change in (replaced, by_hand_in_a_new_module, skipped, twice, reordered, frozen, in_evaluation)
}


@pytest.mark.filterwarnings("ignore:.*ran with fewer:UserWarning")
@pytest.mark.parametrize(
    "change", [c for c in CHANGES.values() if c is not skipped], ids=[c for c in CHANGES if c != "skipped"]
)
def test_a_model_that_changes(change, kinds):
    found = compare(stack, lambda model, watch: steps(model, watch, change), kinds, passes="all")
    assert found[:3] == ["full", "light", "light"]
    # the order is known when the pass has ended; other changes are seen before anything is computed
    expected = {
        reordered: ["light", "full", "light"],
        by_hand_in_a_new_module: ["converted", "full", "full"],
        frozen: ["light", "light", "light"],
        in_evaluation: ["full", "light", "light"],  # a pass of another kind
    }
    assert found[3:] == expected.get(change, ["converted", "full", "light"])


def test_a_skipped_layer_is_no_loss(kinds):
    class Skipping(nn.Sequential):
        skips = False

        def forward(self, x):
            for place, layer in enumerate(self):
                x = x if place and self.skips else layer(x)
            return x

    def change(model, step):
        model.skips = step == 3

    found = compare(lambda: Skipping(Block(), Block()), lambda m, w: steps(m, w, change, 7), kinds)
    # the next pass is a full one; it learns of the second layer again
    assert found == ["full", "light", "light", "light", "full", "light", "light"]


def test_a_layer_that_computes_nothing_any_more_is_said(kinds):
    def change(model, step):
        skipped(model, step)

    torch.manual_seed(0)
    model = stack()
    with (
        pytest.warns(UserWarning, match=r"1: step 3: it ran with fewer attention calls than in the last full pass"),
        attemper.watch(model) as watch,
    ):
        steps(model, watch, change)
    assert kinds == ["full", "light", "light", "light", "full", "light"]
    assert [row["layer"] for row in watch.record.filter(steps=3).to_dicts()] == ["0", "0"]


WAYS = {
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "attemper": lambda q, k, v: attemper.attention(q, k, v).output,
    "one tensor": lambda q, k, v: F.scaled_dot_product_attention(q, q, v),
    "with dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1e-9),
    "other shape": lambda q, k, v: F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0])[:, None],
}


@pytest.mark.parametrize(
    ("before", "name"), [("none", "sdpa"), *((b, n) for b in ("none", "sdpa") for n in WAYS if n != "sdpa")]
)
def test_attention_that_begins_at_a_step_in_a_layer_that_ran_before(name, before, kinds):
    def make():
        return nn.Sequential(Block(), Switching(**WAYS))

    def change(model, step):
        model[1].way = before if step < 3 else name

    found = compare(make, lambda model, watch: steps(model, watch, change), kinds)
    assert found[:3] == ["full", "light", "light"]
    light = before != "none" and name == "one tensor"  # the same call with other arguments
    assert found[3] == ("light" if light else "converted")


def test_attention_by_hand_that_begins_at_a_step_is_said(kinds):
    def change(model, step):
        model[1].way = "none" if step < 3 else "by hand"

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Switching(**{"by hand": by_hand}))
    with (
        pytest.warns(UserWarning, match=r"1: step 3: a softmax ran here that no full pass had seen"),
        attemper.watch(model) as watch,
    ):
        steps(model, watch, change)
    assert kinds == ["full", "light", "light", "converted", "full", "full"]
    assert [step for step in range(6) if "1" in watch.record.filter(steps=step).layers] == [4, 5]


hidden_softmax = torch.softmax  # taken before anything is attached


def test_what_light_passes_cannot_see_is_found_by_the_next_check(kinds, monkeypatch):
    monkeypatch.setattr(learned, "CHECK_EVERY", 4)

    def change(model, step):
        model[1].way = "none" if step < 3 else "hidden"

    model = nn.Sequential(Block(), Switching(hidden=lambda q, k, v: hidden_softmax(q @ k.mT, -1) @ v))
    with (
        pytest.warns(UserWarning, match=r"1: step 4: a full pass found attention calls that light passes do not see"),
        attemper.watch(model) as watch,
    ):
        steps(model, watch, change)
    assert kinds == ["full", "light", "light", "light", "full", "full"]
    assert any("full=True follows every pass" in note for note in watch.record.notes)


def test_every_so_many_passes_one_is_full(kinds):
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model):
        for _ in range(2 * learned.CHECK_EVERY + 2):
            model(x)
    places = [place for place, kind in enumerate(kinds) if kind == "full"]
    assert places == [0, learned.CHECK_EVERY, 2 * learned.CHECK_EVERY]


def test_an_alias_is_never_light(kinds):
    attend = F.scaled_dot_product_attention

    def make():
        return nn.Sequential(Block(), Switching(alias=attend))

    def change(model, step):
        model[1].way = "alias"

    assert set(compare(make, lambda model, watch: steps(model, watch, change), kinds)) == {"full"}


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
    assert found.count("light") >= 2
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
    assert found.count("light") >= 3


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
    assert found == ["full", "light", "light"]


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
    assert found == ["full", *["light"] * 6]


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
        same(first, second)
    assert kinds == ["full", *["light"] * 5]


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
    assert kinds.count("light") == 21
    assert found[True][0] == found[False][0]
    for row, expected in zip(found[False][1], found[True][1], strict=True):
        close(row, expected, 1e-12)  # threads add in any order


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

    assert compare(make, drive, kinds) == ["full", "light", "light"]


def test_eager_and_back(kinds):
    def change(subject, step):
        subject.model.set_attn_implementation("eager" if step == 3 else "sdpa")

    records = []
    for full in (True, False):
        kinds.clear()
        subject = zoo.make("llama")
        with attemper.watch(subject.model, full=full) as watch:
            for step in range(6):
                change(subject, step)
                infer(subject, watch, step)
                watch.step()
        records.append(watch.record)
    same(*records)
    assert kinds == ["full", "light", "light", "full", "light", "light"]


def test_one_layer_that_turns_eager_is_followed_before_it_computes(kinds):
    class Config:
        """A config of its own for one layer."""

        def __init__(self, config):
            self.config, self._attn_implementation = config, "eager"

        def __getattr__(self, name):
            return getattr(self.config, name)

    records = []
    for full in (True, False):
        kinds.clear()
        subject = zoo.make("llama")
        attention = subject.model.layers[1].self_attn
        with attemper.watch(subject.model, full=full) as watch:
            for step in range(5):
                if step == 3:
                    attention.config = Config(attention.config)
                infer(subject, watch, step)
                watch.step()
        records.append(watch.record)
    same(*records)
    assert kinds == ["full", "light", "light", "converted", "full"]


def test_no_number_is_read_while_a_light_pass_runs(monkeypatch, kinds):
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
    assert kinds == ["full", "light"]
    assert len(watch.record.steps) == 2


def test_the_numbers_of_a_step_come_in_one_transfer(monkeypatch):
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model, gradients=True) as expected:
        model(x).sum().backward()
    transfers = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(entries.Entry, "on_host", lambda entry: False)  # as if they were on a device
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: transfers.append(len(tensor)) or cpu(tensor))
    with attemper.watch(model, gradients=True) as watch:
        model(x).sum().backward()
    assert transfers == []
    same(watch.record, expected.record)
    assert len(transfers) == 1
