"""Models of transformers under every part of attemper that attaches to them; `make transformers` runs it on each minor version.

Written for all versions that attemper supports: no other helper of the tests is used than those that are, too.
"""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

import attemper
from attemper._files import OLDEST
from attemper.errors import InputError
from attemper.watch.routes import versions
from judge import assert_as_exact
from zoo import HEADS, LENGTH, TARGETS, in_float64, make, softmax_inputs

MODELS = ("llama", "gpt2", "bert", "t5", "vit")
SINCE = {"bert": (5, 0), "t5": (5, 20)}
"""Models that can be switched only since a later version than the others."""
T5_ON_SDPA = (5, 15)
HIDDEN = -1e4  # the logit of a hidden key is below
HERE = Version(transformers.__version__).release[:2]
SWITCHABLE = pytest.mark.skipif(HERE < versions.SWITCHABLE, reason="needs transformers 4.54")
SUPPORTED = pytest.mark.skipif(
    OLDEST["transformers"] > HERE, reason="needs a transformers that is supported: make transformers"
)
pytestmark = pytest.mark.filterwarnings("default")  # of old versions on a new torch


def as_implemented(name, implementation):
    """The model with another attention, set when it is built, which every version can."""
    subject = make(name)
    config = copy.deepcopy(subject.model.config)
    config._attn_implementation = implementation
    model = type(subject.model)._from_config(config, attn_implementation=implementation)
    model.load_state_dict(subject.model.state_dict())
    subject.model = model.eval()
    return subject


def table():
    """What models look up."""
    interface = getattr(transformers.modeling_utils, "AttentionInterface", None)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    return {name: functions[name] for name in functions}, getattr(interface, "get_interface", None)


@SUPPORTED
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_watch_changes_nothing_and_measures_the_logits(name, implementation):
    if implementation == "sdpa" and name == "t5" and HERE < T5_ON_SDPA:
        pytest.skip("does not apply: there is no such T5 in this transformers")
    subject, eager, before = as_implemented(name, implementation), as_implemented(name, "eager"), table()
    with torch.no_grad():
        with softmax_inputs() as found:
            eager.run()
        expected = subject.run()
        with attemper.watch(subject.model) as watch:
            for _ in range(3):  # the first pass shows what the others need not look for
                assert torch.equal(subject.run(), expected)
                watch.step()
    assert table()[1] is before[1]
    assert table()[0] == before[0]
    assert watch.record.notes == []
    for step in range(3):
        entries = [entry for entry in watch.record.entries if entry.step == step]
        assert len(entries) == len(found)
        for entry, (logits, _) in zip(entries, found, strict=True):
            keep = {LENGTH: subject.keep, TARGETS: subject.targets}.get(logits.shape[2])
            keep = torch.ones(logits.shape[0], logits.shape[2], dtype=torch.bool) if keep is None else keep
            rows = logits.double().transpose(0, 1)[:, keep]  # (H, rows, keys)
            largest = rows[rows > HIDDEN].abs().max()
            limit = 32 * torch.finfo(torch.float32).eps * (1 + largest)
            entropy = torch.special.entr(rows.softmax(-1)).sum(-1).mean(-1)
            assert entry.summary.rows.tolist() == [rows.shape[1]] * HEADS
            assert ((entry.summary.peak - rows.amax((1, 2))).abs() <= limit).all()
            assert ((entry.summary.entropy - entropy).abs() <= limit * (1 + entropy)).all()
    declared = {info.implementation for info in watch.record.info.values()}
    assert declared <= {implementation, None}


@SUPPORTED
@pytest.mark.parametrize("name", MODELS)
def test_a_scan_finds_the_scale_of_every_layer(name):
    subject = make(name)
    scales = {"t5": "none"}
    found = attemper.scan(subject.model, subject.inputs).document
    assert {layer["scale"]["rule"] for layer in found["layers"]} == {scales.get(name, "sqrt_dk")}


@SUPPORTED
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_scanned(name, tmp_path):
    from folders import save

    found = attemper.scan(save(tmp_path, name)).document
    assert found["verdict"]["judged"]
    assert found["model"]["source"] == "folder"
    assert found["inputs"][0]["length"] != 0


@SWITCHABLE
@pytest.mark.parametrize("name", MODELS)
def test_attention_is_replaced_and_the_model_left_as_it_was(name):
    subject = make(name)
    if SINCE.get(name, HERE) > HERE:
        with pytest.raises(InputError, match="it does not take its attention from the interface"):
            attemper.watch(subject.model, replace=True).__enter__()
        return
    before = subject.model.config._attn_implementation
    with torch.no_grad():
        expected, exact = subject.run(), in_float64(subject).run()
        with attemper.watch(subject.model, replace=True) as watch:
            output = subject.run()
        instruments = attemper.instrument(subject.model)
        with attemper.watch(subject.model) as second:
            instrumented = subject.run()
        instruments.remove()
        assert torch.equal(subject.run(), expected)
    assert subject.model.config._attn_implementation == before
    assert {info.route for info in watch.record.info.values()} == {"replaced"}
    assert second.record.layers == watch.record.layers
    for found in (output, instrumented):
        assert_as_exact("output", found, [expected], exact)


@SWITCHABLE
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_made_with_attempers_attention(name):
    if SINCE.get(name, HERE) > HERE:
        pytest.skip("does not apply: its attention is not taken from the interface")
    subject, named = make(name), as_implemented(name, attemper.integrations.register_attention())
    with torch.no_grad():
        expected, exact = subject.run(), in_float64(subject).run()
        with attemper.watch(named.model) as watch:
            found = named.run()
    assert {info.route for info in watch.record.info.values()} == {"attemper"}
    keep = slice(None) if subject.keep is None or subject.targets is not None else subject.keep
    assert_as_exact("output", found[keep], [expected[keep]], exact[keep])


@SWITCHABLE
def test_a_floor_adds_its_gradient():
    subject = make("gpt2")
    with attemper.floor(subject.model.train(), floor=0.9) as floored:
        subject.run().square().sum().backward()
    assert floored.calls == 2


@SUPPORTED
@pytest.mark.skipif(HERE >= versions.SWITCHABLE, reason="needs a transformers older than 4.54: make transformers")
@pytest.mark.parametrize(
    "use",
    [
        attemper.floor,
        attemper.instrument,
        lambda model: attemper.watch(model, replace=True),
        lambda model: attemper.integrations.register_attention(),
    ],
)
def test_where_models_cannot_be_switched_a_sentence_says_so(use):
    says = pytest.raises(InputError, match=r"needs transformers 4\.54 or newer.* is installed\. Type pip install -U")
    with says, use(make("llama").model):
        pass


def test_a_model_of_torch_is_scanned_beside_any_version():
    assert transformers.modeling_utils
    found = attemper.scan(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), torch.randn(1, 8, 16)).document
    assert found["verdict"]["judged"]


@pytest.mark.skipif(OLDEST["transformers"] <= HERE, reason="needs a transformers that is too old: make transformers")
def test_of_an_older_version_a_sentence_says_so(tmp_path):
    with pytest.raises(InputError, match=r"needs transformers 4\.48 or newer; .* is installed. Type pip install -U"):
        attemper.scan(tmp_path)
