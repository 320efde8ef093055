"""What watch() promises: not a bit changed, nothing left behind, memory flat, nothing attached off-cycle."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _python_dispatch

import attemper
import zoo
from attemper.watch.attach import attachment as attach
from attemper.watch.attach import measuring
from attemper.watch.attach.running import running
from close import in_float64
from watched import Block, resident, stack, state

pytestmark = [
    pytest.mark.usefixtures("nothing_is_left_behind"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
]


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
    assert [info.route for info in watch.record.info.values()] == ["fused"]


@pytest.mark.usefixtures("float64")
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
    assert row["entropy"] == in_float64(attemper.measure(q, k).entropy[0, 0].mean().item())


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


def test_a_call_that_cannot_be_measured_stops_nothing_and_is_said(monkeypatch):
    def refuse(*args, **options):
        raise attemper.errors.KernelUnavailable("no kernel for this")

    model, x = stack(), torch.randn(1, 5, 16)
    expected = model(x)
    monkeypatch.setattr(measuring, "attend", refuse)
    with (
        pytest.warns(UserWarning, match=r"watch\(\): \d: not measured: no kernel for this"),
        attemper.watch(model) as watch,
    ):
        found = model(x)
    assert torch.equal(found, expected)
    assert len(watch.record.notes) == 2


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
