"""What watch() promises: not a bit changed, nothing left behind, nothing counted twice, nothing missed in silence."""

import gc
import os
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import attemper
import zoo
from attemper.watch import attach, call
from attemper.watch.running import running

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")


class Block(nn.Module):
    """Self-attention on torch's SDPA."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.packed, self.heads = nn.Linear(width, 3 * width), heads

    def forward(self, x):
        q, k, v = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Checkpointed(nn.Sequential):
    """The same layers, each computed again in the backward."""

    def __init__(self, reentrant, as_function, *layers):
        super().__init__(*layers)
        self.reentrant, self.as_function = reentrant, as_function

    def forward(self, x):
        for layer in self:
            x = checkpoint(layer.forward if self.as_function else layer, x, use_reentrant=self.reentrant)
        return x


def stack():
    return nn.Sequential(*(Block() for _ in range(2)))


def state():
    """Everything global that a watch touches."""
    interface = transformers.modeling_utils.AttentionInterface
    return (
        dict(torch_modules._global_forward_hooks),
        dict(torch_modules._global_forward_pre_hooks),
        dict(torch_modules._global_forward_hooks_always_called),
        torch._C._len_torch_dispatch_stack(),
        _python_dispatch._is_in_torch_dispatch_mode,
        _python_dispatch._is_in_non_infra_torch_dispatch_mode,
        interface.get_interface,
        dict(interface._global_mapping),
        dict(transformers.AttentionMaskInterface._global_mapping),
        list(running.frames),
        running.current,
        attach.attachment.listeners,
        attach.attachment.passes,
        attach.attachment.stance,
        torch._dynamo.eval_frame._stance.stance if "torch._dynamo" in sys.modules else "default",
    )


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = state()
    yield
    assert state() == before


def outputs_and_gradients(subject, watched):
    """One training pass, dropout and all."""
    torch.manual_seed(1)
    subject.model.zero_grad()
    subject.model.train()
    inputs = subject.inputs

    def run():
        output = subject.run()
        output.square().mean().backward()
        return output.detach()

    if watched:
        with attemper.watch(subject.model, gradients=True) as watch:
            output = run()
        assert len(watch.record.layers) >= 2
        assert {"grad_q_rms", "grad_k_median"} <= set(watch.record.signs)
    else:
        output = run()
    assert subject.inputs is inputs
    return [output, *(p.grad for p in subject.model.parameters() if p.grad is not None), torch.rand(1)]


@pytest.mark.parametrize("name", zoo.ZOO)
def test_training_is_the_same_to_the_bit(name):
    plain, watched = (outputs_and_gradients(zoo.make(name), watched) for watched in (False, True))
    assert len(plain) == len(watched)
    for expected, found in zip(plain, watched, strict=True):
        assert torch.equal(expected, found)


def test_the_fast_path_stays_the_fast_path():
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), attemper.watch(encoder) as watch:
        encoder(x)
    assert [facts.route for facts in watch.record.facts.values()] == ["fused"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_grad_mode_and_an_alias(context):
    attend = F.scaled_dot_product_attention  # imported before anything is attached

    class Net(nn.Module):
        def forward(self, q, k):
            by_hand = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(0.25).softmax(-1) @ k
            return attend(q, k, k) + by_hand + (q @ k.mT * 0.25).softmax(-1) @ k

    net, (q, k) = Net(), torch.randn(2, 1, 2, 5, 16)
    with context():
        expected = net(q, k)
        with attemper.watch(net) as watch:
            assert torch.equal(net(q, k), expected)
    row = watch.record.to_dicts()[0]
    assert row["rows"] == 15  # five queries, three times the same attention
    assert row["entropy"] == pytest.approx(attemper.measure(q, k).entropy[0, 0].mean().item(), rel=1e-6)


def test_restored_when_the_forward_raises():
    class Failing(nn.Module):
        def __init__(self, error):
            super().__init__()
            self.inner, self.error = Block(), error

        def forward(self, x):
            self.inner(x)
            raise self.error

    x = torch.randn(1, 5, 16)
    for error in (RuntimeError("stop"), KeyboardInterrupt()):
        before = state()
        with pytest.raises(type(error)), attemper.watch(nn.Sequential(Failing(error))) as watch:
            watch.model(x)
        assert state() == before
        assert watch.record.layers == ["0.inner"]  # what was seen until then is kept


def test_a_caught_error_does_not_confuse_the_names():
    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = Block(width=8), Block()

        def forward(self, x):
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x)

    with attemper.watch(Trying()) as watch:
        watch.model(torch.randn(1, 5, 16))
    assert watch.record.layers == ["good"]


@pytest.mark.parametrize("inner_first", [True, False])
def test_watches_nest_and_end_in_any_order(inner_first):
    model, x = stack(), torch.randn(1, 5, 16)
    expected = model(x)
    first, second = attemper.watch(model), attemper.watch(model[1], signs=("entropy",))
    first.__enter__(), second.__enter__()
    assert torch.equal(model(x), expected)
    early, late = (second, first) if inner_first else (first, second)
    early.__exit__(None, None, None)
    assert torch.equal(model(x), expected)
    late.__exit__(None, None, None)
    passes = {id(early): 1, id(late): 2}
    assert [row["rows"] for row in first.record.to_dicts()] == [5.0 * passes[id(first)]] * 4
    assert first.record.layers == ["0", "1"]
    assert second.record.layers == [""]
    assert [row["rows"] for row in second.record.to_dicts()] == [5.0 * passes[id(second)]] * 2
    assert second.record.signs == ["rows", "entropy"]


def test_memory_stays_flat_over_a_thousand_steps():
    torch.manual_seed(0)
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(2, 6, 16)
    graphs = []

    class Mark:
        """Lives as long as the graph that holds it."""

    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    with attemper.watch(model, optimizer=optimizer, gradients=True) as watch:
        for step in range(1000):
            loss = model(x).square().mean()
            loss.grad_fn.metadata["mark"] = mark = Mark()
            graphs.append(weakref.ref(mark))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, mark
            assert graphs.pop()() is None  # the graph is gone the moment the loss is
            if step == 200:
                before = tensors(), resident()
        # the record's numbers lie in a few blocks: 2 layers of 2 heads and 21 columns are 672 bytes a step
        assert tensors() - before[0] <= 8
        assert resident() - before[1] < 8 << 20
    assert len(watch.record) == 1000 * 2 * 2
    assert running.current is None


def resident():
    """Bytes of memory that this process holds; 0 where Linux is not there to say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def test_off_cycle_nothing_is_attached(monkeypatch):
    model, x = stack(), torch.randn(1, 5, 16)
    before = state()
    seen = []
    with attemper.watch(model, every=3) as watch:
        for step in range(7):
            attached = state() != before
            assert attached == (step % 3 == 0)
            if not attached:
                # a device would be waited for by reading a number from it, and nothing of ours may run at all
                monkeypatch.setattr(torch.Tensor, "item", lambda *_: seen.append("item"))
                monkeypatch.setattr(attach.Mode, "__torch_dispatch__", lambda *_: seen.append("mode"))
            model(x)
            watch.step()
            monkeypatch.undo()
    assert seen == []
    assert watch.record.steps == [0, 3, 6]


def test_on_cycle_no_number_is_read(monkeypatch):
    model, x = stack(), torch.randn(1, 5, 16)

    def read(*_):
        raise AssertionError("a number was read while the model ran")

    # blockwise reads a number of q and k where that costs nothing, on the CPU
    with attemper.watch(model, gradients=True, kernel="reference") as watch:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, read)
        model(x).sum().backward()
        watch.step()
        monkeypatch.undo()
        model(x)
    assert len(watch.record.steps) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    subject = zoo.make("by_hand")
    block, x = Block(), torch.randn(2, 5, 16)
    model = nn.ModuleDict({"block": block, "hand": subject.model})
    with torch.autocast("cpu", dtype):
        expected = [block(x), subject.run()]
        with attemper.watch(model) as watch:
            found = [block(x), subject.run()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert watch.record.layers == ["block", "hand.layers.0", "hand.layers.1"]
    name = str(dtype).removeprefix("torch.")
    assert {facts.dtype for facts in watch.record.facts.values()} == {name}
    with attemper.watch(model) as wide:
        block(x), subject.run()
    for low, high in zip(watch.record.to_dicts(), wide.record.to_dicts(), strict=True):
        assert low["entropy"] == pytest.approx(high["entropy"], rel=0.1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_counted_once(reentrant):
    plain = stack()
    again = Checkpointed(reentrant, False, *plain)
    x = torch.randn(2, 5, 16)
    rows = []
    for model in (plain, again):
        with attemper.watch(model, gradients=True) as watch:
            model(x.clone().requires_grad_()).square().sum().backward()
        rows.append(watch.record.to_dicts())
    for found, expected in zip(*rows, strict=True):
        same(found, expected, rel=1e-6)
    assert rows[0][0]["rows"] == 10
    assert rows[0][0]["grad_q_rms"] > 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt_neo"])
def test_a_checkpointed_hugging_face_model_is_counted_once(name, reentrant):
    rows = []
    for checkpointed in (False, True):
        subject = zoo.make(name)
        subject.model.train()
        if checkpointed:
            subject.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(1)
        with attemper.watch(subject.model, gradients=True) as watch:
            subject.run().square().mean().backward()
        rows.append(watch.record.to_dicts())
    for found, expected in zip(*rows, strict=True):
        same(found, expected, rel=1e-5)
        assert found["grad_k_rms"] > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_is_counted_once(reentrant):
    """Its attention is seen as the module's around it; a re-entrant one shows no gradients, as no module runs then."""
    model = Checkpointed(reentrant, True, Block())
    with attemper.watch(model, gradients=True) as watch:
        model(torch.randn(2, 5, 16).requires_grad_()).square().sum().backward()
    row = watch.record.to_dicts()[0]
    assert (row["layer"], row["rows"]) == ("", 10)
    assert ("grad_q_rms" in row) is not reentrant


def same(found, expected, rel):
    """Equal dicts, numbers to a relative tolerance; NaN is NaN."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        wanted = pytest.approx(value, rel=rel, nan_ok=True) if isinstance(value, float) else value
        assert found[name] == wanted, name


def test_gradient_accumulation_adds_up():
    model, x = stack(), torch.randn(4, 5, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attemper.watch(model, gradients=True) as whole:
        model(x).square().sum().backward()
    with attemper.watch(model, optimizer=optimizer, gradients=True) as watch:
        for _ in range(2):
            for part in x.split(1):
                model(part).square().sum().backward()
            optimizer.step()
    assert watch.record.steps == [0, 1]
    rows = [{**row, "step": 0} for row in watch.record.filter(steps=1).to_dicts()]
    for found, expected in zip(rows, whole.record.to_dicts(), strict=True):
        for row in (found, expected):  # medians of parts are averaged
            del row["grad_q_median"], row["grad_k_median"]
        same(found, expected, rel=1e-5)


def test_threads():
    model, x = stack(), torch.randn(1, 5, 16)
    expected = model(x)
    found = []
    with attemper.watch(model) as watch:
        threads = [threading.Thread(target=lambda: found.append(model(x))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(output, expected) for output in found)
    assert {row["rows"] for row in watch.record.to_dicts()} == {20.0}


def test_an_end_while_another_thread_runs_leaves_it_its_way_out():
    inside, done = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x):
            inside.set()
            done.wait(10)
            return x

    model = nn.Sequential(Block(), Waiting())
    depths = []

    def run():
        model(torch.randn(1, 5, 16))
        depths.append(torch._C._len_torch_dispatch_stack())

    thread = threading.Thread(target=run)
    with attemper.watch(model):
        thread.start()
        inside.wait(10)
    done.set()
    thread.join()
    assert depths == [0]


def test_a_submodule_called_alone_is_measured():
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model) as watch:
        model[1](x)
    assert watch.record.layers == ["1"]


def test_padding_that_no_mask_shows_can_be_given():
    model, x = stack(), torch.randn(2, 5, 16)
    keep = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    with attemper.watch(model) as watch:
        watch.rows(keep)
        model(x)
        watch.step()
        watch.rows(None)
        model(x)
    assert [entry.summary.rows[0].item() for entry in watch.record.entries] == [8, 8, 10, 10]


# Dynamo looks at .grad of every input
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models_are_measured_eagerly_and_it_is_said(in_place):
    torch._dynamo.reset()
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model) as expected:
        model(x)
    compiled = model
    if in_place:
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    with warnings.catch_warnings(record=True, action="always") as said, attemper.watch(compiled, every=2) as watch:
        for _ in range(3):
            compiled(x)
            watch.step()
    sentence = "the model is compiled: watched steps run eagerly, the others as compiled."
    assert [str(warning.message) for warning in said] == [f"watch(): {sentence}"]
    assert watch.record.steps == [0, 2]
    assert watch.record.notes == [sentence]
    rows = watch.record.filter(steps=0).to_dicts()
    prefix = "" if in_place else "_orig_mod."
    assert [row["layer"] for row in rows] == [prefix + row["layer"] for row in expected.record.to_dicts()]
    assert [row["entropy"] for row in rows] == [row["entropy"] for row in expected.record.to_dicts()]


def test_a_call_that_cannot_be_measured_stops_nothing_and_is_said(monkeypatch):
    def refuse(*args, **options):
        raise attemper.errors.KernelUnavailable("no kernel for this")

    model, x = stack(), torch.randn(1, 5, 16)
    expected = model(x)
    monkeypatch.setattr(call, "measure", refuse)
    with (
        pytest.warns(UserWarning, match=r"watch\(\): \d: not measured: no kernel for this"),
        attemper.watch(model) as watch,
    ):
        found = model(x)
    assert torch.equal(found, expected)
    assert len(watch.record.notes) == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_torch_func():
    model, x = Block(), torch.randn(3, 2, 5, 16)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    expected = torch.vmap(loss, (None, 0))(parameters, x), torch.func.grad(loss)(parameters, x[0])
    with attemper.watch(model, gradients=True) as watch:
        found = torch.vmap(loss, (None, 0))(parameters, x)
        watch.step()
        gradients = torch.func.grad(loss)(parameters, x[0])
    assert torch.equal(found, expected[0])
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[1].items())
    assert [row["rows"] for row in watch.record.to_dicts()] == [30, 30, 10, 10]


def test_a_mode_of_the_model_s_own_is_left_alone():
    seen = []

    class Counting(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Counted(nn.Sequential):
        def forward(self, x):
            with Counting():
                return super().forward(x)

    model, x = Counted(Block()), torch.randn(1, 5, 16)
    model(x)
    alone = list(seen)
    seen.clear()
    with attemper.watch(model) as watch:
        model(x)
    assert seen == alone  # what we compute beside is not among its ops
    assert watch.record.layers == ["0"]
