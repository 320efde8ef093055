"""A checkpoint that is not whole, has other names, or a config of absurd sizes: mended, found, or refused at once."""

import json
import os
import shutil
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from attemper.errors import InputError
from attemper.scan import run as scanning
from attemper.scan.command import fails
from attemper.scan.input import folder as checkpoint
from attemper.scan.input import model as load
from attemper.scan.input.batch import make

PREFIXES = ["module.", "_orig_mod.", "_orig_mod.module.", "model.", "net.core.", "_fsdp_wrapped_module."]
QUERIES = {"bert": ".query.", "gpt2": "c_attn", "llama": "q_proj", "t5": "SelfAttention.q."}
TABLES = {"bert": "word_embeddings", "gpt2": "wte", "llama": "embed_tokens", "t5": "shared"}


@pytest.fixture
def changed(folder, tmp_path):
    """A copy of a folder with its tensors under other names (None: left out), and other settings."""

    def of(name, rename=None, **settings):
        place = shutil.copytree(folder(name), tmp_path / name)
        if rename is not None:
            weights = load_file(place / "model.safetensors")
            kept = {new: tensor.clone() for old, tensor in weights.items() if (new := rename(old)) is not None}
            save_file(kept, place / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, **settings}))
        return place

    return of


def scanned(place):
    loaded = load.load(place)
    return scanning.run(loaded, make(loaded), pictures=False).document


def refused(place):
    with pytest.raises(InputError) as raised:
        load.load(place)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", QUERIES)
def test_a_prefix_is_stripped_where_that_makes_it_whole(folder, changed, name, prefix):
    wanted, found = load.load(folder(name)), load.load(changed(name, lambda old: prefix + old))
    assert type(found.model) is type(wanted.model)
    assert found.drawn == []
    assert all(torch.equal(tensor, found.model.state_dict()[key]) for key, tensor in wanted.model.state_dict().items())
    natural = (name, prefix) == ("llama", "model.")  # transformers reads it so by itself
    assert ("names in the files were adapted to the model" in " ".join(found.notes)) != natural


def test_a_wrapper_in_the_middle_of_a_name_is_stripped_too(changed):
    found = load.load(changed("bert", lambda old: old.replace("layer.", "layer._checkpoint_wrapped_module.")))
    assert (found.drawn, len(found.notes)) == ([], 1)


@pytest.mark.parametrize("name", QUERIES)
def test_names_that_nothing_explains_are_refused(changed, name):
    sentence = refused(changed(name, lambda old: f"{old}.x"))
    assert "attention is in the files, so all of it would be random" in sentence
    assert ".x" in sentence


@pytest.mark.parametrize("parts", [QUERIES, TABLES])
@pytest.mark.parametrize("name", QUERIES)
def test_missing_weights_of_attention_are_the_headline(changed, name, parts):
    place = changed(name, lambda old: None if parts[name] in old else old)
    document = scanned(place)
    assert (
        document["verdict"]["line"].startswith("Not the trained model: ")
        or document["findings"][0]["level"] == "diverging"
    )
    assert document["verdict"]["level"] in ("critical", "diverging")
    one = next(one for one in document["findings"] if one["name"] == "weights")
    assert parts[name].strip(".").split(".")[-1] in one["message"] or name == "t5"
    assert one["layer"] in [layer["layer"] for layer in document["layers"]]
    assert fails(document, "critical")
    assert [row["peak"] for row in scanned(place)["heads"]] == [
        row["peak"] for row in document["heads"]
    ]  # drawn the same


def test_layers_that_the_files_do_not_have_are_missing_and_more_of_them_are_left_over(changed):
    more = load.load(changed("bert", num_hidden_layers=3))
    assert len(more.drawn) == 16
    assert all(name.startswith("encoder.layer.2.") for name in more.drawn)


def test_weights_without_a_place_are_told(changed):
    found = load.load(changed("bert", num_hidden_layers=1))
    assert found.drawn == []
    assert "16 weights of the files have no parameter in BertModel: encoder.layer.1." in found.notes[0]


def test_a_head_or_a_pooler_that_is_drawn_is_a_note(changed):
    found = load.load(changed("bert", lambda old: None if "pooler" in old else old))
    assert found.drawn == []
    assert found.notes == [
        "2 weights are not in the files and were initialised at random: pooler.dense.bias, pooler.dense.weight."
    ]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("bert", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and the weights have 2 layers"),
        ("bert", {"num_hidden_layers": 1e9}, "num_hidden_layers is 1000000000"),
        ("bert", {"num_hidden_layers": 10**5}, "num_hidden_layers is 100000"),
        ("gpt2", {"n_layer": 10**5}, "n_layer is 100000"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ("t5", {"num_decoder_layers": 10**9}, "num_decoder_layers is 1000000000"),
        ("bert", {"text_config": {"depths": [2, 10**9]}}, "depths is 1000000000"),
        ("bert", {"num_labels": 10**9}, "num_labels is 1000000000"),
        ("bert", {"hidden_size": 10**9}, "they do not belong together"),
        ("bert", {"vocab_size": 10**12}, "they do not belong together"),
        ("bert", {"intermediate_size": 10**10}, "they do not belong together"),
        ("gpt2", {"n_positions": 10**10}, "they do not belong together"),
        ("t5", {"num_heads": 10**9}, "they do not belong together"),
        ("bert", {"num_attention_heads": 10**9}, "is not a multiple of the number of attention heads (1000000000)"),
        ("bert", {"num_attention_heads": 0}, "ZeroDivisionError"),
        ("bert", {"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str (value: 'wide')"),
        ("bert", {"hidden_size": 48}, "is (32,) in the files and (48,) by config.json"),
    ],
)
def test_absurd_sizes_are_refused_with_their_reason_before_memory_is_taken(changed, monkeypatch, name, settings, words):
    monkeypatch.setattr(checkpoint, "SPARE", 2**20)
    assert words in refused(changed(name, **settings))


def test_nothing_counts_the_modules_of_others_afterwards(folder):
    load.load(folder("bert"))
    torch.nn.Linear(2, 2)
    from torch.nn.modules import module

    assert not module._global_parameter_registration_hooks
    assert not module._global_buffer_registration_hooks


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "adapter_config.json"])
def test_what_is_no_plain_file_is_never_waited_for(changed, name, kind):
    place = changed("bert")
    (place / name).unlink(missing_ok=True)
    kind(place / name)
    assert not stat.S_ISREG(os.stat(place / name).st_mode)
    assert f"{name!r} in " in refused(place)


def test_an_adapter_is_called_one_without_a_config_too(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "holds an adapter (PEFT)" in refused(tmp_path)


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_name_is_no_folder(empty):
    assert "MODEL is empty" in refused(empty)
