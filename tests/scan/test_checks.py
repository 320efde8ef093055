"""The checks: every fault is named by what its ops show or by an experiment, and no model that is right is accused."""

import copy
import json

import pytest
import torch
import transformers

import attemper
import zoo
from attemper.health.faults import ATTENTION_FAULTS, CHECKS
from attemper.scan.checks.declared import is_real
from attemper.scan.experiments.backend import LONG
from scan import probed, right, unseen, wrong
from watched import state

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*mismatched.*mask.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*key_padding_mask.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def made(maker):
    torch.manual_seed(0)
    return maker()


def faults(found):
    return {finding["fault"] for finding in found.findings if finding["fault"] is not None}


NEW = {"zero_weights", "input_ignored", "packed_differs"}
WRONG = {**wrong.WRONG, **unseen.WRONG, **probed.WRONG}
RIGHT = {**right.RIGHT, **unseen.RIGHT, **probed.RIGHT}


@pytest.mark.parametrize("name", WRONG)
def test_every_fault_is_named(name):
    case = made(WRONG[name])
    plain = attemper.scan(case.model, case.inputs, pictures=False)
    assert faults(plain) == set(case.faults)
    deep = attemper.scan(case.model, case.inputs, pictures=False, deep=True)
    assert faults(deep) == {*case.faults, *case.also}
    failed = {one["name"] for one in deep.document["checks"] if one["state"] == "failed"}
    checks = {ATTENTION_FAULTS[fault].check if fault in ATTENTION_FAULTS else "scale" for fault in faults(deep)}
    nan = (
        {"numbers"} if any(finding["name"] == "nan" for finding in deep.findings) else set()
    )  # of rows that see no key
    assert failed == checks | nan
    for one in deep.findings:
        if one["name"] == "attention":
            assert one["message"].endswith(".")
            assert one["advice"].endswith(".")
            assert one["level"] in ("note", "warn", "error")
            assert one["title"] == ATTENTION_FAULTS[one["fault"]].title


def test_there_are_enough_of_both_kinds():
    named = {
        fault
        for maker in {**wrong.WRONG, **probed.WRONG}.values()
        for fault in (*made(maker).faults, *made(maker).also)
    }
    assert len(wrong.WRONG) >= 25
    assert len(right.RIGHT) + len(zoo.ZOO) >= 60
    assert set(ATTENTION_FAULTS) - named == {"over_batch", "dtype_changes", *NEW}  # tested below, and in test_trust.py


def accused(case):
    found = attemper.scan(case.model, case.inputs, pictures=False, deep=True)
    states = {one["name"]: one["state"] for one in found.document["checks"]}
    assert list(states) == list(CHECKS)
    for name in ("softmax_axis", "softmax_once", "row_sums", "dropout", "mask_strength"):
        assert states[name] == "passed", found.document["checks"]
    return [finding for finding in found.findings if finding["name"] == "attention"]


@pytest.mark.parametrize("name", [*right.OFTEN, *unseen.RIGHT, *probed.RIGHT])
def test_no_model_that_is_right_is_accused(name):
    assert accused(made(RIGHT[name])) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(set(right.RIGHT) - set(right.OFTEN)))
def test_no_family_is_accused(name):
    assert accused(made(right.RIGHT[name])) == []


def test_a_softmax_over_the_batch():
    def attend(q, k, v):
        return torch.softmax(wrong.scores(q, k), dim=0) @ v

    case = made(lambda: wrong.case(attend))
    found = attemper.scan(case.model, case.inputs)
    assert faults(found) == {"over_batch"}


def test_bfloat16_that_attends_to_other_keys():
    """Queries and keys share a large part, which bfloat16 rounds by more than keys differ."""

    class Shared(wrong.Attention):
        def __init__(self):
            super().__init__(wrong.causal)
            torch.nn.init.constant_(self.q.bias, 200.0)
            torch.nn.init.constant_(self.k.bias, 200.0)

    found = attemper.scan(made(lambda: wrong.Model(Shared(), Shared())), wrong.ids(), deep=True)
    (one,) = (finding for finding in found.findings if finding["fault"] == "dtype_changes")
    assert one["value"] > 0.25
    assert one["level"] == "note"


@pytest.mark.parametrize("masked", [True, False])
def test_of_a_long_text_the_two_backends_get_the_beginning(masked):
    """Attention by hand stores n × n numbers, which nobody may have the memory for."""
    torch.manual_seed(0)
    lengths = []

    class Recorded(probed.Switched):
        def meet(self, q, k, v):
            if not self.flash:
                lengths.append(q.shape[2])
            return super().meet(q, k, v)

    net = wrong.Model(Recorded(masked), Recorded(masked), positions=False).eval()
    found = attemper.scan(net, torch.arange(2 * LONG)[None] % 11, deep=True)
    assert set(lengths) == {LONG}
    assert ("backend_differs" in faults(found)) != masked
    (result,) = (one for one in found.to_dict()["checks"] if one["name"] == "backend")
    assert result["state"] == ("passed" if masked else "failed")
    assert not masked or f"first {LONG} tokens" in result["message"]


def test_a_weak_mask_is_shown_without_a_negative_zero():
    def attend(q, k, v):
        hidden = (1 - wrong.lower(q.shape[2]).to(q.dtype)) * -5.0
        return (wrong.scores(q, k) + hidden).softmax(-1) @ v

    found = attemper.scan(made(lambda: wrong.model(attend)), wrong.ids())
    message = [finding["message"] for finding in found.findings if finding["fault"] == "weak_mask"]
    assert len(message) == 2
    assert all("a mask of −5 and 0 that is added" in one for one in message)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "Gemma 2", "T5", "Bamba: a Mamba hybrid"])
def test_the_experiments_compute_few_times_the_tokens_of_the_batch(name):
    """Copies of an item run alone or together, and pieces of a text one after the other, so calls say little."""
    case = made(right.RIGHT[name])
    sizes = []
    forward = type(case.model).forward

    class Counting(type(case.model)):
        def forward(self, *args, **kwargs):
            ids = next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
            sizes.append(ids.shape[0] * ids.shape[1])
            return forward(self, *args, **kwargs)

    Counting.forward.__signature__ = __import__("inspect").signature(forward)
    case.model.__class__ = Counting
    attemper.scan(case.model, case.inputs, pictures=False, deep=True)
    own, *others = sizes
    assert 5 * own <= sum(others) <= 24 * own
    # a text twice as long, or an item more where there is one; five copies of one of two items
    assert max(others) <= (2.5 if name == "T5" else 2) * own


def test_nothing_of_the_model_is_changed():
    case = made(right.FAMILIES["GPT-2"])
    model = case.model.train()
    model.transformer.h[1].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [part.training for part in model.modules()]
    attributes = {name: set(vars(part)) for name, part in model.named_modules()}
    random, dtype, watched = torch.get_rng_state(), torch.get_default_dtype(), state()
    attemper.scan(model, case.inputs, deep=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() == dtype
    assert state() == watched
    assert [part.training for part in model.modules()] == modes
    assert {name: set(vars(part)) for name, part in model.named_modules()} == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_model_that_raises_in_an_experiment_is_skipped_with_the_reason():
    class Stubborn(wrong.Model):
        def forward(self, input_ids):
            if input_ids.shape[0] != 2:
                raise ValueError("two items, please")
            return super().forward(input_ids)

    found = attemper.scan(made(lambda: Stubborn(wrong.Attention(wrong.causal))), wrong.ids(), deep=True)
    batch = next(one for one in found.document["checks"] if one["name"] == "batch")
    assert (batch["state"], batch["message"]) == ("skipped", "could not be run: ValueError: two items, please")


def test_what_was_assumed_is_in_the_sentence():
    said = {}
    for name in ("bidirectional", "a prefix LM", "both directions", "a set", "(length, batch, width)"):
        case = made(right.RIGHT[name])
        found = attemper.scan(case.model, case.inputs, deep=True)
        said[name] = {one["name"]: one["message"] for one in found.document["checks"]}
    assert said["bidirectional"]["future"].startswith("assumed bidirectional: no layer has a causal mask")
    assert "assumed a prefix LM" in said["a prefix LM"]["future"]
    assert "some from the right" in said["both directions"]["future"]
    assert said["a set"]["permutation"].startswith("assumed to be ordered before")
    assert "assumed (length, batch, …)" in said["(length, batch, width)"]["batch"]


def test_the_leak_is_the_size_that_a_second_computation_gives():
    """Row i of the first layer moves by what its weights on later keys carry, computed here by hand in float64."""
    torch.manual_seed(0)
    model = wrong.Model(wrong.Attention(wrong.weak(-5.0)))
    batch = wrong.ids()
    found = attemper.scan(model, batch, deep=True)
    (weak,) = (finding for finding in found.findings if finding["fault"] == "weak_mask")
    hidden = ~wrong.lower(wrong.LENGTH)

    def largest(model):
        layer = model.layers[0]
        with torch.no_grad():
            x = model.norms[0](model.words(batch) + model.places(torch.arange(wrong.LENGTH)))
            q, k = (layer.split(part(x)) for part in (layer.q, layer.k))
            return float(wrong.scores(q, k).masked_fill(hidden, -5.0).softmax(-1)[..., hidden].max())

    plain, exact = largest(model), largest(copy.deepcopy(model).double())
    rounding = torch.finfo(torch.float32).eps * exact
    assert abs(weak["value"] - exact) <= 2 * (abs(plain - exact) + rounding)
    assert abs(plain - exact) < exact / 1000


def test_long_texts_keep_little(monkeypatch):
    """Of 2,048 tokens some hundred rows are kept of every layer, not all."""
    from attemper.scan.experiments import runner

    kept = []
    rows = runner.Runner._rows

    def counted(self, name, output, lengths):
        found = rows(self, name, output, lengths)
        kept.append(0 if found is None else found.shape[1])
        return found

    monkeypatch.setattr(runner.Runner, "_rows", counted)
    torch.manual_seed(0)
    model = wrong.Model(wrong.Attention(wrong.causal))
    model.places = torch.nn.Embedding(4096, wrong.WIDTH)
    found = attemper.scan(model, torch.randint(3, wrong.WORDS, (1, 2048)), pictures=False, deep=True)
    assert faults(found) == set()
    assert 0 < max(kept) <= 3 * runner.FEW


def test_the_table_and_the_report_show_the_checks(tmp_path):
    case = made(right.DESIGNS["causal"])
    found = attemper.scan(case.model, case.inputs, deep=True)
    passed = sum(one["state"] == "passed" for one in found.document["checks"])
    assert f"Checks {passed} of {passed} passed" in str(found)
    assert "future passed: no row before a changed token moved" in str(found)
    found.write(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "check future passed: no row before a changed token moved." in page
    shallow = attemper.scan(case.model, case.inputs)
    assert f"--deep adds {sum(check.deep for check in CHECKS.values())} experiments" in str(shallow)


@pytest.mark.parametrize(
    ("name", "value", "real"),
    [
        ("attention_mask", [[1, 1, 0]], [[True, True, False]]),
        ("src_key_padding_mask", [[False, False, True]], [[True, True, False]]),
        ("hidden", [[0.0, 0.0, float("-inf")]], [[True, True, False]]),
        ("mask", [[1, 1, 0], [1, 1, 1]], [[True, True, False], [True, True, True]]),
        ("mask", [[0, 0, 1], [0, 0, 0]], [[True, True, False], [True, True, True]]),
        ("mask", [[0, 1, 1], [1, 1, 1]], [[False, True, True], [True, True, True]]),
        ("bool_masked_pos", [[1, 0, 1]], None),
        ("loss_mask", [[1, 0, 1]], None),
        ("input_ids", [[1, 0, 1]], None),
        ("attention_mask", [[1, 2, 0]], None),
    ],
)
def test_which_tokens_a_mask_marks_as_real(name, value, real):
    found = is_real(name, torch.tensor(value))
    assert (None if found is None else found.tolist()) == real


def test_the_embedded_model_passes(attemper_command):
    code, out, _ = attemper_command("scan", "--deep", "--json")
    document = json.loads(out)
    states = {one["name"]: one["state"] for one in document["checks"]}
    assert code == 0
    assert "failed" not in states.values()
    assert {name for name, state in states.items() if state == "skipped"} == {
        *("mask_padding", "future", "cache", "chunks", "packed", "relative", "unpadded", "backend", "modes", "unused")
    }
    code, out, _ = attemper_command("scan", "--deep")
    assert "OK  Healthy: no problem was found." in out
    assert "Checks 19 of 19 passed" in out
