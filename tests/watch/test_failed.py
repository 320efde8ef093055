"""A pass that raises counts only if its error ends the block: not if the step goes on without it, as after an out-of-memory."""

import threading

import pytest
import torch
from torch import nn

import attemper
import zoo
from watched import Block, Checkpointed, stack


class Planted:
    """Makes a module raise as long as it is armed."""

    def __init__(self, module, error):
        self.error, self.armed = error, False
        module.register_forward_pre_hook(self)

    def __call__(self, module, args):
        if self.armed:
            raise self.error


def by_kernels():
    model = zoo.make("llama").model.train()
    return model, model.layers[1], lambda size: model(torch.randint(3, 90, (size, 6)))[0]


def by_hand():
    model = zoo.make("by_hand").model
    return (
        model,
        model.layers[1],
        lambda size: model(torch.randn(size, 6, zoo.WIDTH), torch.ones(size, 6, dtype=torch.bool)),
    )


def of_blocks(make):
    model = make()
    return model, model[1], lambda size: model(torch.randn(size, 6, 16, requires_grad=True))


ROUTES = {
    "full": (lambda: of_blocks(stack), {"full": True}),
    "intercepted": (lambda: of_blocks(stack), {}),
    "by hand": (by_hand, {}),
    "replaced": (by_kernels, {"replace": True}),
    "checkpoints": (lambda: of_blocks(lambda: Checkpointed(False, False, *stack())), {}),
    "re-entrant checkpoints": (lambda: of_blocks(lambda: Checkpointed(True, False, *stack())), {}),
}
MEMORY = torch.OutOfMemoryError("planted")


def train(route, then, error=MEMORY, fails=True):
    """A step, then one in which a pass fails between others: `then` says what follows it. The record, and the layers that ran."""
    torch.manual_seed(0)
    make, options = ROUTES[route]
    model, second, run = make()
    planted = Planted(second, error)
    watch = attemper.watch(model, gradients=route != "replaced", **options)

    def block():
        with watch:
            for size in (2, 2):
                run(size).square().mean().backward()
            watch.step()
            run(3).square().mean().backward()
            if fails:
                planted.armed = True
                if then == "an error":
                    run(4)
                with pytest.raises(type(error), match="planted"):
                    run(4)
                planted.armed = False
            torch.manual_seed(1)
            if then == "a pass":
                run(2).square().mean().backward()
            if then == "a step":
                watch.step()
                run(2).square().mean().backward()

    if fails and then == "an error":
        with pytest.raises(type(error), match="planted"):
            block()
    else:
        block()
    return watch.record


@pytest.mark.parametrize("error", [MEMORY, KeyboardInterrupt("planted")], ids=["error", "interrupt"])
@pytest.mark.parametrize("then", ["a pass", "a step", "the end"])
@pytest.mark.parametrize("route", ROUTES)
def test_the_step_goes_on_without_it(route, then, error):
    record, expected = train(route, then, error), train(route, then, fails=False)
    assert repr(record.to_dicts()) == repr(expected.to_dicts())
    assert [note for note in record.notes if note not in expected.notes] == [
        "a pass raised an error before it ended, and its step went on without it: the calls that it had made are left out. "
        "They are counted only if an error ends the block."
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_an_error_that_ends_the_block_keeps_it(route):
    """It may show where a NaN began."""
    record, without = train(route, "an error"), train(route, "the end", fails=False)
    first, second = record.layers
    rows = [one.filter(steps=1, layers=second).to_dicts() for one in (record, without)]
    assert repr(rows[0]) == repr(rows[1])
    rows = [one.filter(steps=1, layers=first).to_dicts()[0]["rows"] for one in (record, without)]
    assert rows == [7 * 6, 3 * 6]
    assert record.notes == without.notes


@pytest.mark.usefixtures("nothing_is_left_behind")
@pytest.mark.parametrize("route", ["full", "intercepted"])
def test_a_step_of_nothing_else_has_no_rows(route):
    make, options = ROUTES[route]
    model, second, run = make()
    planted = Planted(second, MEMORY)
    with attemper.watch(model, **options) as watch:
        for planted.armed in (False, True, False):
            try:
                run(2)
            except torch.OutOfMemoryError:
                assert planted.armed
            watch.step()
    assert watch.record.steps == [0, 2]


@pytest.mark.usefixtures("nothing_is_left_behind")
def test_a_watch_of_a_part_of_the_model():
    """Its part ran to the end, in a pass that failed later."""
    model, x = nn.Sequential(nn.Sequential(Block()), Block()), torch.randn(1, 6, 16)
    planted = Planted(model[1], MEMORY)
    with attemper.watch(model) as outer, attemper.watch(model[0]) as inner:
        for planted.armed in (True, False):
            try:
                model(x)
            except torch.OutOfMemoryError:
                model[0](x)
    assert [row["rows"] for row in outer.record.to_dicts()[::2]] == [12, 6]
    assert inner.record.to_dicts()[0]["rows"] == 12


@pytest.mark.usefixtures("nothing_is_left_behind")
def test_of_another_thread():
    """What fails in one thread takes nothing from passes that run meanwhile in another."""
    model, x = stack(), torch.randn(2, 6, 16)
    inside, failed = threading.Event(), threading.Event()

    def hook(module, args):
        if args[0].shape[0] == 1:
            inside.wait(60)
            raise MEMORY
        inside.set()
        assert failed.wait(60)

    def fail():
        with pytest.raises(torch.OutOfMemoryError):
            model(x[:1])
        failed.set()

    model[1].register_forward_pre_hook(hook)
    with attemper.watch(model) as watch:
        thread = threading.Thread(target=fail)
        thread.start()
        model(x)
        thread.join()
    assert [row["rows"] for row in watch.record.to_dicts()] == [12] * 4


def test_an_error_that_the_model_catches_is_no_failed_pass():
    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x):
            try:
                self.inner(x)
                raise RuntimeError("planted")
            except RuntimeError:
                return self.inner(x)

    with attemper.watch(Trying()) as watch:
        watch.model(torch.randn(1, 6, 16))
        watch.model(torch.randn(1, 6, 16))
    assert watch.record.to_dicts()[0]["rows"] == 24
    assert watch.record.notes == []


def test_a_step_that_ends_inside_a_forward_has_the_calls_up_to_there():
    """Test-time training, and modules that hold their own loop."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x, watch):
            self.inner(x[:1])
            watch.step()
            return self.inner(x)

    with attemper.watch(Loop()) as watch:
        watch.model(torch.randn(2, 6, 16), watch)
    assert [(row["step"], row["rows"]) for row in watch.record.to_dicts()[::2]] == [(0, 6), (1, 12)]
