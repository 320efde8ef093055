"""HuggingFaceCallback in real runs of transformers.Trainer: rows, signs and weights are those of a plain loop, to the bit."""

import gc
import json

import pytest
import torch

import attemper
from attemper.errors import InputError
from attemper.integrations import HuggingFaceCallback, as_logger
from integrations.trained import Tiny, clipped_by_hand, data, optimizer_of, plain, same_weights
from watched import state

pytest.importorskip("accelerate", reason="needs the package accelerate")
from transformers import Trainer, TrainerCallback, TrainingArguments

pytestmark = [pytest.mark.usefixtures("nothing_is_left_behind"), pytest.mark.filterwarnings("ignore")]


def train(callback, folder, accumulate=1, model=None, resume=None, others=(), **options):
    """A run of the real Trainer over the items in their order."""
    model = Tiny() if model is None else model
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": accumulate,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **options,
    }
    optimizer = optimizer_of(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(
        model,
        TrainingArguments(**settings),
        train_dataset=data(),
        eval_dataset=data()[:4],
        optimizers=(optimizer, constant),
        callbacks=[*([callback] if callback is not None else []), *others],
    )
    if resume != "only make it":
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def rows(record):
    return repr(record.to_dicts())


@pytest.mark.parametrize(
    ("evaluates", "accumulate"),
    [(False, 1), (True, 3), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in [(False, 3), (True, 1)])],
)
def test_rows_signs_and_weights_are_those_of_a_plain_loop(accumulate, evaluates, tmp_path):
    path, other = tmp_path / "run.jsonl", tmp_path / "plain.jsonl"
    expected, record = plain(accumulate, every=1, gradients=True, path=other)
    callback = HuggingFaceCallback(log=lambda metrics, step: None, path=path, gradients=True)
    options = {"eval_strategy": "steps", "eval_steps": 1} if evaluates else {}
    trainer = train(callback, tmp_path, accumulate, **options)
    assert callback.record.steps == list(range(1, 12 // accumulate + 1))
    assert rows(callback.record) == rows(record)
    assert same_weights(trainer.model, expected)
    written = attemper.Record.read(path)
    assert rows(written) == rows(attemper.Record.read(other))
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    assert {step: numbers["loss"] for step, numbers in written.logged.items() if "loss" in numbers} == losses
    assert any("eval_loss" in numbers for numbers in written.logged.values()) == evaluates


@pytest.mark.parametrize("accumulate", [1, 3])
def test_clips_are_those_of_a_plain_loop(accumulate, tmp_path):
    expected, record, counts = clipped_by_hand(3.0, accumulate)
    assert sum(counts.values()) > 3
    seen = {}
    callback = HuggingFaceCallback(every=1, clip=3.0, log=lambda metrics, step: seen.update({step: metrics}))
    trainer = train(callback, tmp_path, accumulate)
    assert {step: metrics["attemper/clipped"] for step, metrics in seen.items()} == counts
    assert rows(callback.record) == rows(record)
    assert same_weights(trainer.model, expected)


def test_without_a_number_it_measures_when_the_trainer_logs(tmp_path):
    seen = {}
    callback = HuggingFaceCallback(log=lambda metrics, step: seen.update({step: metrics}))
    train(callback, tmp_path, logging_steps=5)
    assert list(seen) == callback.record.steps == [5, 10]
    assert rows(callback.record) == rows(plain(every=5)[1])
    assert sorted(seen[5]) == sorted(
        f"attemper/{name}"
        for name in (
            *("peak", "peak_p90", "logit_std", "evenness_p05", "saturated"),
            *("effective_keys", "heads_over_50", "level"),
        )
    )


def test_a_resumed_run_goes_on_with_the_trainer_s_numbers(tmp_path):
    _, record = plain(every=2)
    path = tmp_path / "run.jsonl"
    first = HuggingFaceCallback(every=2, path=path, log=lambda metrics, step: None)
    train(first, tmp_path, max_steps=5, save_strategy="steps", save_steps=5)
    assert first.record.steps == [2, 4]
    second = HuggingFaceCallback(every=2, path=path, log=lambda metrics, step: None)
    train(second, tmp_path, resume=str(tmp_path / "checkpoint-5"), max_steps=12)
    assert second.record.steps == [6, 8, 10, 12]
    assert rows(attemper.Record.read(path)) == rows(record)


def test_after_an_exception_the_context_lets_go_and_keeps_what_was_measured(tmp_path):
    before = state()
    model = Tiny()
    model.fails_at = 8  # the second micro-batch of the third step
    with pytest.raises(FloatingPointError), HuggingFaceCallback(every=1, log=lambda *_: None) as callback:
        train(callback, tmp_path, 3, model)
    assert state() == before
    # two whole steps, and what ran of the third
    assert callback.record.steps == [1, 2, 3]
    _, record = plain(3, every=1)
    assert rows(callback.record.filter(steps=[1, 2])) == rows(record.filter(steps=[1, 2]))
    assert {row["rows"] for row in callback.record.filter(steps=3).to_dicts()} == {12}


def test_without_the_context_the_next_training_or_the_garbage_collector_lets_go(tmp_path):
    before = state()
    model = Tiny()
    model.fails_at = 2
    callback = HuggingFaceCallback(every=1, log=lambda *_: None)
    with pytest.raises(FloatingPointError):
        train(callback, tmp_path, 1, model)
    train(callback, tmp_path, 1)  # the same callback begins anew
    assert state() == before
    assert callback.record.steps == list(range(1, 13))
    model.calls, model.fails_at = 0, 2
    with pytest.raises(FloatingPointError):
        train(callback, tmp_path, 1, model)
    del callback
    gc.collect()
    assert state() == before


def test_an_exception_between_steps_finds_nothing_attached(tmp_path):
    before = state()

    class Fails(TrainerCallback):
        def on_evaluate(self, args, state_, control, **rest):
            assert state() == before
            raise FloatingPointError

    with pytest.raises(FloatingPointError), HuggingFaceCallback(every=1, log=lambda *_: None) as callback:
        train(callback, tmp_path, others=[Fails()], eval_strategy="steps", eval_steps=2)
    assert callback.record.steps == [1, 2]


def test_a_finding_stops_the_run_after_a_checkpoint(tmp_path):
    model = Tiny()
    with torch.no_grad():
        model.blocks[0].packed.weight.mul_(30.0)
    callback = HuggingFaceCallback(every=1, log=lambda *_: None, stop_on="critical")
    trainer = train(callback, tmp_path, model=model, save_strategy="steps", save_steps=100)
    assert trainer.state.global_step < 12
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}").is_dir()
    assert callback.alerted
    kept = json.loads((tmp_path / f"checkpoint-{trainer.state.global_step}" / "trainer_state.json").read_text())
    state_of = kept["stateful_callbacks"]["HuggingFaceCallback"]
    again = HuggingFaceCallback.from_state(state_of)
    assert again.alerted == callback.alerted
    assert again.options.stop_on == "critical"


def test_a_logger_that_raises_does_not_stop_the_training(tmp_path, caplog):
    calls = []

    def broken(metrics, step):
        calls.append(step)
        raise ConnectionError("no route")

    callback = HuggingFaceCallback(every=1, log=broken)
    trainer = train(callback, tmp_path)
    assert trainer.state.global_step == 12
    assert calls == [1, 2, 3]
    said = [entry.getMessage() for entry in caplog.records if entry.name == "attemper"]
    assert sum("ConnectionError: no route" in words for words in said) == 1
    assert any("failed 3 times in a row" in words for words in said)


def test_attached_to_a_trainer_it_finds_its_writer(tmp_path):
    class Writer(TrainerCallback):
        tb_writer = type("SummaryWriter", (), {"add_scalar": lambda self, *given: seen.append(given)})()

    seen = []
    trainer = train(None, tmp_path, others=[Writer()], resume="only make it", logging_steps=4)
    callback = HuggingFaceCallback.attach(trainer, pictures=0)
    trainer.train()
    assert callback.record.steps == [4, 8, 12]
    assert {step for _, _, step in seen} == {4, 8, 12}


def test_every_head_in_the_trainer_s_log_and_in_a_checkpoint(tmp_path):
    seen = {}
    callback = HuggingFaceCallback(
        every=4, log=lambda metrics, step: seen.update({step: metrics}), signs=("entropy", "evenness"), heads=True
    )
    train(callback, tmp_path)
    for row in callback.record.to_dicts():
        for sign in ("entropy", "evenness"):
            assert seen[row["step"]][f"attemper/{sign}/{row['layer']}/head_{row['head']}"] == row[sign]
    state = json.loads(json.dumps(callback.state()))["args"]
    assert HuggingFaceCallback(**state).options.logged == callback.options.logged


def test_two_callbacks_for_one_model_are_an_error(tmp_path):
    two = [HuggingFaceCallback(every=1, log=lambda *_: None) for _ in range(2)]
    with pytest.raises(InputError, match=r"this model has a monitor already. Use one callback"), two[0]:
        train(two[1], tmp_path, others=[two[0]])
    two[1].close()


def test_numbers_that_go_nowhere_are_said_once(tmp_path, caplog):
    train(HuggingFaceCallback(), tmp_path, logging_steps=6)
    (said,) = [entry.getMessage() for entry in caplog.records if "no numbers are logged" in entry.getMessage()]
    assert "path='run.jsonl'" in said


def test_a_rank_of_several_is_told_how_to_join_them(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("attemper.integrations.huggingface.are_many", lambda: True)
    callback = HuggingFaceCallback(log=lambda *_: None)
    trainer = train(callback, tmp_path, logging_steps=6)
    assert [entry.getMessage() for entry in caplog.records if "to join all ranks" in entry.getMessage()]
    caplog.clear()
    trainer.remove_callback(callback)
    HuggingFaceCallback.attach(trainer, log=lambda *_: None)
    trainer.train()
    assert not [entry.getMessage() for entry in caplog.records if "to join all ranks" in entry.getMessage()]


def test_a_training_without_a_measured_step_ends_well(tmp_path, caplog):
    trainer = train(HuggingFaceCallback(every=500, log=lambda *_: None), tmp_path)
    assert trainer.state.global_step == 12
    (said,) = [entry.getMessage() for entry in caplog.records if entry.name == "attemper"]
    assert said == "attemper: no step was measured: every=500, but the last step was 12."


def test_a_target_may_be_made_first():
    seen = []
    assert HuggingFaceCallback(log=as_logger(lambda metrics, step: seen.append(step))).options.logger is not None
