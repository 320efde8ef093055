"""The JSON Schema made from the dataclasses: every field of real documents is changed, and what is then accepted is written down.

schema_accepts.json was first written by the schema that was kept by hand. After a change that is meant, write it again:
``python tests/scan/test_schema.py`` (with tests/ on PYTHONPATH).
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import jsonschema
import torch
import transformers

import attemper
from attemper import health
from attemper.scan.document import SCHEMA, schema
from attemper.scan.show import baseline
from folders import save
from watched import stack

ACCEPTS = Path(__file__).with_name("schema_accepts.json")
SEES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
# what a field is replaced by: null, every type, a negative number, the numbers of an enum, a word of another one
OTHERS = (None, True, -1, 0, 1, 8, 17, 0.5, "", "self", "note", "ok", "0" * 64, [], [None], [1.5], ["a"], {}, {"a": 1})


def documents(folder):
    """A text with everything that can be asked for, a long one, and an image."""
    text = "the dog chased the ball because it was fast ."
    asked = attemper.scan(folder, [text, "a cat sat"], token="it", what_if=["none"])
    asked.layers[0]["call"] = 2  # as of a layer that runs twice
    asked.findings[0]["level"] = "warn"  # so that all parts of a baseline have something in them
    worse = [{**finding, "level": "error"} for finding in asked.findings[:1]]
    new = {**asked.document, "findings": [*worse, *[{**finding, "layer": "new"} for finding in asked.findings[1:]]]}
    new["layers"] = [{**layer, "biased": True, "scale": {**layer["scale"], "applied": 0.7}} for layer in asked.layers]
    new["heads"] = [{**head, "peak": (head["peak"] or 0.0) * 9 + 9, "score_peak": 7.5} for head in asked.heads]
    new["checks"] = [{**one, "needs": "5 tokens or more"} for one in asked.document["checks"]]
    new["baseline"] = baseline.compare(asked.document, new, "old.json")
    new["baseline"]["uncompared"] = new["findings"][:1]
    yield new
    yield attemper.scan(stack(), torch.randn(1, 300, 16)).document
    config = transformers.ViTConfig(**SEES, image_size=16, patch_size=8)
    yield attemper.scan(transformers.ViTModel(config), {"pixel_values": torch.rand(1, 3, 16, 16)}).document


def places(part, path=()):
    """Every place of a document once: of a list its first entry stands for all."""
    yield path
    if isinstance(part, dict):
        for name, inner in part.items():
            yield from places(inner, (*path, name))
    elif isinstance(part, list) and part:
        yield from places(part[0], (*path, 0))


def accepted(published, whole):
    """Path → which of the changes at that place are accepted: OTHERS by number, "x" a field more, "-" the field left out."""
    valid = jsonschema.Draft202012Validator(published)
    assert valid.is_valid(whole), [error.message for error in valid.iter_errors(whole)]
    found = {}
    for name, part in whole.items():
        for path in places({name: part}):
            if path:
                # a change further down is seen by the part's own schema: the rest is as valid as before
                held, rules = ({name: part}, published["properties"][name]) if len(path) > 1 else (whole, published)
                found[".".join("*" if step == 0 else step for step in path)] = _passing(
                    held, path, name, published, rules
                )
    return found


def _passing(held, path, name, published, rules):
    valid = jsonschema.Draft202012Validator({**rules, "$defs": published["$defs"]})
    document = copy.deepcopy(held)
    holder = document
    for step in path[:-1]:
        holder = holder[step]
    value, passing = holder[path[-1]], []

    def passes():
        return valid.is_valid(document if len(path) == 1 else document[name])

    changes = list(OTHERS) + ([{**value, "one_more": 1}] if isinstance(value, dict) else [])
    for number, other in enumerate(changes):
        holder[path[-1]] = other
        if passes():
            passing.append("x" if number == len(OTHERS) else str(number))
    del holder[path[-1]]
    return " ".join([*passing, *(["-"] if passes() else [])])


def shrunk(document):
    """The first entries of every list: validating all of a long one again and again says no more."""
    if isinstance(document, dict):
        return {name: shrunk(part) for name, part in document.items()}
    return [shrunk(part) for part in document[:1]] if isinstance(document, list) else document


def all_accepted(folder, published):
    found = {}
    for number, document in enumerate(documents(folder)):
        for path, passing in accepted(published, shrunk(document)).items():
            found.setdefault(path if path not in found else f"{path} ({number})", passing)
    kept = {
        path: passing for path, passing in found.items() if "(" not in path or found[path.split(" (")[0]] != passing
    }
    return dict(sorted(kept.items()))


def test_the_schema_accepts_and_refuses_what_it_did(folder):
    assert all_accepted(folder("bert"), schema()) == json.loads(ACCEPTS.read_text(encoding="utf-8"))


def test_every_field_of_the_schema_is_tried():
    tried = {path.split(" (")[0].split(".")[-1] for path in json.loads(ACCEPTS.read_text(encoding="utf-8"))}
    parts = [schema(), *schema()["$defs"].values()]
    assert {name for part in parts for name in part["properties"]} - tried == set()


def test_the_schema_is_one_and_knows_the_words_of_health():
    jsonschema.Draft202012Validator.check_schema(schema())
    parts = schema()["$defs"]["Finding"]["properties"]
    assert set(parts["name"]["enum"]) == set(health.NAMES)
    assert set(parts["level"]["enum"]) | {"ok"} == set(health.LEVELS)
    assert schema()["$defs"]["ScanVerdict"]["properties"]["level"]["enum"] == list(health.LEVELS)
    assert schema()["properties"]["schema"]["const"] == SCHEMA


if __name__ == "__main__":
    published = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")) if len(sys.argv) > 1 else schema()
    with tempfile.TemporaryDirectory() as made:
        found = all_accepted(save(Path(made) / "tiny-bert", "bert"), published)
    ACCEPTS.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
