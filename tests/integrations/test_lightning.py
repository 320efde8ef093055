"""LightningCallback in real runs of Lightning: rows, signs and weights are those of a plain loop, to the bit."""

import csv
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import attemper
from integrations.trained import RATE, Tiny, clipped_by_hand, data, plain, same_weights
from watched import state

pytest.importorskip("pytorch_lightning", reason="needs the package pytorch-lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning

    from attemper.integrations import LightningCallback

pytestmark = [pytest.mark.usefixtures("nothing_is_left_behind"), pytest.mark.filterwarnings("ignore")]


class Lit(pytorch_lightning.LightningModule):
    def __init__(self, accumulate=1):
        super().__init__()
        self.inner, self.accumulate = Tiny(), accumulate

    def training_step(self, batch, index):
        return self.inner(**batch)["loss"]

    def validation_step(self, batch, index):
        self.log("val_loss", self.inner(**batch)["loss"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Manual(Lit):
    """Two optimizers, stepped by hand: global_step counts both, Lightning's log counts batches."""

    automatic_optimization = False

    def training_step(self, batch, index):
        loss = self.inner(**batch)["loss"]
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(block.parameters(), lr=RATE) for block in self.inner.blocks]


def train(callback, folder, accumulate=1, module=None, checkpoint=None, loggers=False, callbacks=(), **options):
    module = Lit() if module is None else module
    trainer = pytorch_lightning.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": loggers,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": str(folder),
            **({} if isinstance(module, Manual) else {"accumulate_grad_batches": accumulate}),
            **options,
        },
        callbacks=[callback, *callbacks],
    )
    trainer.fit(module, DataLoader(data(), 2), DataLoader(data()[:4], 2), ckpt_path=checkpoint)
    return trainer


def rows(record):
    """Without the name of the module around the model."""
    return repr([{**row, "layer": row["layer"].removeprefix("inner.")} for row in record.to_dicts()])


@pytest.mark.parametrize(
    ("evaluates", "accumulate"),
    [(False, 1), (True, 3), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in [(False, 3), (True, 1)])],
)
def test_rows_signs_and_weights_are_those_of_a_plain_loop(accumulate, evaluates, tmp_path):
    path, other = tmp_path / "run.jsonl", tmp_path / "plain.jsonl"
    expected, record = plain(accumulate, start=0, every=1, gradients=True, path=other)
    callback, module = LightningCallback(path=path, gradients=True), Lit()
    train(callback, tmp_path, accumulate, module, val_check_interval=1 if evaluates else 1.0)
    assert callback.record.steps == list(range(12 // accumulate))
    assert rows(callback.record) == rows(record)
    assert same_weights(module.inner, expected)
    written = attemper.Record.read(path)
    assert rows(written) == rows(attemper.Record.read(other))
    assert sorted(written.logged) == record.steps


@pytest.mark.parametrize("accumulate", [1, 3])
def test_clips_are_those_of_a_plain_loop(accumulate, tmp_path):
    expected, record, counts = clipped_by_hand(3.0, accumulate, 0)
    seen = {}
    callback = LightningCallback(every=1, clip=3.0, log=lambda metrics, step: seen.update({step: metrics}))
    module = Lit()
    train(callback, tmp_path, accumulate, module)
    assert {step: metrics["attemper/clipped"] for step, metrics in seen.items()} == counts
    assert rows(callback.record) == rows(record)
    assert same_weights(module.inner, expected)


def test_two_optimizers_are_one_step(tmp_path):
    callback, module = LightningCallback(every=2), Manual()
    train(callback, tmp_path, module=module)
    expected, record = plain(start=0, every=2)
    assert callback.record.steps == record.steps
    assert rows(callback.record) == rows(record)
    assert same_weights(module.inner, expected)


@pytest.mark.parametrize("place", ["after the batch", "after the epoch"])
def test_a_resumed_run_goes_on_with_the_trainer_s_numbers(place, tmp_path):
    path, saved = tmp_path / "run.jsonl", tmp_path / "saved.ckpt"
    if place == "after the batch":
        saver = pytorch_lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
        options = {"max_steps": 5, "max_epochs": 2, "enable_checkpointing": True}
        trainer = train(LightningCallback(every=2, path=path), tmp_path, callbacks=[saver], **options)
        saved, first = saver.best_model_path, 5
    else:
        trainer = train(LightningCallback(every=2, path=path), tmp_path)
        trainer.save_checkpoint(saved)
        first = 12
    second = LightningCallback(every=2, path=path)
    train(second, tmp_path, checkpoint=saved, max_epochs=2)
    # a DataLoader without a state of its own begins again: 5 batches of the first epoch, then the other 7 from the start
    model, parts = Tiny().train(), []
    for start, steps in ((0, first), (first, 12 - first), (12, 12)):
        parts.append(plain(start=start, steps=steps, model=model, every=2)[1]) if steps else None
    assert second.record.steps == [step for step in range(0, 24, 2) if step >= first]
    assert rows(attemper.Record.read(path)) == rows(parts[0].merge(*parts[1:]))


def test_an_exception_leaves_nothing_behind(tmp_path):
    before, module = state(), Lit()
    module.inner.fails_at = 8
    callback = LightningCallback(every=1)
    with pytest.raises(FloatingPointError):
        train(callback, tmp_path, 3, module)
    assert state() == before
    assert callback.record.steps == [0, 1, 2]
    assert rows(callback.record.filter(steps=[0, 1])) == rows(plain(3, start=0, every=1)[1].filter(steps=[0, 1]))


def test_the_trainer_s_loggers_get_the_numbers(tmp_path):
    class Keeps(pytorch_lightning.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            seen.append((step, metrics))

    seen = []
    train(LightningCallback(), tmp_path, loggers=[Keeps()], log_every_n_steps=6)
    ours = {step: metrics for step, metrics in seen if "attemper/peak" in metrics}
    assert list(ours) == [0, 6]
    assert all(len(metrics) == 8 and all(type(one) is float for one in metrics.values()) for metrics in ours.values())


def test_a_csv_logger_has_a_column_for_each_head(tmp_path):
    logger = pytorch_lightning.loggers.CSVLogger(tmp_path)
    callback = LightningCallback(every=6, signs="entropy", heads=[1], keep_steps=2)
    train(callback, tmp_path / "run", loggers=[logger])
    with open(Path(logger.log_dir) / "metrics.csv", newline="", encoding="utf-8") as file:
        kept = {int(line["step"]): line for line in csv.DictReader(file) if line["attemper/peak"]}
    assert list(kept) == callback.record.steps == [0, 6]
    for row in callback.record.filter(heads=1).to_dicts():
        assert float(kept[row["step"]][f"attemper/entropy/{row['layer']}/head_1"]) == row["entropy"]
    assert not any("head_0" in name for name in kept[0])


def test_a_finding_stops_the_run_and_a_checkpoint_keeps_what_was_told(tmp_path):
    module = Lit()
    with torch.no_grad():
        module.inner.blocks[0].packed.weight.mul_(30.0)
    callback = LightningCallback(every=1, stop_on="critical")
    trainer = train(callback, tmp_path, module=module)
    assert trainer.global_step < 12
    again = LightningCallback()
    again.load_state_dict(callback.state_dict())
    assert again.alerted == callback.alerted != {}


def test_a_misspelt_option_gets_the_nearest():
    with pytest.raises(
        TypeError, match=r"^LightningCallback\(\): unknown option 'evry'\. Did you mean 'every'\? Known: "
    ):
        LightningCallback(evry=2)  # type: ignore[call-arg]
