"""In the loops of trainers: wrapped optimizers, evaluation between steps, runs that are longer than memory."""

from contextlib import suppress

import pytest
import torch

import attemper
from attemper.errors import InputError
from attemper.watch.attach import attachment as attach
from attemper.watch.attach.gradients import NO_GRADIENTS
from attemper.watch.observer import LEFT_OUT, ONLY_OTHERS, UNFINISHED
from watched import Block, stack, state

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")
X = torch.randn(2, 5, 16)


class Accelerated(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: never initialised, and its step is none while gradients are gathered."""

    def __init__(self, optimizer):
        self.optimizer, self.skips = optimizer, False

    def step(self, closure=None):
        return None if self.skips else self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_wrapped_optimizer_s_skipped_steps_are_none(layers):
    model = stack()
    inner = optimizer = sgd(model)
    for _ in range(layers):
        optimizer = Accelerated(optimizer)
    with attemper.watch(model, optimizer=optimizer) as watch:
        for batch in range(6):
            optimizer.skips = batch % 2 == 0  # accumulates two batches
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.record.steps == [0, 1, 2]
    assert {row["rows"] for row in watch.record.to_dicts()} == {20}
    assert not inner._optimizer_step_post_hooks


def test_an_optimizer_without_hooks_is_refused_at_once():
    class Hollow(Accelerated):
        def __init__(self):
            self.optimizer = self

    with pytest.raises(InputError, match=r"^watch\(\): `optimizer` is a Hollow that is not, and .* call watch\.step"):
        attemper.watch(Block(), optimizer=Hollow())


def evaluate(model, without_gradients=True):
    model.eval()
    with torch.set_grad_enabled(not without_gradients):
        for _ in range(4):
            model(X)
    model.train()


@pytest.mark.parametrize("without_gradients", [True, False])
@pytest.mark.parametrize("first", ["evaluation", "training"])
def test_evaluation_between_two_steps_is_in_neither(first, without_gradients):
    model = stack()
    optimizer = sgd(model)
    with attemper.watch(model, optimizer=optimizer, gradients=True) as watch:
        for _ in range(3):
            if first == "evaluation":
                evaluate(model, without_gradients)
            model(X).sum().backward()
            if first == "training":
                evaluate(model, without_gradients)
            optimizer.step()
    assert watch.record.steps == [0, 1, 2]
    assert {row["rows"] for row in watch.record.to_dicts()} == {10}
    assert {row["grad_q_count"] for row in watch.record.to_dicts()} == {2 * 5 * 8}
    assert watch.record.notes == [LEFT_OUT]


@pytest.mark.parametrize("how", ["no_grad", "eval", "train", "a part"])
@pytest.mark.parametrize("ended_by", ["optimizer", "step"])
def test_evaluation_after_the_last_step_is_no_step_and_all_counts_it(how, ended_by):
    """Whatever tells it from training: no gradients, the model's mode, or that the optimizer takes no step after it."""
    model = stack()
    counts = how == "train" and ended_by == "step"  # may be one that the end of the block ends
    for passes, rows in (("training", [10, 40] if counts else [10]), ("all", [10, 40])):
        optimizer = sgd(model)
        options = {"optimizer": optimizer} if ended_by == "optimizer" else {}
        with attemper.watch(model, passes=passes, gradients=True, **options) as watch:
            model(X).sum().backward()
            optimizer.step()
            if ended_by == "step":
                watch.step()
            if how == "train":
                for _ in range(4):
                    model(X)
            else:
                evaluate(model[0] if how == "a part" else model, how == "no_grad")
        assert [entry.summary.rows[0] for entry in watch.record.entries if entry.layer == "0"] == rows
        if len(rows) == 1:
            assert watch.record.notes == [LEFT_OUT if how == "no_grad" else UNFINISHED]
        else:
            assert watch.record.notes == [NO_GRADIENTS.format(step=1, layers="any layer")]
    with pytest.raises(InputError, match=r"^watch\(\): `passes` must be 'training' or 'all'; got 'eval'\."):
        attemper.watch(model, passes="eval")


def test_what_is_left_after_an_error_is_kept_unless_it_is_evaluation():
    """A loss that is NaN ends a loop before the optimizer's step: the rows of that step show where it began."""
    model = stack()
    for left, steps in ((model, [0, 1]), (evaluate, [0])):
        optimizer = sgd(model)
        with suppress(FloatingPointError), attemper.watch(model, optimizer=optimizer) as watch:
            model(X).sum().backward()
            optimizer.step()
            if left is model:
                model(X)
            else:
                evaluate(model, without_gradients=False)
            raise FloatingPointError
        assert watch.record.steps == steps


def test_a_watch_that_is_opened_again_goes_on_with_the_number_of_what_was_left_out():
    model = stack()
    optimizer = sgd(model)
    watch = attemper.watch(model, optimizer=optimizer)
    for _ in range(2):
        with watch:
            model(X).sum().backward()
            optimizer.step()
            evaluate(model, without_gradients=False)
    assert watch.record.steps == [0, 1]


def test_passes_without_gradients_count_where_nothing_trains():
    """Inference, a frozen part that is called by itself, and a model that is trained in evaluation mode."""
    model = stack()
    with torch.no_grad(), attemper.watch(model) as inference:
        for _ in range(2):
            evaluate(model)
            inference.step()
    assert [row["rows"] for row in inference.record.to_dicts()] == [40] * 8
    with attemper.watch(model) as parts:
        with torch.no_grad():
            frozen = model[0](X)
        model[1](frozen).sum().backward()
    assert [row["rows"] for row in parts.record.to_dicts()] == [10] * 4
    assert inference.record.notes == parts.record.notes == []
    model.eval()
    with attemper.watch(model) as fixed:
        for _ in range(2):
            model(X).sum().backward()
            evaluate(model)
            model.eval()
            fixed.step()
    assert [row["rows"] for row in fixed.record.to_dicts()] == [10] * 8


def test_a_step_of_nothing_but_evaluation_is_said():
    model = stack()
    with attemper.watch(model) as watch:
        model(X).sum().backward()
        watch.step()
        evaluate(model)
        with pytest.warns(UserWarning, match="only passes without gradients"):
            watch.step()
    assert watch.record.steps == [0]
    assert watch.record.notes == [LEFT_OUT, ONLY_OTHERS]


def test_evaluation_that_does_not_count_is_not_measured(monkeypatch):
    model = stack()
    with attemper.watch(model) as watch:
        model(X).sum().backward()
        with monkeypatch.context() as patched:
            patched.setattr(attach.Mode, "__torch_dispatch__", lambda *_: pytest.fail("it was looked at"))
            evaluate(model)
        watch.step()


@pytest.mark.parametrize("file", [True, False])
def test_a_long_run_holds_its_last_steps(tmp_path, file):
    model, path = Block(), tmp_path / "run.jsonl"
    options = {"path": path} if file else {}
    with attemper.watch(model, keep_steps=3, **options) as watch:
        for step in range(7):
            model(X)
            watch.step()
            assert watch.record.steps == list(range(max(0, step - 2), step + 1))
    (note,) = watch.record.notes
    assert note.startswith("only the last 3 steps")
    assert (f"attemper.Record.read({str(path)!r})" if file else "keep_steps=") in note
    if file:
        whole = attemper.Record.read(path)
        assert (whole.steps, whole.notes) == (list(range(7)), [])
        assert repr(whole.filter(steps=[4, 5, 6]).to_dicts()) == repr(watch.record.to_dicts())
    for keep in (0, -1, 2.0, True):
        with pytest.raises(
            InputError, match=r"^watch\(\): `keep_steps` must be a whole number of steps, at least 1; got"
        ):
            attemper.watch(model, keep_steps=keep)


def test_memory_stays_flat(tmp_path):
    """By default with a file, and where it is asked for: 31 steps of 64 heads and 16 numbers fill a block."""
    model = Block()
    with attemper.watch(model, path=tmp_path / "run.jsonl", signs="entropy") as watch:
        for _ in range(103):
            model(X)
            watch.step()
    assert watch.record.steps == list(range(3, 103))
    model, x = Block(128, 64), torch.randn(1, 2, 128)
    with attemper.watch(model, keep_steps=10) as watch:
        for _ in range(130):
            model(x)
            watch.step()
    assert watch.record.steps == list(range(120, 130))
    assert len(watch.record._buffer.blocks) <= 2


def test_a_paused_watch_is_detached_and_its_step_goes_on():
    model = stack()
    optimizer = sgd(model)
    before = state()
    with attemper.watch(model, passes="all", gradients=True) as watch:
        for _ in range(2):
            model(X).sum().backward()  # the first micro-batch
            watch.pause()
            watch.pause()
            assert state() == before
            evaluate(model)
            watch.resume()
            watch.resume()
            model(X).sum().backward()  # the second
            optimizer.step()
            watch.step()
        watch.pause()
        model(X)
        watch.step()  # a step that was paused as a whole has no rows
    assert watch.record.steps == [0, 1]
    assert {row["rows"] for row in watch.record.to_dicts()} == {20}
    assert {row["grad_q_count"] for row in watch.record.to_dicts()} == {2 * 2 * 5 * 8}
    with watch:  # a watch that is opened again is not paused
        model(X)
    assert watch.record.steps == [0, 1, 3]


def test_a_watch_may_be_paused_before_it_opens_and_between_its_steps():
    model = stack()
    watch = attemper.watch(model, every=2)
    watch.pause()
    with watch:
        for step in range(4):
            watch.resume()
            model(X).sum().backward()
            watch.pause()
            watch.step()
            assert watch.record.steps == list(range(0, step + 1, 2))


def test_steps_have_the_trainer_s_numbers():
    model = stack()
    with attemper.watch(model, every=2, start=4) as watch:
        for number in (4, 5, 6, 10, 11, 12):  # a resumed trainer jumps
            model(X).sum().backward()
            watch.step(number)
    # 10 came where 7 was expected, which was not due
    assert watch.record.steps == [4, 6, 12]
    with attemper.watch(model) as watch:
        model(X)
        for number in (-1, 1.0, True, "3"):
            with pytest.raises(InputError, match=r"^watch\.step\(\): the step must be a whole number from 0 on; got"):
                watch.step(number)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_was_logged_is_kept_beside_the_rows(tmp_path, suffix):
    model, path = Block(), tmp_path / "run.jsonl"
    with attemper.watch(model, path=path, every=2) as watch:
        for step in range(5):
            model(X).sum().backward()
            watch.log({"loss": torch.tensor(1.5 + step, requires_grad=True)})
            watch.log({"lr": 0.1}, step=step)
            watch.step()
        watch.log({"eval": float("nan"), "most": float("inf")}, 4)
    expected = {step: {"loss": 1.5 + step, "lr": 0.1} for step in range(5)}
    last = {**expected.pop(4), "eval": float("nan"), "most": float("inf")}
    assert repr(watch.record.logged.pop(4)) == repr(last)
    assert watch.record.logged == expected
    read = attemper.Record.read(path)
    assert {step: read.logged[step] for step in range(4)} == expected
    assert read.logged[4]["most"] == float("inf")
    assert read.filter(steps=2).logged == {2: expected[2]}
    assert read.merge(read).logged.keys() == read.logged.keys()
    again = tmp_path / f"again{suffix}"
    read.write(again)
    assert repr(attemper.Record.read(again).logged) == repr(read.logged)
    with attemper.watch(model) as watch:
        model(X)
        for numbers, words in (([1], "must be a dict"), ({"loss": X}, "'loss' must be one number; got Tensor")):
            with pytest.raises(InputError, match=words):
                watch.log(numbers)
        with pytest.raises(InputError, match=r"^watch\.log\(\): the step must be"):
            watch.log({}, -1)
