"""At 40, 60, 80 and 120 columns: no line of a scan is wider, no column is missing, and no name breaks inside a word."""

import io
import json
import re

import pytest
from rich.console import Console

import attemper
from attemper import env
from attemper._display import print_table
from attemper.scan.result import Scan
from attemper.scan.show.format import broken, short_names
from attemper.scan.show.terminal import SHORT, TITLES, text
from attemper_lab import experiment
from attemper_lab.claims import show
from attemper_lab.claims.cards import Card
from attemper_lab.claims.claims import CLAIMS, NUMBER, JudgedClaim
from attemper_lab.engine import render

TEXT = "the dog chased the ball because it was fast ."
WIDTHS = [40, 60, 80, 120]


@pytest.fixture(scope="module")
def documents(folder):
    found = {name: attemper.scan(folder(name), TEXT, token="it", what_if=["none"]) for name in ("bert", "t5", "gpt2")}
    return {name: one.document for name, one in found.items()}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
def test_a_scan_fits_and_loses_nothing(documents, name, width):
    document = documents[name]
    shown = text(document, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown.replace("all attention …", "").replace("all attention\n…", "")
    words = shown.split()
    for row in (rows[0] for rows in _by_layer(document).values()):
        for sign, digits in (("peak", 1), ("effective_keys", 1)):
            values = [one[sign] for one in _by_layer(document)[row["layer"], row["kind"]]]
            value = max(values) if sign == "peak" else sum(values) / len(values)
            assert f"{value:.{digits}f}" in words, (row["layer"], sign)
    assert (
        sum(len(word) for word in words if set(word) <= set("▁▂▃▄▅▆▇█")) == len(document["heads"]) + 2
    )  # and the legend's
    assert "SelfAtt\n" not in shown
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    scan = Scan.__new__(Scan)
    scan.document = document
    console.print(scan)
    assert [line.rstrip() for line in console.file.getvalue().rstrip().splitlines()] == shown.splitlines()


def _by_layer(document):
    found = {}
    for row in document["heads"]:
        found.setdefault((row["layer"], row["kind"]), []).append(row)
    return found


def test_names_keep_what_tells_layers_apart():
    def named(*layers):
        return list(short_names(layers).values())

    bert = [(f"encoder.layer.{n}.attention.self", "self") for n in (0, 1)]
    assert named(*bert) == ["0", "1"]
    t5 = [
        ("encoder.block.0.layer.0.SelfAttention", "self"),
        ("encoder.block.1.layer.0.SelfAttention", "self"),
        ("decoder.block.0.layer.0.SelfAttention", "self"),
        ("decoder.block.1.layer.0.SelfAttention", "self"),
        ("decoder.block.0.layer.1.EncDecAttention", "cross"),
        ("decoder.block.1.layer.1.EncDecAttention", "cross"),
    ]
    assert named(*t5) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.0 cross", "decoder.1 cross"]
    assert named(("", "self")) == ["(the model)"]
    assert named(("a.b", "self"), ("a.b", "cross")) == ["a.b", "a.b cross"]
    assert named(("a\x1b.0", "self"), ("b.0.c", "self")) == ["a�", "b"]


def test_a_name_breaks_behind_its_dots():
    assert broken("in encoder.block.0.SelfAttention it", 16) == "in encoder.block.0.\nSelfAttention it"
    assert broken("no-dots-in-this-word here", 6) == "no-dots-in-this-word here"


def shown(claim):
    """The names of the numbers that a claim's line shows."""
    return [name for name, _ in NUMBER.findall(claim.shown)]


@pytest.mark.parametrize("width", WIDTHS)
def test_what_else_is_printed_fits(width):
    verdicts = ("holds", "holds with a condition", "false", "not decided", "not run")
    judged = [
        JudgedClaim(claim, verdicts[at % 5], dict.fromkeys(shown(claim), 1.0), "where " * 20, {"another": 2.0})
        for at, claim in enumerate(CLAIMS)
    ]
    card = Card("A question " * 9, "An answer " * 12, "1.0 " * 30)
    worked = experiment("worked")
    rows = worked.run()
    for what in (
        lambda console: [show.line(one, console) for one in judged],
        lambda console: show.closing(judged, console),
        lambda console: [show.story(one, console) for one in judged],
        lambda console: show.cards([card] * 12, console),
        render.listing,
        lambda console: render.show(worked, rows, console),
        lambda console: console.print(env.table(env.describe())),
    ):
        console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
        what(console)
        lines = console.file.getvalue().splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width
        assert "…" not in "".join(lines).replace("cuda:1, …", "")


def test_a_table_that_does_not_fit_is_a_list_with_every_number():
    table = render.expectations(experiment("worked").verdict(experiment("worked").run()).expectations)
    narrow, wide = (Console(file=io.StringIO(), width=width, color_system=None) for width in (40, 120))
    for console in (narrow, wide):
        print_table(console, table)
    numbers = {word for word in wide.file.getvalue().split() if word.lstrip("±").replace(".", "").isdigit()}
    assert numbers <= set(narrow.file.getvalue().split())


def summed(document):
    """The line about all heads."""
    return text(document, 200).split("\n\n")[1].splitlines()[1]


def test_the_heads_of_a_scan_add_up(documents):
    for document in documents.values():
        line, heads = summed(document), len(document["heads"])
        numbers = [int(word) for word in line.split() if word.isdigit()]
        if line.startswith("All "):
            assert numbers == [heads]
        else:
            first, of, *others = numbers
            assert of == heads == first + sum(others), line
        assert all(one["scale"]["std_message"].startswith("The logit std is ") for one in document["layers"])
        assert json.dumps(document)


@pytest.mark.parametrize(
    ("heads", "found", "line"),
    [
        (8, 8, "All 8 heads are in the findings below."),
        (8, 5, "5 of 8 heads are in the findings below; 3 mix several tokens, which is normal."),
        (8, 1, "1 of 8 heads is in the findings below; 7 mix several tokens, which is normal."),
        (8, 0, "All 8 heads mix several tokens, which is normal."),
        (1, 0, "The only head mixes several tokens, which is normal."),
    ],
)
def test_what_is_said_of_all_heads_is_a_sentence(documents, heads, found, line):
    document = {name: part for name, part in documents["bert"].items() if name not in ("token", "what_if")}
    document |= {"heads": document["heads"][:heads], "findings": []}
    about = {"name": "peak", "fault": None, "level": "note", "title": "large logits", "message": "", "advice": ""}
    for row in document["heads"][:found]:
        document["findings"].append({**about, "layer": row["layer"], "kind": row["kind"], "head": row["head"]})
    assert summed(document) == line


def test_one_of_anything_is_not_called_several(documents):
    document = documents["bert"]
    one = {**document, "inputs": [{**document["inputs"][0], "length": 1}], "layers": document["layers"][:1]}
    one["layers"] = [{**one["layers"][0], "heads": 1}]
    shown = text({**one, "notes": ["a"] * 7})
    for words in ("· 1 token\n", "1 layer, 1 head of 8: applies ", "and 1 more note; "):
        assert words in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_the_legend_explains_the_columns_in_their_order(documents, width):
    """By the titles that are shown, each with its long form where that is shorter."""
    lines = text(documents["bert"], width).splitlines()
    titles = re.split("  +", next(line for line in lines if line.startswith("layer ") and "peak" in line).strip())[1:]
    titles += [] if titles[-1] == "heads" else ["heads"]
    assert titles in ([*TITLES, "heads"], [*SHORT, "heads"])
    explained = [title for line in lines for title in titles if re.match(rf"{re.escape(title)}( \(.*\))?: ", line)]
    assert explained == titles
