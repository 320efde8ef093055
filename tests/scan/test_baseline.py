"""What changed since an older scan: found where something did, nothing where nothing did, and any file is survived."""

import copy
import json

import pytest

import attemper
from attemper.errors import InputError
from attemper.scan.command import fails
from attemper.scan.document import SCHEMA
from attemper.scan.show import baseline
from attemper.scan.show.terminal import text
from close import in_float32


@pytest.fixture(scope="module")
def document(folder):
    found = attemper.scan(folder("bert"), "the dog chased the ball because it was fast .")
    return json.loads(json.dumps(found.to_dict()))


@pytest.fixture
def changed(document):
    return copy.deepcopy(document)


def test_the_same_scan_has_not_changed(document):
    found = baseline.compare(document, copy.deepcopy(document), "old.json")
    assert found == {
        "file": "old.json",
        "created": document["created"],
        "differences": [],
        "new": [],
        "worse": [],
        "levels": [],
        "gone": [],
        "uncompared": [],
        "scales": [],
        "factor": 1.5,
        "compared": len(document["heads"]),
        "moved": [],
    }


def test_findings_are_new_or_gone(document, changed):
    one = {
        **dict.fromkeys(("fault", "head", "value", "threshold")),
        "name": "peak",
        "level": "warn",
        "layer": "a",
        "kind": "self",
        "source": "",
        "message": "",
        "advice": "",
    }
    changed["findings"].insert(0, one)
    assert baseline.compare(document, changed, "old")["new"] == [one]
    assert baseline.compare(changed, document, "old")["gone"] == [one]
    worse = {**one, "level": "error"}
    found = baseline.compare(changed, {**changed, "findings": [worse, *changed["findings"][1:]]}, "old")
    assert (found["new"], found["gone"], found["worse"]) == ([], [], [worse])
    assert found["levels"] == [{"before": one, "after": worse}]
    better = baseline.compare({**changed, "findings": [worse, *changed["findings"][1:]]}, changed, "old")
    assert (better["new"], better["worse"]) == ([], [])  # nothing that a ratchet fails on
    assert better["levels"] == [{"before": worse, "after": one}]


def test_a_ratchet_fails_on_what_is_new_alone(document, changed):
    one = {**dict.fromkeys(("fault", "head")), "name": "peak", "layer": "a", "kind": "self"}
    for before, after, level, ends in (
        ("error", "error", "note", False),
        ("error", "warn", "note", False),
        ("warn", "error", "error", True),
        ("warn", "error", "critical", False),
        (None, "error", "warn", True),
        ("error", None, "note", False),
    ):
        old, new = ({**document, "findings": [{**one, "level": at}] if at else []} for at in (before, after))
        new["baseline"] = baseline.compare(old, new, "old")
        assert bool(fails(new, level)) == ends, (before, after)
        assert bool(fails({**new, "baseline": {**new["baseline"], "worse": []}}, level)) is False


@pytest.mark.parametrize("lost", ["no heads", "null"])
def test_heads_without_numbers_are_not_said_to_be_as_before(document, changed, lost):
    count = len(document["heads"])
    changed["heads"] = (
        [] if lost == "no heads" else [{**row, **dict.fromkeys(baseline.MOVING)} for row in changed["heads"]]
    )
    found = baseline.compare(changed, document, "old")
    assert found["compared"] == 0
    assert found["differences"] == [f"the older scan has no signs for {count} of {count} heads: they are not compared."]
    shown = text({**document, "baseline": found})
    assert "signs were not compared" in shown
    assert "no sign moved" not in shown


def test_a_renamed_folder_is_the_same_model(document, changed):
    changed["model"]["name"] = "renamed"
    assert baseline.compare(document, changed, "old")["differences"] == []
    changed["model"]["sha256"] = None
    assert "the older scan calls the model tiny-bert" in baseline.compare(document, changed, "old")["differences"][0]


def test_signs_that_moved_past_the_factor_are_told_largest_first(document, changed):
    first, second, third = changed["heads"][:3]
    first["peak"] = document["heads"][0]["peak"] * 2
    second["effective_keys"] = document["heads"][1]["effective_keys"] / 4
    third["peak"] = document["heads"][2]["peak"] * 1.4
    moved = baseline.compare(document, changed, "old")["moved"]
    assert [(one["head"], one["sign"], one["times"]) for one in moved] == [
        (1, "effective_keys", in_float32(0.25, terms=8)),
        (0, "peak", in_float32(2.0, terms=8)),
    ]


def test_nearly_nothing_that_doubles_has_not_moved(document, changed):
    document = copy.deepcopy(document)
    document["heads"][0]["peak"], changed["heads"][0]["peak"] = 0.01, 0.1
    document["heads"][1]["peak"], changed["heads"][1]["peak"] = None, 5.0
    document["heads"][2]["peak"], changed["heads"][2]["peak"] = -1.0, 5.0
    assert baseline.compare(document, changed, "old")["moved"] == []


def test_a_scale_that_changed_is_told(document, changed):
    changed["layers"][1]["scale"]["applied"] = 1.0
    (found,) = baseline.compare(document, changed, "old")["scales"]
    assert found == {
        "layer": document["layers"][1]["layer"],
        "kind": "self",
        "before": document["layers"][1]["scale"]["applied"],
        "after": 1.0,
    }


def test_why_two_scans_may_differ_is_said(document, changed):
    changed["model"] |= {"sha256": "0" * 64, "dtype": "float16"}
    changed["inputs"][0]["text"] = "a cat"
    changed["torch"] = "9.9"
    message = baseline.compare(document, changed, "old")["differences"]
    assert message == [
        "the weights have changed since.",
        "the older scan ran in float32, this one in float16.",
        "the older scan used other texts: scales and findings at warn or above are compared, notes and signs are not.",
        f"the older scan was made with torch {document['torch']}, this one with 9.9.",
    ]
    changed["model"]["name"] = "another"
    assert "is of another model: tiny-bert (BertModel)." in baseline.compare(document, changed, "old")["differences"][0]


def test_of_other_texts_only_what_is_wrong_is_compared(document, changed):
    one = dict.fromkeys(("fault", "head", "value", "threshold")) | {"layer": "a", "kind": "self", "name": "sink"}
    changed["inputs"][0]["text"] = "a cat"
    changed["heads"][0]["peak"] = document["heads"][0]["peak"] * 9
    changed["layers"][1]["scale"]["applied"] = 1.0
    changed["findings"] = [
        {**one, "level": "healthy"},
        {**one, "level": "note"},
        {**one, "name": "peak", "level": "warn"},
    ]
    found = baseline.compare({**document, "findings": []}, changed, "old")
    assert [one["level"] for one in found["new"]] == ["warn"]
    assert (found["moved"], len(found["scales"])) == ([], 1)


def large(row, level, value):
    """A finding about a head."""
    where = {"layer": row["layer"], "kind": row["kind"], "head": row["head"]}
    said = {"title": "large logits", "message": f"The largest logit is {value:g}.", "advice": ""}
    return {"name": "peak", "fault": None, "level": level, **where, "value": value, "threshold": 30, **said}


def test_notes_that_were_not_compared_do_not_pass(document, changed):
    """Whether a note is new cannot be told from other texts; one that both have is not new."""
    old = {**document, "findings": [large(document["heads"][0], "note", 31)]}
    for at, same, ends in ((0, False, False), (1, False, True), (1, True, True), (None, False, False)):
        changed["inputs"][0]["text"] = document["inputs"][0]["text"] if same else "a cat"
        changed["findings"] = [] if at is None else [large(document["heads"][at], "note", 40)]
        changed["baseline"] = baseline.compare(old, changed, "old")
        assert bool(fails(changed, "note")) == ends, (at, same)
        assert fails(changed, "warn") is None
        assert len(changed["baseline"]["uncompared"]) == (ends and not same)
    changed["inputs"][0]["text"] = "a cat"
    changed["findings"] = [large(document["heads"][1], "note", 40), large(document["heads"][0], "warn", 60)]
    changed["baseline"] = baseline.compare(old, changed, "old")
    assert "new or worse" in fails(changed, "note")  # what is known comes first
    changed["findings"].pop()
    changed["baseline"] = baseline.compare(old, changed, "old")
    assert "1 note could not be compared," in fails(changed, "note")


def test_changes_are_told_once_per_layer_with_the_heads(document, changed):
    old = copy.deepcopy(document)
    heads, layer = document["heads"], document["heads"][0]["layer"]
    old["findings"] = [large(heads[0], "note", 45), large(heads[1], "note", 40), large(heads[4], "error", 110)]
    changed["findings"] = [large(row, "warn", 50 + 10 * at) for at, row in enumerate(heads[:4])]
    for row in changed["heads"][:3]:
        row["peak"] *= 2 + row["head"]
    for one in changed["layers"]:
        one["scale"]["applied"] = 1.0
    shown = text({**changed, "baseline": baseline.compare(old, changed, "old")}, 300)
    peak = heads[2]["peak"]
    assert shown.partition("Since ")[2].splitlines()[1:] == [
        f"new: warn peak, {layer} heads 2, 3. Head 3: The largest logit is 80.",
        f"worse: peak 40 → 60 in head 1 (note → warn), {layer} heads 0, 1",
        f"gone: error peak, {heads[4]['layer']} head 0: The largest logit is 110.",
        f"scale: {layer} and 1 more layer applied 0.3536, now 1",
        f"moved: {layer} heads 0, 1, 2: peak × 2.00 to × 4.00, most in head 2: {peak:.2f} → {4 * peak:.2f}",
    ]


def test_what_is_left_out_is_counted(document, changed):
    """Eight lines of each kind of change are shown."""
    layers = [f"layer.{number}" for number in range(11)]
    scales = [{"layer": layer, "kind": "self", "before": None, "after": 0.1 * at} for at, layer in enumerate(layers)]
    moved = [
        {"layer": layer, "kind": "self", "head": head, "sign": "peak", "before": 1.0, "after": 2.0, "times": 2.0}
        for layer in layers
        for head in (0, 1)
    ]
    findings = [large({"layer": layer, "kind": "self", "head": 0}, "warn", 60) for layer in layers]
    found = baseline.compare(document, changed, "old") | {"scales": scales, "moved": moved, "gone": findings}
    found |= {
        "new": findings,
        "levels": [{"before": {**finding, "level": "note"}, "after": finding} for finding in findings],
    }
    shown = text({**document, "baseline": found}, 300).splitlines()
    assert [line for line in shown if line.startswith("and ")] == [
        "and 3 more new findings; --json has them",
        "and 3 more findings that are worse; --json has them",
        "and 3 more findings that are gone; --json has them",
        "and 3 more scales; --json has them",
        "and 6 more signs that moved by over 1.5 times; --json has them",
    ]
    assert "scale: layer.0 applied one that could not be measured, now 0" in shown


def test_through_the_command(attemper_command, folder, tmp_path):
    old = tmp_path / "old.json"
    text = ["--text", "the dog chased the ball because it was fast ."]
    assert attemper_command("scan", folder("bert"), *text, "-o", old)[0] == 0
    code, out, _ = attemper_command("scan", folder("bert"), *text, "--baseline", old)
    assert code == 0
    assert "Since old.json" in out
    assert "Nothing changed" in out
    code, out, _ = attemper_command("scan", folder("bert"), "--text", "a cat sat on it", "--baseline", old, "--json")
    assert code == 0
    assert (
        "the older scan used other texts: scales and findings at warn or above are compared, notes and signs are not."
        in json.loads(out)["baseline"]["differences"]
    )
    code, out, _ = attemper_command("scan", folder("gpt2"), *text, "--baseline", old)
    assert code == 0
    assert "another model" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", f"must be a scan with schema {SCHEMA!r}; it has None"),
        (b'{"schema": "attemper.scan/9"}', "it has 'attemper.scan/9'"),
        (b'{"schema": "attemper.scan/1"}', "is damaged"),
    ],
)
def test_any_file_is_survived(tmp_path, content, words):
    path = tmp_path / "old.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="--baseline: ") as raised:
        baseline.read(path)
    assert words in str(raised.value)


def test_a_scan_of_the_old_form_is_to_be_made_again(tmp_path, changed):
    scale = changed["layers"][0]["scale"]
    scale["says"] = scale.pop("message")
    path = tmp_path / "old.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"is of an older attemper, which wrote `says`.* Scan the older model again"):
        baseline.read(path)


@pytest.mark.parametrize("value", ["3", True, [3], {}])
@pytest.mark.parametrize("where", ["peak", "entropy", "applied", "value", "threshold"])
def test_a_text_for_a_number_is_damage(tmp_path, changed, where, value):
    changed["findings"] = [large(changed["heads"][0], "warn", 60)]
    row = changed["layers"][0]["scale"] if where == "applied" else changed["heads"][0]
    row = changed["findings"][0] if where in ("value", "threshold") else row
    row[where] = value
    path = tmp_path / "old.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(InputError, match="is damaged"):
        baseline.read(path)


@pytest.mark.parametrize("part", ["model", "findings", "heads", "layers", "inputs", "attemper", "torch", "created"])
@pytest.mark.parametrize("value", [None, 3, "x", [3], {"a": []}, [{"layer": []}]])
def test_every_damaged_part_is_noticed(tmp_path, changed, part, value):
    if part in ("attemper", "torch", "created") and value == "x":
        return  # a text it may be
    changed[part] = value
    path = tmp_path / "old.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(InputError, match="is damaged"):
        baseline.read(path)
