"""However a forward or a block ends, nothing stays behind: errors, interrupts, threads, re-entry."""

import threading

import pytest
import torch
from torch import nn

import attemper
from attemper.watch.attach.attachment import attachment
from attemper.watch.attach.running import running
from watched import Block, state

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


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


def test_an_end_while_another_thread_runs_leaves_it_its_way_out():
    inside, done = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x):
            inside.set()
            done.wait(60)
            return x

    model = nn.Sequential(Block(), Waiting())
    depths = []

    def run():
        model(torch.randn(1, 5, 16))
        depths.append(torch._C._len_torch_dispatch_stack())

    thread = threading.Thread(target=run)
    with attemper.watch(model):
        thread.start()
        inside.wait(60)
    done.set()
    thread.join()
    assert depths == [0]


class Interrupted(nn.Module):
    """Ends with an exception that passes torch's hooks by, as long as it has one."""

    def __init__(self, error):
        super().__init__()
        self.inner, self.error = Block(), error

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.inner(x)


def outside():
    """What is left in this thread while no forward runs."""
    return len(running.frames), running.current, torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("then", ["a pass", "a step"])
def test_an_interrupt_that_is_caught_inside_the_block_leaves_no_mode_on(then):
    model, x = nn.Sequential(Interrupted(KeyboardInterrupt())), torch.randn(1, 5, 16)
    with attemper.watch(model) as watch:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model[0].error = None
        if then == "a step":
            model[0].inner(x)  # a step without any attention would be an error
            watch.step()
            assert outside() == (0, None, 0)
        model(x)
        assert outside() == (0, None, 0)
        nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 8))  # not the model's
    assert watch.record.layers == ["0.inner"]
    assert watch.record.filter(steps=watch.record.steps[-1]).to_dicts()[0]["rows"] == 5


def test_a_pass_that_calls_its_model_again_is_no_pass_that_ended():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x, again=True):
            return self.inner(self(x, False) if again else x)

    with attemper.watch(Twice()) as watch:
        watch.model(torch.randn(1, 5, 16))
    assert watch.record.to_dicts()[0]["rows"] == 10


@pytest.mark.parametrize("lives_on", [True, False])
def test_a_thread_that_was_ended_in_mid_pass_keeps_nothing_installed(lives_on):
    model, x = nn.Sequential(Block(), Interrupted(SystemExit())), torch.randn(1, 5, 16)
    ended, done = threading.Event(), threading.Event()

    def run():
        try:
            model(x)
        except SystemExit:
            ended.set()
        done.wait(60 if lives_on else 0)

    thread = threading.Thread(target=run)
    with attemper.watch(model) as watch:
        thread.start()
        assert ended.wait(60)
        if not lives_on:
            thread.join()
    left = attachment.interception.installed, attachment.passes, attachment.eager.stance
    done.set()
    thread.join()
    assert left == ([], {}, None)
    assert watch.record.layers == ["0"]  # all that there is


def test_a_watch_that_is_used_again_goes_on_counting():
    model, x = Block(), torch.randn(1, 5, 16)
    watch = attemper.watch(model)
    for _ in range(2):
        with watch:
            model(x)
            watch.step()
            model(x)
    assert watch.record.steps == [0, 1, 2, 3]
    assert [row["rows"] for row in watch.record.merge().to_dicts()] == [5.0] * 8
    with pytest.raises(attemper.errors.InputError, match="was not called inside the block"), watch:
        pass
