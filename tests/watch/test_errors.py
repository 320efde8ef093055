"""What bad input gets from watch(): one exact sentence each (sentences.json)."""

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import InputError
from attemper.watch.observer import FOLLOWS
from snapshots import Sentences, assert_told

KEPT = Sentences("watch")
MODEL = nn.MultiheadAttention(16, 2, batch_first=True)
X = torch.randn(1, 5, 16)

SENTENCES = {
    "not a model": {"model": lambda x: x},
    "a class": {"model": nn.Linear},
    "every 0": {"every": 0},
    "every half": {"every": 0.5},
    "optimizer": {"optimizer": MODEL},
    "sign": {"signs": ("entorpy",)},
    "no sign": {"signs": ()},
    "start as text": {"start": "3"},
    "start below 0": {"start": -1},
    "start half": {"start": 1.5},
    "gradients": {"gradients": "yes"},
    "replace": {"replace": 1},
    "path": {"path": 3},
    "suffix": {"path": "run.csv"},
    "examiners": {"examiners": [3]},
    "folder": {"path": "no/run.jsonl"},
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_sentence(case):
    options = {"model": MODEL, **SENTENCES[case]}
    with pytest.raises(InputError) as error:
        attemper.watch(options.pop("model"), **options)
    assert_told(str(error.value), "watch", *SENTENCES[case])
    KEPT.compare("watch", case, str(error.value))


def test_the_file_has_these_sentences_and_no_other():
    KEPT.assert_cases("watch", SENTENCES)


def test_an_unknown_kernel():
    sentence = r"^watch\(\): unknown kernel 'blockwize'\. Did you mean 'blockwise'\? Known: 'auto', .*'reference'"
    with pytest.raises(InputError, match=sentence):
        attemper.watch(MODEL, kernel="blockwize")


def test_a_model_without_attention():
    with pytest.raises(InputError) as error, attemper.watch(nn.Linear(16, 16)) as watch:
        watch.model(X)
    assert str(error.value) == f"watch(): found no attention call in Linear; {FOLLOWS}."


def test_it_is_said_at_the_first_step_and_not_after_hours():
    watch = attemper.watch(nn.Linear(16, 16))
    watch.__enter__().model(X)
    with pytest.raises(InputError, match="found no attention call in Linear") as error:
        watch.step()
    watch.__exit__(error.type, error.value, None)


def test_a_model_that_was_not_called():
    with pytest.raises(InputError) as error, attemper.watch(MODEL):
        MODEL.forward(X, X, X)
    assert str(error.value) == (
        "watch(): MultiheadAttention was not called inside the block. Call model(…), and not model.forward(…)."
    )


def test_the_model_s_own_error_comes_first():
    with pytest.raises(ZeroDivisionError), attemper.watch(nn.Linear(16, 16)):
        1 / 0  # noqa: B018


def test_a_watch_is_used_in_a_with_statement():
    watch = attemper.watch(MODEL)
    with pytest.raises(
        InputError, match=r"^watch\.step\(\): the watch is not open\. Call it inside `with attemper\.watch"
    ):
        watch.step()
    with watch:
        MODEL(X, X, X)
        with pytest.raises(InputError, match=r"^watch\(\): this watch is open already"):
            watch.__enter__()


def test_steps_that_never_end_are_noticed():
    watch = attemper.watch(MODEL, every=50).__enter__()
    for _ in range(3):
        MODEL(X, X, X)
    sentence = r"every=50, but no step ended, so all 3 passes count as one\. Call watch\.step\(\)"
    with pytest.warns(UserWarning, match=sentence):
        watch.__exit__(None, None, None)


def test_rows_must_be_a_mask():
    sentence = (
        r"^watch\.rows\(\): `valid_tokens` must be a boolean tensor \(B, L\), True for a real token; got torch.int64"
    )
    with attemper.watch(MODEL) as watch:
        MODEL(X, X, X)
        with pytest.raises(InputError, match=sentence):
            watch.rows(torch.ones(1, 5, dtype=torch.int64))
        with pytest.raises(InputError, match="got list"):
            watch.rows([True])


def test_a_record_of_another_schema_is_not_appended_to(tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_text('{"schema": "attemper.record", "version": 0}\n')
    with pytest.raises(
        InputError, match=r"^watch\(\): '.*old\.jsonl' has schema version 0; this attemper reads version 1\."
    ):
        attemper.watch(MODEL, path=path)
    assert path.read_text().count("\n") == 1


def test_data_parallel_is_refused():
    parallel = nn.DataParallel(MODEL)
    parallel.device_ids = [0, 1]
    with pytest.raises(InputError, match=r"nn\.DataParallel runs .*copies of the model.* Use Distr"):
        attemper.watch(parallel)
