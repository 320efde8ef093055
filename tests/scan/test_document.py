"""scan(): the document of every kind of model against its published schema, and what a Scan does with it."""

import json
import math
import sys

import jsonschema
import pytest
import torch
from torch import nn

import attemper
import zoo
from attemper.errors import InputError, MissingExtra
from attemper.scan import run as scanning
from attemper.scan.document import plain, schema
from attemper.scan.show.terminal import text
from close import in_float32, in_float64
from folders import tokenizer
from watched import Block, stack

VALID = jsonschema.Draft202012Validator(schema())
FOLDERS = ("bert", "gpt2", "llama", "t5", "vit", "whisper")


def check(document):
    errors = [f"{error.json_path}: {error.message}" for error in VALID.iter_errors(document)]
    assert errors == []
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_kind_of_folder_gives_a_valid_document(folder, name):
    found = attemper.scan(folder(name), what_if=["none", "x2"])
    check(found.to_dict())
    check(found.to_dict(attention=True))
    assert "attention" not in found.to_dict()
    assert len(found.document["what_if"]) == 2
    assert found.document["model"]["source"] == "folder"
    kinds = {layer["kind"] for layer in found.layers}
    assert kinds == ({"self", "cross"} if name in ("t5", "whisper") else {"self"})


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")  # torch's, of its own encoder
@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_model_of_the_zoo_gives_a_valid_document(name, nothing_is_left_behind):
    subject = zoo.make(name)
    found = attemper.scan(subject.model, subject.inputs)
    check(found.to_dict(attention=True))
    with attemper.watch(subject.model) as watch, torch.no_grad():
        subject.run()
    rows = watch.record.to_dicts()
    assert len(rows) == len(found.heads)
    for row, told in zip(rows, found.heads, strict=True):
        for sign in ("layer", "kind", "head", "peak", "entropy", "variance", "sum_p2"):
            assert told[sign] == row[sign]


def test_a_model_of_ones_own_is_left_as_it_was(nothing_is_left_behind):
    model = stack()
    model.train()
    model[1].eval()
    x = torch.randn(1, 9, 16, requires_grad=True)
    before = [part.training for part in model.modules()]
    found = attemper.scan(model, x)
    assert [part.training for part in model.modules()] == before
    assert torch.is_grad_enabled()
    assert found.document["model"] == {
        "name": "Sequential",
        "source": "object",
        "class": "Sequential",
        "type": None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": "float32",
        "sha256": None,
        "task": None,
    }
    assert [layer["layer"] for layer in found.layers] == ["0", "1"]
    assert {layer["scale"]["rule"] for layer in found.layers} == {"sqrt_dk"}
    assert found.layers[0]["scale"]["applied"] == in_float32(8**-0.5, terms=8)
    assert repr(found).startswith("Scan(Sequential: ")


@pytest.mark.parametrize("form", [tuple, dict])
def test_a_batch_may_be_positions_or_keywords(form):
    x = torch.randn(1, 9, 16)
    wanted = attemper.scan(stack(), x)
    given = (x,) if form is tuple else {"input": x}
    model = nn.Sequential(Block()) if form is tuple else Block()
    name = "x" if form is dict else "input"
    found = attemper.scan(model, {name: x} if form is dict else given)
    assert found.heads[0]["rows"] == wanted.heads[0]["rows"] == 9


@pytest.mark.usefixtures("float64")
def test_several_batches_are_run_one_by_one_and_merged():
    model = stack()
    batches = [torch.randn(1, length, 16) for length in (9, 12, 10)]
    found = attemper.scan(model, batches)
    alone = [attemper.scan(model, batch).heads for batch in batches]
    for index, head in enumerate(found.heads):
        rows = [heads[index] for heads in alone]
        assert head["rows"] == 31
        assert head["peak"] == max(row["peak"] for row in rows)
        mean = sum(row["entropy"] * row["rows"] for row in rows) / 31
        assert head["entropy"] == in_float64(mean)
        assert 0 < head["text_distance"] <= 1
        assert rows[0]["text_distance"] is None
    assert len(found.document["inputs"]) == 3


def test_texts_need_a_tokenizer_and_get_names():
    subject = zoo.make("bert")
    text = "the dog chased the ball because it was fast ."
    found = attemper.scan(subject.model, [text, "a cat sat on the mat"], tokenizer=tokenizer(), token="it")
    assert found.document["inputs"][0]["tokens"][7:9] == ["it", "was"]
    assert found.document["token"]["position"] == 7
    check(found.to_dict(attention=True))
    ids = {"input_ids": torch.tensor([[1, 5, 6, 2]])}
    named = attemper.scan(subject.model, ids, tokenizer=tokenizer())
    assert named.document["inputs"][0]["tokens"] == ["[CLS]", "the", "dog", "[SEP]"]
    assert named.document["inputs"][0]["special"] == [True, False, False, True]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((Block(), None), {}, "`batch` is missing. Pass what Block is called with"),
        ((Block(), []), {}, "`batch` must hold at least one"),
        ((Block(), 3), {}, "`batch` must be a dict, a tuple, a tensor, a text, or a list of them; got int"),
        ((7, torch.zeros(1)), {}, "`model` must be a torch.nn.Module, a folder, or None"),
        ((Block, torch.zeros(1)), {}, "`model` must be a torch.nn.Module, a folder, or None"),
        ((Block(), "the dog"), {}, "no tokenizer was given"),
        ((Block(), torch.zeros(1, 9, 16)), {"token": "it"}, "`token` needs the tokens of a text"),
        ((Block(), torch.zeros(1, 9, 16)), {"what_if": "nonee"}, "Did you mean 'none'?"),
        ((nn.Linear(4, 4), torch.zeros(1, 4)), {}, "scan(): found no attention call in Linear"),
    ],
)
def test_wrong_use_is_a_sentence(arguments, options, words, nothing_is_left_behind):
    with pytest.raises(InputError) as raised:
        attemper.scan(*arguments, **options)
    assert words in str(raised.value)


def test_a_model_of_ones_own_fails_with_its_own_error():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        attemper.scan(stack(), torch.zeros(1, 9, 17))


def test_nan_is_found_and_becomes_null():
    model = stack()
    with torch.no_grad():
        model[1].packed.weight.fill_(math.nan)
    found = attemper.scan(model, torch.randn(1, 9, 16))
    check(found.to_dict(attention=True))
    assert found.verdict["level"] == "diverging"
    assert found.findings[0]["name"] == "nan"
    assert found.findings[0]["layer"] == "1.packed"
    assert "its parameter weight holds NaN" in found.findings[0]["message"]
    assert found.heads[-1]["peak"] is None
    assert "NaN" in str(found)


@pytest.mark.usefixtures("float64")
def test_what_if_reaches_attempers_own_module():
    ours = attemper.MultiHeadAttention(64, 4, rule="sqrt_dmodel", batch_first=True)
    other = attemper.MultiHeadAttention(64, 4, rule="dk", batch_first=True)
    other.load_state_dict(ours.state_dict())
    x = torch.randn(1, 20, 64)
    found = attemper.scan(ours, (x, x, x), what_if=["dk"])
    check(found.to_dict())
    assert found.layers[0]["scale"]["rule"] == "sqrt_dmodel"
    wanted = attemper.scan(other, (x, x, x)).heads
    for row, head in zip(found.document["what_if"][0]["heads"], wanted, strict=True):
        assert row["entropy"] == in_float64(head["entropy"])


def test_a_bare_layer_is_called_the_model():
    found = attemper.scan(Block(), torch.randn(1, 9, 16) * 30)
    check(found.to_dict())
    assert found.layers[0]["layer"] == ""
    assert "(the model)" in str(found)


def test_plain_data_has_no_nan():
    assert plain({"a": [math.nan, (1.0, -math.inf)], "b": True, "c": None}) == {
        "a": [None, [1.0, None]],
        "b": True,
        "c": None,
    }


def test_files_by_suffix(folder, tmp_path):
    found = attemper.scan(folder("bert"))
    for suffix in (".html", ".json", ".csv", ".parquet"):
        found.write(tmp_path / f"scan{suffix}")
    assert json.loads((tmp_path / "scan.json").read_text(encoding="utf-8")) == found.to_dict()
    found.write(tmp_path / "whole.json", attention=True)
    assert json.loads((tmp_path / "whole.json").read_text(encoding="utf-8")) == found.to_dict(attention=True)
    lines = (tmp_path / "scan.csv").read_text().splitlines()
    assert len(lines) == 1 + len(found.heads)
    assert lines[0].split(",") == list(found.heads[0])
    from pyarrow import parquet

    assert parquet.read_table(tmp_path / "scan.parquet").to_pylist() == found.heads
    page = (tmp_path / "scan.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    with pytest.raises(InputError, match="must end in"):
        found.write(tmp_path / "scan.xls")


def test_parquet_names_its_extra(folder, tmp_path, monkeypatch):
    found = attemper.scan(folder("bert"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'attemper\[record\]'"):
        found.write(tmp_path / "scan.parquet")


def test_what_strangers_write_steers_no_terminal(folder):
    found = attemper.scan(folder("bert"), "the dog \x1b[31m \x07 \u202e sat")
    document = json.loads(json.dumps(found.document))
    for hostile in ("\x1b[2J", "\x9b31m", "\u202e", "\u2028", "</pre><script>"):
        document["model"]["name"] = document["layers"][0]["layer"] = f"evil{hostile}"
        document["notes"] = [f"a note {hostile}"]
        shown = text(document)
        assert not any(letter in shown for letter in "\x1b\x9b\u202e\u2028\x07")
    assert "&lt;b&gt;" in attemper.scan(folder("bert"), "the <b>")._repr_html_()


@pytest.mark.parametrize("name", FOLDERS)
def test_the_table_fits_and_says_the_verdict_early(folder, name):
    found = attemper.scan(folder(name), what_if="none")
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(found.verdict["level"].upper()) for line in lines[:5])
    for width in (40, 60, 120):
        assert max(map(len, text(found.document, width).splitlines())) <= width


def test_many_layers_are_counted_and_the_worst_are_shown():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(30)))
    with torch.no_grad():
        model[27].packed.weight *= 30
    found = attemper.scan(model, torch.randn(1, 9, 16))
    shown = str(found)
    assert "and 14 more layers" in shown
    assert any(line.startswith("27 ") for line in shown.splitlines())


def test_ctrl_c_in_python_is_ctrl_c(monkeypatch, nothing_is_left_behind):
    def stop(model, batch):
        raise KeyboardInterrupt

    monkeypatch.setattr(scanning, "call", stop)
    with pytest.raises(KeyboardInterrupt):
        attemper.scan(Block(), torch.randn(1, 9, 16))


def test_a_batch_that_does_not_fit_says_who_called():
    with pytest.raises(RuntimeError) as raised:
        attemper.scan(torch.nn.Linear(4, 4), torch.randn(2, 3))
    assert raised.value.__notes__ == ["scan(): this was raised while calling Linear with the batch given."]
