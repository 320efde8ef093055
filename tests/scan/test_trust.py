""" "Healthy" that can be trusted: nothing is changed, what was not judged is said, and faults that a floor once hid are found."""

import copy
import random
import re
import types
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import attemper
import zoo
from attemper.errors import InputError
from attemper.scan.unchanged import Held, copied
from scan import right, unseen, wrong

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*mismatched.*mask.*:UserWarning"),
]


def scanned(model, batch, deep=True):
    return attemper.scan(model, batch, pictures=False, deep=deep)


def faults(found):
    return {finding["fault"] for finding in found.findings if finding["fault"] is not None}


def state_of(found, name):
    return next(one for one in found.document["checks"] if one["name"] == name)


def seeds():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("name", zoo.ZOO)
def test_nothing_has_changed_after_a_deep_scan_of_the_zoo_and_none_is_accused(name):
    """Weights, buffers, attributes and hooks of the model, its modes, the batch, and every random state."""
    subject = zoo.make(name)
    model, batch = subject.model.train(), subject.inputs
    for number, part in enumerate(model.modules()):
        part.training = number % 3 > 0
    modes = [part.training for part in model.modules()]
    weights = {one: value.clone() for one, value in model.state_dict().items()}
    tensors = {one: value.clone() for one, value in batch.items()}
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    held, drawn, dtype = Held([model, batch]), seeds(), torch.get_default_dtype()
    found = scanned(model, batch)
    assert [finding for finding in found.findings if finding["name"] == "attention"] == []
    assert held.changed() == []
    assert seeds() == drawn
    assert torch.get_default_dtype() == dtype
    assert [part.training for part in model.modules()] == modes
    assert [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()] == hooks
    assert all(torch.equal(value, weights[one]) for one, value in model.state_dict().items())
    assert all(torch.equal(value, tensors[one]) for one, value in batch.items())


def test_what_a_forward_changes_is_seen_and_put_back():
    class Counts(nn.Module):
        every: ClassVar[list] = []

        def keep(self, ids, seen=[]):  # noqa: B006
            seen.append(ids)
            self.every.append(ids)

        def __init__(self):
            super().__init__()
            self.inner = nn.Embedding(5, 4, max_norm=0.1)
            self.register_buffer("mean", torch.zeros(2))
            self.past, self.calls, self.notes = [], 0, {"last": torch.ones(1)}

        def forward(self, ids):
            self.calls += 1
            self.keep(ids)
            self.mean += 1
            self.past.append(ids)
            self.notes["last"].mul_(2)
            self.new = self.inner(ids)
            return self.new

    model = Counts()
    weight = model.inner.weight.detach().clone()
    held = Held(model)
    with torch.no_grad():
        model(torch.arange(5)[None])
    shared = {"every", "keep(default 0)"}
    assert {*held.changed()} == {"new", "calls", "mean", "past", "notes.last", "inner.weight", *shared}
    held.restore()
    assert held.changed() == []
    assert (model.calls, model.past, model.notes["last"].item(), model.mean.tolist()) == (0, [], 1.0, [0.0, 0.0])
    assert torch.equal(model.inner.weight, weight)
    assert not hasattr(model, "new")
    assert (Counts.every, Counts.keep.__defaults__) == ([], ([],))


def test_a_batch_is_copied_to_its_depths():
    x = torch.randn(2, 3, requires_grad=True) * 2
    cache = transformers.DynamicCache()
    cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), 0)
    batch = {"x": x, "same": x, "past": cache}
    new = copied(batch)
    assert new["x"] is new["same"] is not x
    assert new["past"].layers[0].keys is not cache.layers[0].keys
    assert torch.equal(new["past"].layers[0].keys, cache.layers[0].keys)


class Scaled(wrong.Attention):
    """Multiplied by a number that is given, before attention."""

    def __init__(self, number):
        super().__init__(wrong.causal)
        self.number = number

    def forward(self, x):
        return super().forward(x * self.number(self))


def remembering(module):
    module.calls = getattr(module, "calls", 0) + 1
    return 1.0 + 0.1 * module.calls


DRAWN = {
    "torch": lambda module: 1 + 0.1 * torch.rand(1),
    "numpy": lambda module: 1 + 0.1 * float(np.random.rand()),
    "python": lambda module: 1 + 0.1 * random.random(),
    "dropout": lambda module: F.dropout(torch.ones(wrong.WIDTH), 0.1),
}


def found_again(name):
    torch.manual_seed(0)
    return wrong.Model(Scaled(DRAWN[name]))


@pytest.mark.parametrize("name", DRAWN)
def test_a_model_that_draws_in_evaluation_is_not_judged_and_not_healthy(name):
    found = scanned(found_again(name), wrong.ids())
    one = state_of(found, "future")
    assert one["state"] == "skipped"
    assert "random in evaluation mode: another seed moved layers.0 by" in one["message"]
    (fault,) = (finding["fault"] for finding in found.findings if finding["fault"])
    assert fault == ("dropout_runs" if name == "dropout" else "random_output")
    declared = attemper.scan(found_again(name), wrong.ids(), pictures=False, deep=True, declared={fault: True})
    assert declared.verdict["level"] == "note"
    unjudged = r"No fault found in what was judged. Not judged: \d+ experiments, as the output is random"
    assert re.match(unjudged, declared.verdict["line"])


def test_state_between_calls_is_named():
    torch.manual_seed(0)
    model = wrong.Model(Scaled(remembering))
    found = scanned(model, wrong.ids())
    assert "keeps state from call to call: it changed layers.0.calls" in state_of(found, "batch")["message"]
    assert not found.verdict["line"].startswith("Healthy")
    assert not hasattr(model.layers[0], "calls")


def test_state_that_cannot_be_put_back_is_no_randomness():
    """A table of weights that every call adds to, behind the back of autograd."""

    class Adding(wrong.Model):
        def forward(self, input_ids):
            self.places.weight.data[: input_ids.shape[1]] += 0.1
            return super().forward(input_ids)

    torch.manual_seed(0)
    found = scanned(Adding(wrong.Attention(wrong.causal)), wrong.ids())
    assert "keeps state from call to call" in state_of(found, "future")["message"]


def test_the_first_item_for_all_is_a_leak():
    class First(wrong.Model):
        def forward(self, input_ids):
            return super().forward(input_ids) + self.words(input_ids[:1]).mean()

    torch.manual_seed(0)
    assert "batch_leak" in faults(scanned(First(wrong.Attention(wrong.causal)), wrong.ids()))


class Centred(wrong.Attention):
    """A norm over the length: a leak of the future; in place, it also changes what it is given."""

    def __init__(self, in_place):
        super().__init__(wrong.causal)
        self.in_place = in_place

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        return super().forward(x.sub_(mean) if self.in_place else x - mean)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_leak_is_found_in_place_as_out_of_place(in_place):
    torch.manual_seed(0)
    x = torch.randn(2, wrong.LENGTH, wrong.WIDTH)
    before, model = x.clone(), Centred(in_place)
    found = scanned(nn.Sequential(model), x)
    assert "future_leak" in faults(found)
    assert torch.equal(x, before)
    assert any("changes its batch in place" in note for note in found.notes) == in_place


def test_a_cache_in_the_batch_stays_as_long_as_it_was():
    torch.manual_seed(0)
    model, cache = wrong.llama(), transformers.DynamicCache()
    found = scanned(model, {"input_ids": wrong.ids(), "past_key_values": cache, "use_cache": True})
    assert cache.get_seq_length() == 0
    assert state_of(found, "future")["state"] == "passed"
    assert faults(found) == set()


@pytest.mark.parametrize("name", ["t5", "whisper", "torch_transformer"])
def test_a_padded_encoder_and_decoder_is_no_prefix_lm(name):
    subject = zoo.make(name)
    found = scanned(subject.model, subject.inputs)
    future = state_of(found, "future")
    assert (future["state"], future["message"]) == ("passed", "no row before a changed token moved")
    assert faults(found) == set()


@pytest.mark.parametrize("lengths", [(9, 9), (9, 11), (13, 9)])
@pytest.mark.parametrize("hidden", [torch.bool, torch.float32])
def test_a_padded_encoder_is_no_prefix_lm_and_leaks_nothing(lengths, hidden):
    """As many padded tokens in every item, or others; a mask of True, or of −inf."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(48, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = torch.arange(13) >= torch.tensor(lengths)[:, None]
    mask = mask if hidden == torch.bool else torch.zeros(2, 13).masked_fill(mask, -torch.inf)
    found = scanned(model, {"src": torch.randn(2, 13, 48), "src_key_padding_mask": mask})
    assert faults(found) == set()
    assert state_of(found, "future")["message"].startswith("assumed bidirectional")
    assert state_of(found, "padding")["state"] == "passed"
    assert (
        "Not judged: future (pass --declare causal, or causal=no if rows may see later tokens" in found.verdict["line"]
    )


def test_a_padded_bert_is_bidirectional():
    case = right.RIGHT["BERT, padded"]()
    case.inputs["attention_mask"][:, 9:] = 0
    found = scanned(case.model, case.inputs)
    assert state_of(found, "future")["message"].startswith("assumed bidirectional")
    assert faults(found) == set()


def hiding_with_infinity(q, k, v, mask):
    hidden = (mask[:, None, None, :] == 0) | ~wrong.lower(q.shape[2])
    return wrong.scores(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("deep", [False, True])
def test_nan_of_a_row_without_keys_is_named_where_it_is_born(deep):
    """Padding on the left: its rows see no key, their NaN is a key of the next layer, and no real row is left."""
    torch.manual_seed(0)
    batch = {name: value.flip(1) for name, value in wrong.padded().items()}
    found = scanned(wrong.model(hiding_with_infinity), batch, deep)
    (one,) = (finding for finding in found.findings if finding["name"] == "nan")
    assert one["layer"] == "layers.0"
    assert one["message"].startswith("NaN is in 9 of 22 rows of the output. It is born here: 4 of its rows see no key")
    assert "torch.finfo" in one["advice"]
    assert found.verdict["level"] == "diverging"
    assert state_of(found, "numbers")["state"] == "failed"


def test_nan_of_a_weight_is_named_by_the_weight():
    torch.manual_seed(0)
    model = wrong.model(lambda q, k, v: wrong.scores(q, k).softmax(-1) @ v)
    with torch.no_grad():
        model.layers[1].v.bias[3] = float("nan")
    (one,) = (finding for finding in scanned(model, wrong.ids()).findings if finding["name"] == "nan")
    assert one["layer"] == "layers.1.v"
    assert "its parameter bias holds NaN or infinity" in one["message"]


def test_words_that_are_never_said_are_no_infinity():
    class Suppressing(wrong.Model):
        def forward(self, input_ids):
            return super().forward(input_ids).index_fill(-1, torch.tensor([0, 1]), -torch.inf)

    torch.manual_seed(0)
    found = scanned(Suppressing(wrong.Attention(wrong.causal)), wrong.ids(), deep=False)
    assert found.verdict["line"] == "Healthy: no problem was found."


@pytest.mark.parametrize("which", ["all", "a layer"])
def test_weights_of_zero_are_never_healthy(which):
    torch.manual_seed(0)
    model = wrong.model(wrong.causal)
    for part in (model if which == "all" else model.layers[1]).parameters():
        nn.init.zeros_(part)
    assert "zero_weights" in faults(scanned(model, wrong.ids(), deep=False))
    assert ("input_ignored" in faults(scanned(model, wrong.ids()))) == (which == "all")


def test_an_output_that_ignores_the_input_is_a_fault():
    class Constant(wrong.Model):
        def forward(self, input_ids):
            return super().forward(torch.zeros_like(input_ids))

    torch.manual_seed(0)
    for batch in (wrong.ids(1), wrong.ids(2)):
        found = scanned(Constant(wrong.Attention(wrong.causal)), batch)
        assert faults(found) == {"input_ignored"}


class Recurrent(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.rnn = nn.GRU(8, 8, batch_first=True, bidirectional=both)

    def forward(self, x):
        return self.rnn(x)[0]


def test_experiments_run_where_no_attention_call_was_found():
    torch.manual_seed(0)
    x = torch.randn(2, 9, 8)
    found = scanned(Recurrent(False), x)
    assert found.verdict["line"].startswith(
        "No fault found in what was judged. Not judged: scale, softmax, masks and heads"
    )
    assert found.document["verdict"]["judged"] is False
    assert state_of(found, "future")["state"] == "passed"
    assert found.notes[0].startswith("found no attention call in Recurrent")
    with pytest.raises(InputError, match="found no attention call"):
        scanned(Recurrent(False), x, deep=False)


def test_what_was_not_judged_is_in_the_headline_with_what_to_pass():
    torch.manual_seed(0)
    short = scanned(wrong.model(wrong.causal), wrong.ids()[:, :2])
    assert "future (pass 3 tokens or more)" in short.verdict["line"]
    assert "mask direction, mask agreement, reach (pass 5 tokens or more)" in short.verdict["line"]
    assert "(pass 3 tokens or more)" in str(short).replace("\n", " ")
    declared = wrong.model(F.scaled_dot_product_attention)
    found = scanned(declared, wrong.ids())
    assert "future (pass --declare causal, or causal=no" in found.verdict["line"]
    for layer in declared.layers:
        layer.causal = False
    assert "future" not in scanned(declared, wrong.ids()).verdict["line"]


def test_a_half_precision_model_is_judged_in_float32():
    torch.manual_seed(0)
    model = wrong.model(wrong.causal).bfloat16()
    weights = copy.deepcopy(model.state_dict())
    found = scanned(model, wrong.ids())
    assert state_of(found, "future")["state"] == "passed"
    leaking = scanned(wrong.Model(Centred(False)).bfloat16(), wrong.ids())
    assert "future_leak" in faults(leaking)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


class Caching(wrong.Cached):
    """One layer with a cache, and a mistake in a step."""

    def __init__(self, mistake):
        super().__init__(lambda seen: seen)
        self.mistake = mistake

    def forward(self, input_ids, past=None):
        seen = 0 if past is None else past[2]
        place = 0 if self.mistake == "position" else seen
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]) + place)
        q, k, v = (part(x).unflatten(-1, (wrong.HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if past is not None:
            old_k, old_v = (part[:, :, 1:] for part in past[:2]) if self.mistake == "lost" else past[:2]
            old_v = old_v.roll(1, 2) if self.mistake == "stored" else old_v
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        first = 0 if self.mistake == "mask" else k.shape[2] - q.shape[2]
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(first)
        out = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        out = 2 * out if self.mistake == "after" and past is not None else out
        return {"logits": x + out, "past": (k, v, seen + input_ids.shape[1])}


CACHES = {
    "position": ("The step has another query and another key of its token.", "Give a step the position of its token"),
    "mask": (
        "The step sees 1 of 13 keys, and the last row of the whole text 13.",
        "Make the mask of a step over all keys",
    ),
    "lost": ("The step has 11 of 13 keys.", "torch.cat([past, new], -2)"),
    "stored": ("The step has another value of token 0 in its cache.", "Look at how the cache is written"),
    "after": ("The step has the query, keys, values and mask of the whole text.", "Look at what follows attention"),
}


@pytest.mark.parametrize("mistake", CACHES)
def test_a_cache_that_differs_says_why(mistake):
    torch.manual_seed(0)
    (one,) = (
        finding for finding in scanned(Caching(mistake), wrong.ids(1)).findings if finding["fault"] == "cache_differs"
    )
    why, advice = CACHES[mistake]
    assert one["message"].endswith(why)
    assert advice in one["advice"]


def test_a_cache_names_its_layer():
    (one,) = (
        finding
        for case in [unseen.WRONG["a Llama whose cache is shifted"]()]
        for finding in scanned(case.model, case.inputs).findings
        if finding["fault"] == "cache_differs"
    )
    assert one["layer"] == "model.layers.1.self_attn"
    assert "In model.layers.1.self_attn, the step has another key of token 0 in its cache." in one["message"]


def test_the_advice_about_a_softmax_names_the_dimension_of_the_keys():
    """With the heads in the last dimension, softmax(dim=-1) is what the code has."""
    torch.manual_seed(0)
    found = scanned(wrong.model(unseen.heads_last), wrong.ids(), deep=False)
    advice = {finding["advice"] for finding in found.findings if finding["fault"] == "over_heads"}
    (words,) = advice
    assert "keys in dimension 2 of 4, and the softmax runs over dimension 3: write softmax(dim=2)" in words
    found = scanned(wrong.model(wrong.over_queries), wrong.ids(), deep=False)
    assert all(
        "Write softmax(dim=-1)" in finding["advice"] for finding in found.findings if finding["fault"] == "over_queries"
    )


def test_one_layer_does_and_several_do():
    torch.manual_seed(0)
    said = {}
    for masked in ([False, True], [False, True, True]):
        found = scanned(wrong.Model(*(wrong.Half(one) for one in masked)), wrong.ids(), deep=False)
        said[len(masked)] = [finding["message"] for finding in found.findings if finding["fault"] == "masks_differ"]
    assert ["1 similar layer does not" in one for one in said[2]] == [True]
    assert ["(row 0 sees key 12), and 2 similar layers do not" in one for one in said[3]] == [True]


def test_a_projection_named_after_attention_is_no_missed_call():
    sizes = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 60,
        "visual_feat_dim": 16,
    }
    torch.manual_seed(0)
    model = transformers.LxmertModel(transformers.LxmertConfig(**sizes, l_layers=1, x_layers=1, r_layers=1))
    batch = {"input_ids": wrong.ids(), "visual_feats": torch.randn(2, 7, 16), "visual_pos": torch.rand(2, 7, 4)}
    assert scanned(model, batch, deep=False).notes == []


class Wrapped(wrong.Model):
    """Returns what its logits are put into, with NaN in one row or none."""

    def __init__(self, put, spoil):
        super().__init__(wrong.Attention(wrong.causal))
        self.put, self.spoil = put, spoil

    def forward(self, ids):
        out = super().forward(ids)
        if self.spoil:
            out[1, 3] = torch.nan
        return self.put(out)


@pytest.mark.parametrize(
    "put",
    [
        lambda out: {"of": {"the": [out]}},
        lambda out: types.SimpleNamespace(logits=out, words="some"),
        lambda out: (None, out),
    ],
    ids=["nested", "an object", "a tuple"],
)
def test_an_output_of_any_form_is_judged(put):
    torch.manual_seed(0)
    spoiled = scanned(Wrapped(put, True), wrong.ids())
    (one,) = (finding for finding in spoiled.findings if finding["name"] == "nan")
    assert one["message"].startswith("NaN is in 1 of 26 rows of the output.")
    assert scanned(Wrapped(put, False), wrong.ids()).verdict["line"].startswith("Healthy")


@pytest.mark.parametrize("ids", [torch.tensor([[7]]), torch.full((1, 12), 7)], ids=["one token", "one word"])
def test_a_text_of_one_word_accuses_nobody(ids):
    torch.manual_seed(0)
    for attend in (wrong.causal, F.scaled_dot_product_attention):
        assert not faults(scanned(wrong.model(attend), ids)) - {"zero_scores"}
