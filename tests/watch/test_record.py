"""Record: rows in and out of every form, exact merging, and files that survive a kill."""

import copy
import csv
import json
import math
import pickle
import signal
import sys
import threading

import pytest
import torch
from torch import nn

import attemper
import forked
from attemper.errors import InputError, MissingExtra
from attemper.heads import COLUMNS, BlockSummary
from attemper.watch.call import UnfoldedRows
from attemper.watch.compiled.reading import Compiled
from attemper.watch.record.buffer import Transfer
from attemper.watch.record.jsonl import HEADER
from attemper.watch.record.sums import LayerSums, _leave_large_block
from close import in_float64


@pytest.fixture(scope="module")
def record():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
    with attemper.watch(model, gradients=True) as watch:
        for step in range(3):
            model(torch.randn(2, 9, 16)).square().mean().backward()
            if step < 2:
                watch.step()
    return watch.record


def same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first.to_dicts(), second.to_dicts(), strict=True):
        assert list(a) == list(b)
        for name, value in a.items():
            assert b[name] == (in_float64(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(("owner", "name"), [(Transfer, "wait"), (Compiled, "take_over")])
def test_a_reader_in_another_thread_waits_while_a_step_ends(monkeypatch, owner, name):
    model, original, readers, found = nn.Sequential(Answers(16, 2)), getattr(owner, name), [], []
    if owner is Compiled:
        attemper.instrument(model)

    def read():
        found.append((watch.record.steps, len(watch.record)))

    def meanwhile(self, *args):
        if not readers:
            readers.append(threading.Thread(target=read))
            readers[0].start()
            readers[0].join(0.3)
            assert readers[0].is_alive()
        return original(self, *args)

    with attemper.watch(model) as watch:
        model(torch.randn(1, 9, 16))
        monkeypatch.setattr(owner, name, meanwhile)
        watch.step()
        len(watch.record)
        readers[0].join()
    assert found == [([0], 2)]


class Answers(attemper.MultiHeadAttention):
    """With the attention alone as its answer."""

    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda record: pickle.loads(pickle.dumps(record))])
def test_copies(record, copied):
    same(copied(record), record)


def test_rows_of_another_stream_are_waited_for():
    """A step may end on another CUDA stream than the one that computes its rows, whose memory must not be used again before."""

    class Stream:
        def __init__(self):
            self.waited, self.reads = [], []

        def wait_stream(self, other):
            self.waited.append(other)

    class Sign:
        def record_stream(self, stream):
            stream.reads.append(self)

    lse, keep, one, other = Sign(), Sign(), Stream(), Stream()
    rows = UnfoldedRows((), (1, 1, 1), (lse,), keep, one)
    rows.wait_on(one)
    assert not one.waited
    rows.wait_on(other)
    assert other.waited == [one]
    assert other.reads == [lse, keep]


def test_a_block_is_left_by_the_few_that_still_use_it():
    """Layers with many calls in a step have merged their rows of the block; it must not be kept for the others."""
    columns, block = (*COLUMNS, "peak"), torch.rand(400, len(COLUMNS) + 1, dtype=torch.float64)
    one, many = LayerSums(None), LayerSums(None)
    one.summary = BlockSummary(columns, block, 8, 4)
    many.summary = BlockSummary(columns, block, 12, 4).merge(BlockSummary(columns, block, 16, 4))
    expected = one.summary.sums.clone()
    _leave_large_block([one, many], block)
    assert one.summary.block.shape == (4, block.shape[1])
    assert torch.equal(one.summary.sums, expected)
    whole = [LayerSums(None, BlockSummary(columns, block, first, 100)) for first in range(0, 400, 100)]
    _leave_large_block(whole, block)
    assert all(layer.summary.block is block for layer in whole)


def test_shape_and_names(record):
    assert repr(record) == "Record(3 steps, 2 layers, 12 rows)"
    assert record.steps == [0, 1, 2]
    assert record.layers == ["layers.0.self_attn", "layers.1.self_attn"]
    assert set(record.signs) > {
        "visible",
        "mean",
        "variance",
        "peak",
        "lse",
        "entropy",
        "sum_p2",
        "evenness",
        "grad_k_rms",
    }
    assert list(record.to_dicts()[0])[:4] == ["step", "layer", "kind", "head"]


def test_filter(record):
    assert len(record.filter(steps=1)) == 4
    assert record.filter(steps=[0, 2]).steps == [0, 2]
    assert record.filter(layers="*.1.*").layers == ["layers.1.self_attn"]
    assert list(record.filter(layers="*.1.*").info) == [("layers.1.self_attn", "self")]
    assert record.filter(layers=["layers.1*", "layers.0.self_attn"]).layers == record.layers
    assert record.filter(layers=lambda name: "0" in name).layers == ["layers.0.self_attn"]
    one = record.filter(heads=1, steps=2, layers="layers.0*")
    assert one.to_dicts() == [row for row in record.to_dicts() if (row["step"], row["head"]) == (2, 1)][:1]
    assert len(record.filter(kind="cross")) == len(record.filter(steps=7)) == 0


UNFIT = {
    "a layer that is not there": (
        {"layers": "layer.0.self_attn"},
        r"no layer matches 'layer\.0\.self_attn'\. Did you mean 'layers\.0\.self_attn'\? The layers are: 'layers\.0\.s",
    ),
    "a layer far from all": (
        {"layers": "typo"},
        r"no layer matches 'typo'\. The layers are: 'layers\.0\.s",
    ),
    "one of two layers": ({"layers": ["layers.0*", "typo"]}, r"no layer matches 'typo'\."),
    "a layer by number": ({"layers": 3}, r"`layers` must be names or a function; got 3\. Use '\*' for all\."),
    "a kind": ({"kind": "corss"}, r"`kind` must be 'self' or 'cross'; got 'corss'\. Leave it out for both\."),
    "a head": (
        {"heads": [2, -1]},
        r"`heads` must be some of 0 … 1, which this record has; got \[2, -1\]\. Leave it out for all\.",
    ),
    "a head in words": ({"heads": "1"}, r"`heads` must be a whole number or several; got '1'\. Use heads=\[0, 1\]\."),
    "half a step": ({"steps": 0.5}, r"`steps` must be a whole number or several; got 0\.5\. Use steps=\[0, 1\]\."),
}


@pytest.mark.parametrize(("options", "sentence"), UNFIT.values(), ids=UNFIT)
def test_a_filter_that_can_fit_nothing_says_so(record, options, sentence):
    with pytest.raises(InputError, match=rf"^Record\.filter\(\): {sentence}"):
        record.filter(**options)
    assert len(attemper.Record().filter(layers="any", heads=3)) == 0


def test_merge_is_exact(record):
    # in float64: a product of fewer rows may be rounded differently
    model = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(4, 9, 16, dtype=torch.float64)

    def watched(*parts):
        with attemper.watch(model) as watch:
            for part in parts:
                model(part, part, part)
        return watch.record

    same(watched(x[:1]).merge(watched(x[1:3]), watched(x[3:])), watched(x))
    same(record.filter(steps=[1, 2]).merge(record.filter(steps=0)), record)
    with attemper.watch(model, signs="entropy") as few:
        model(x, x, x)
    with pytest.raises(InputError, match=r"^merge\(\): both records must hold the same signs"):
        few.record.merge(watched(x))


def test_pandas_and_arrow(record):
    frame = record.to_pandas()
    assert frame.shape == (12, len(record.to_dicts()[0]))
    assert frame.groupby("layer", sort=False)["entropy"].mean().index.tolist() == record.layers
    table = record.to_arrow()
    assert table.column_names == list(frame.columns)
    assert table["entropy"].to_pylist() == frame["entropy"].tolist()
    assert attemper.Record().to_pandas().empty
    assert attemper.Record().to_arrow().num_rows == 0


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files_there_and_back(record, tmp_path, suffix):
    path = tmp_path / f"record.{suffix}"
    record.write(path)
    same(attemper.Record.read(path), record)
    assert attemper.Record.read(path).info == record.info
    assert attemper.Record.read(str(path)).filter(steps=0).merge(record.filter(steps=1)).steps == [0, 1]


def test_a_table_of_the_rows(record, tmp_path):
    path = tmp_path / "rows.csv"
    record.write(path)
    with open(path, newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    names = ("layer", "kind")
    assert repr([{name: one if name in names else float(one) for name, one in row.items()} for row in found]) == repr(
        [{name: one if name in names else float(one) for name, one in row.items()} for row in record.to_dicts()]
    )
    with pytest.raises(
        InputError, match=r"'.*rows.csv' is a table of rows, without the info and notes of a record\. Read the"
    ):
        attemper.Record.read(path)
    attemper.Record().write(path)
    assert path.read_text(encoding="utf-8") == "step,layer,kind,head\n"


def test_a_file_holds_what_json_cannot_say(tmp_path):
    """A head without rows has no mean, its peak is -inf; NaN and infinities of a diverging model stay what they are."""
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        model.in_proj_bias[:8] = math.nan  # head 0
    x = torch.randn(1, 4, 16)
    with attemper.watch(model) as watch:
        model(x, x, x)
        watch.step()
        watch.rows(torch.zeros(1, 4, dtype=torch.bool))
        model(x, x, x)
    path = tmp_path / "odd.jsonl"
    watch.record.write(path)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    rows = attemper.Record.read(path).to_dicts()
    assert math.isnan(rows[0]["entropy"])
    assert rows[0]["rows"] == 4
    assert not math.isnan(rows[1]["entropy"])
    assert (rows[2]["rows"], rows[2]["peak"]) == (0, -math.inf)
    same(attemper.Record.read(path), watch.record)


def test_appending_to_a_file(record, tmp_path):
    path = tmp_path / "run.jsonl"
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)
    for start in (0, 4):  # a run, and the same run resumed
        with attemper.watch(model, path=path, every=2, start=start) as watch:
            for _ in range(4):
                model(x, x, x)
                watch.step()
    found = attemper.Record.read(path)
    assert found.steps == [0, 2, 4, 6]
    assert found.info == watch.record.info
    assert path.read_text().count('"schema"') == 2  # each run opens with it


def test_a_cut_line_is_left_out_and_it_is_said(record, tmp_path):
    path = tmp_path / "cut.jsonl"
    record.write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with (
        pytest.warns(
            UserWarning, match=r"cut\.jsonl: the last line was cut short and is left out; the 13 before it are"
        ),
        pytest.warns(UserWarning, match=r"cut\.jsonl: step 2 was cut short, with 3 of its 4 rows, and is left out\.$"),
    ):
        found = attemper.Record.read(path)
    assert (found.steps, len(found)) == ([0, 1], 8)
    assert "cut short" in found.notes[0]
    # whoever goes on writing starts on a line of its own, and the step that was cut is named still
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)
    with attemper.watch(model, path=path, start=9):
        model(x, x, x)
    with pytest.warns(UserWarning, match="step 2 was cut short, with 3 of its 4 rows"):
        found = attemper.Record.read(path)
    assert found.steps == [0, 1, 9]
    assert found.notes == ["cut.jsonl: step 2 was cut short, with 3 of its 4 rows, and is left out."]


KILLED = """
import os, signal, threading, time, torch, attemper


def kill():
    while not os.path.exists(argv[0]) or os.stat(argv[0]).st_size < 200_000:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


threading.Thread(target=kill, daemon=True).start()
torch.manual_seed(0)
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with attemper.watch(model, optimizer=optimizer, path=argv[0], gradients=True) as watch:
    while True:
        model(torch.randn(2, 9, 16)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.filterwarnings("ignore:.*was cut short.*:UserWarning")
def test_a_kill_in_the_middle_leaves_a_readable_record(tmp_path):
    path = tmp_path / "killed.jsonl"
    forked.run(KILLED, [(path,)], tmp_path, expected=signal.SIGKILL)
    found = attemper.Record.read(path)
    assert len(found.steps) > 10
    assert found.steps == list(range(len(found.steps)))
    assert all(len(found.filter(steps=step)) == 4 for step in found.steps)


SENTENCES = {
    "no file": ("gone.jsonl", None, r"Record\.read\(\): there is no file '.*gone\.jsonl'\."),
    "another schema": (
        "other.jsonl",
        '{"schema": "attemper.record", "version": 2}\n',
        r"has schema version 2; this attemper reads version 1\. Read it with the version of attemper that wrote it",
    ),
    "not a record": ("text.jsonl", '{"loss": 1}\n', r"is not a record of attemper: .* schema"),
    "empty": ("empty.jsonl", "", r"is empty\. If the run has just begun, try again"),
}


@pytest.mark.parametrize(("name", "content", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_what_a_bad_file_gets(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=sentence):
        attemper.Record.read(tmp_path / name)


def test_parquet_of_another_version(record, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = record.to_arrow().replace_schema_metadata({"attemper.record": json.dumps({**HEADER, "version": 7})})
    parquet.write_table(table, tmp_path / "seven.parquet")
    with pytest.raises(InputError, match="has schema version 7"):
        attemper.Record.read(tmp_path / "seven.parquet")


def test_without_pyarrow_or_pandas_the_pip_line_is_given(record, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    line = r"Type pip install 'attemper\[record\]'\.$"
    (tmp_path / "there.parquet").write_bytes(b"PAR1")
    for call in (
        record.to_pandas,
        record.to_arrow,
        lambda: record.write(tmp_path / "record.parquet"),
        lambda: attemper.Record.read(tmp_path / "there.parquet"),
    ):
        with pytest.raises(MissingExtra, match=line):
            call()


def test_where_a_record_can_go(record, tmp_path):
    with pytest.raises(
        InputError,
        match=r"^Record\.write\(\): `path` must end in \.jsonl, \.parquet or \.csv; got 'a\.txt'\. Use 'run\.jsonl'",
    ):
        record.write(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"^Record\.write\(\): there is no folder '.*no'.* Make it first\.$"):
        record.write(tmp_path / "no" / "a.jsonl")


def test_html(record):
    page = record._repr_html_()
    assert page.count("<tr>") == 3  # a head and two layers, of the last step
    assert "step 2" in page
    assert "evenness" in page
    assert "layers.1.self_attn" in page
    assert "nan" not in page.split("title")[0]
    assert attemper.Record()._repr_html_() == "<p>Record(0 steps, 0 layers, 0 rows)</p>"
