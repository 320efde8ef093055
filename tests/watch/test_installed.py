"""The functions that a watch installs in place of torch's: how often, for how long, and beside wrappers of others."""

import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.watch.attach import intercept
from attemper.watch.attach.attachment import attachment
from watched import same_record, stack, state

CLASSES = (nn.Module, torch.Tensor)


@pytest.fixture
def few(monkeypatch):
    """Let functions stay installed after 5 rounds, counted from now."""
    monkeypatch.setattr(intercept, "ROUNDS", 5)
    monkeypatch.setattr(attachment.interception, "rounds", 0)
    return 5


@pytest.fixture
def changes(monkeypatch):
    """Each attribute set on or deleted from torch's classes, in order."""
    changed, put, take = [], setattr, delattr

    def set_and_note(owner, name, value):
        changed.extend([(owner, name)] if owner in CLASSES else [])
        put(owner, name, value)

    def delete_and_note(owner, name):
        changed.extend([(owner, name)] if owner in CLASSES else [])
        take(owner, name)

    monkeypatch.setattr(intercept, "setattr", set_and_note, raising=False)
    monkeypatch.setattr(intercept, "delattr", delete_and_note, raising=False)
    return changed


def test_classes_change_a_few_times_in_thousands_of_cycles(few, changes):
    model, x, before = stack(), torch.randn(1, 5, 16), state()
    with attemper.watch(model, every=2, keep_steps=1) as watch:
        for step in range(4000):
            assert (nn.Module._call_impl is before[3]) == (step % 2 == 1 and step < 2 * few - 1)
            if step == 0:
                model(x)
            watch.step()
    assert state() == before
    assert len(changes) == 2 * 4 * few  # one of Module and three of Tensor, each installed and removed
    assert attachment.interception.installed == []


def test_a_watch_that_is_still_open_keeps_them_installed(few):
    model, other, x, before = stack(), stack(), torch.randn(1, 5, 16), state()
    attachment.interception.rounds = few
    with attemper.watch(model, every=2) as outer:
        model(x)
        with attemper.watch(other, every=2) as inner:
            other(x)
            outer.step()
            inner.step()
            assert nn.Module._call_impl is not before[3]
            assert F.scaled_dot_product_attention is before[8]  # a namespace that is no class
        assert nn.Module._call_impl is not before[3]
    assert state() == before


def test_the_record_is_the_same(few):
    def run():
        torch.manual_seed(0)
        model, x = stack(), torch.randn(2, 5, 16)
        with attemper.watch(model, every=2, gradients=True) as watch:
            for _ in range(8):
                model(x).square().mean().backward()
                watch.step()
        return watch.record

    expected = run()
    attachment.interception.rounds = few
    same_record(run(), expected)


def test_off_cycle_they_do_nothing(few, monkeypatch):
    model, x, seen = stack(), torch.randn(1, 5, 16), []
    attachment.interception.rounds = few
    with attemper.watch(model, every=2) as watch:
        model(x)
        watch.step()
        assert not any(function.switch.on for function in attachment.interception.installed)
        for name in ("enter", "leave"):
            monkeypatch.setattr(attachment, name, lambda *_: seen.append("told"))
        model(x).softmax(-1)
        monkeypatch.undo()
    assert seen == []


def test_a_function_around_ours_that_stays_counts_nothing_twice():
    """Someone wraps our function during a watch and leaves the wrapper there; later watches wrap it again."""
    model, x = stack(), torch.randn(1, 5, 16)

    def run():
        with attemper.watch(model) as watch:
            for _ in range(3):
                model(x)
                watch.step()
        return watch.record

    expected = run()
    before, originals = state(), (nn.Module._call_impl, F.scaled_dot_product_attention)
    try:
        with attemper.watch(model):
            inner = nn.Module._call_impl, F.scaled_dot_product_attention
            nn.Module._call_impl = lambda *args, **kwargs: inner[0](*args, **kwargs)
            F.scaled_dot_product_attention = lambda *args, **kwargs: inner[1](*args, **kwargs)
            model(x)
        same_record(run(), expected)
        same_record(run(), expected)
    finally:
        nn.Module._call_impl, F.scaled_dot_product_attention = originals
    assert state() == before


def test_a_wrapper_that_was_there_first_is_still_called():
    """It may be in place before attemper is imported; modules that an intercepted pass does not follow go through it too."""
    model, x, calls, original = stack(), torch.randn(1, 5, 16), [], nn.Module._call_impl

    def counting(module, *args, **kwargs):
        calls.append(module)
        return original(module, *args, **kwargs)

    nn.Module._call_impl = counting
    try:
        model(x)
        alone = list(calls)
        with attemper.watch(model) as watch:
            for _ in range(3):
                calls.clear()
                model(x)
                watch.step()
                assert calls == alone
    finally:
        nn.Module._call_impl = original


def test_a_model_is_copied_and_saved_during_a_watch(few):
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model) as watch:
        output = model(x)
        copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(x), output)
    assert watch.record.layers == ["0", "1"]


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
def test_a_model_is_traced_during_a_watch(passes):
    """torch.jit.trace runs a model several times, and its graphs must agree."""
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model) as watch:
        for _ in range(passes):
            model(x)
            watch.step()
        traced = torch.jit.trace(model, x)
        model(x)
    assert torch.equal(traced(x), model(x))
    assert watch.record.layers == ["0", "1"]
    assert watch.record.steps == list(range(passes + 1))


def test_an_unwatched_model_runs_in_another_thread_meanwhile(few):
    model, other, x = stack(), stack(), torch.randn(1, 5, 16)
    expected, errors, done = other(x), [], threading.Event()

    def work():
        try:
            while not done.is_set():
                assert torch.equal(other(x), expected)
        except Exception as error:  # it is raised in the test
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with attemper.watch(model, every=2) as watch:
            for _ in range(60):
                model(x)
                watch.step()
    finally:
        done.set()
        thread.join()
    assert errors == []
    assert watch.record.steps == list(range(0, 60, 2))
    assert watch.record.notes == []
