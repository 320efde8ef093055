"""What bad input gets from treatments: one exact sentence each (sentences.json)."""

import math

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import InputError
from attemper.heads import HeadSummary
from attemper.watch.record.entry import Entry
from snapshots import Sentences, assert_told

KEPT = Sentences("treat")
MODEL = nn.TransformerEncoderLayer(16, 2, batch_first=True)
X = torch.randn(1, 9, 16)
OTHER = nn.Sequential(nn.TransformerEncoderLayer(16, 4, batch_first=True))
PLAIN = nn.MultiheadAttention(16, 2, batch_first=True)
LARGER = nn.TransformerEncoderLayer(16, 4, batch_first=True)
for one in (MODEL, OTHER, LARGER):
    attemper.projections(one, X)


def record(model=MODEL, **options):
    with torch.no_grad(), attemper.watch(model, **options) as watch:
        model(X)
    return watch.record


def peaks(*numbers, layer="self_attn"):
    summary = HeadSummary(("rows", "peak"), torch.ones(len(numbers), 1).double(), torch.tensor(numbers).double())
    return attemper.Record([Entry(0, layer, "self", tuple(range(len(numbers))), summary)])


RECORD, VITALS = record(), attemper.attention(X[None], X[None], X[None]).vitals
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def clip(model=MODEL, given=None, tau=1e-6, **options):
    return lambda: attemper.qk_clip(model, RECORD if given is None else given, tau, **options)


SENTENCES = {
    # qk_clip
    "tau 0": ("tau", clip(tau=0)),
    "tau below 0": ("tau", clip(tau=-1.0)),
    "tau nan": ("tau", clip(tau=math.nan)),
    "tau inf": ("tau", clip(tau=math.inf)),
    "tau bool": ("tau", clip(tau=True)),
    "tau as text": ("tau", clip(tau="100")),
    "alpha above 1": ("alpha", clip(alpha=1.5)),
    "alpha nan": ("alpha", clip(alpha=math.nan)),
    "alpha bool": ("alpha", clip(alpha=False)),
    "shared": ("shared", clip(shared="groups")),
    "step": ("step", clip(step="last")),
    "no such step": ("step", clip(step=7)),
    "no step": ("record", clip(given=attemper.Record())),
    "no record": ("record", clip(given=[1.0])),
    "no model": ("model", clip(model=lambda x: x)),
    "no peak": ("peak", clip(given=record(signs=("entropy", "lse")))),
    "another model": ("layer", clip(given=record(OTHER))),
    "other heads": ("heads", clip(given=record(LARGER))),
    "never searched": ("projections", clip(model=PLAIN, given=peaks(3.0, 4.0))),
    "projections of another kind": ("projections", clip(projections={"q": 1})),
    "optimizer of another kind": ("optimizer", clip(optimizer=3)),
    "a parameter that is gone": ("parameter", lambda: _without_its_parameter()),
    "rows that changed": ("rows", lambda: _after_a_change()),
    # projections
    "projections, no model": ("model", lambda: attemper.projections(print, X)),
    "projections, batch": ("batch", lambda: attemper.projections(MODEL, 3)),
    "projections, no attention": ("attention", lambda: attemper.projections(nn.Linear(16, 16), X)),
    # others
    "floor 0": ("floor", lambda: attemper.entropy_floor(VITALS, 0)),
    "floor 1": ("floor", lambda: attemper.entropy_floor(VITALS, 1.0)),
    "floor nan": ("floor", lambda: attemper.entropy_floor(VITALS, math.nan)),
    "floor bool": ("floor", lambda: attemper.floor(MODEL, True)),
    "no vitals": ("vitals", lambda: attemper.entropy_floor(X)),
    "no vitals in a list": ("vitals", lambda: attemper.entropy_floor([])),
    "weight": ("weight", lambda: attemper.floor(MODEL, weight=0)),
    "scale": ("scale", lambda: attemper.floor(MODEL, scale=-1)),
    "floor, no model": ("model", lambda: attemper.floor(print)),
    "floor twice": ("floor", lambda: _twice()),
    "eps": ("eps", lambda: attemper.add_qk_norm(MODEL, X, eps=-1)),
    "norm without projection": ("self_attn", lambda: attemper.add_qk_norm(MODEL, X)),
    "temperature without projection": ("self_attn", lambda: attemper.add_temperature(MODEL, X)),
    "rates, no optimizer": ("optimizer", lambda: attemper.scale_rates(None, MODEL)),
    "rates, no model": ("model", lambda: attemper.scale_rates(OPTIMIZER, print)),
    "rates, masters": ("float32 master", lambda: _with_masters()),
    "rates, never searched": ("projections", lambda: attemper.scale_rates(OPTIMIZER, PLAIN)),
}


def _after_a_change():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    attemper.projections(model, X)
    model.self_attn.in_proj_weight = nn.Parameter(torch.randn(24, 16))
    attemper.qk_clip(model, RECORD, 1e-6)


def _without_its_parameter():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    attemper.projections(model, X)
    model.self_attn = nn.Linear(16, 16)
    attemper.qk_clip(model, RECORD, 1e-6)


def _with_masters():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    attemper.projections(model, X)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    attemper.scale_rates(torch.optim.SGD(masters, lr=0.1), model.bfloat16())


def _twice():
    with attemper.floor(MODEL) as floored:
        floored.__enter__()


@pytest.mark.parametrize("case", SENTENCES)
def test_the_sentence(case):
    name, call = SENTENCES[case]
    before = {key: value.clone() for key, value in MODEL.state_dict().items()}
    with pytest.raises(InputError) as error:
        call()
    sentence = str(error.value)
    assert_told(sentence, sentence.partition("(")[0], name)
    assert sentence.partition("(")[0] in (
        *("qk_clip", "projections", "entropy_floor", "floor", "add_qk_norm", "add_temperature", "scale_rates"),
    )
    KEPT.compare("treat", case, sentence)
    assert all(torch.equal(value, before[key]) for key, value in MODEL.state_dict().items())


def test_the_file_has_these_sentences_and_no_other():
    KEPT.assert_cases("treat", SENTENCES)


@pytest.mark.parametrize("size", [math.nan, math.inf])
def test_scores_that_overflowed_are_left_alone(size):
    """One head above tau beside one that is NaN: Megatron's clip writes NaN here."""
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    attemper.projections(model, X)
    before = model.self_attn.in_proj_weight.clone()
    found = attemper.qk_clip(model, peaks(size, 5.0), 1.0)
    assert [(one.head, one.factor) for one in found] == [(1, 0.2)]
    assert [skipped_head.head for skipped_head in found.skipped] == [0]
    assert "the scores overflowed, which no factor undoes" in str(found)
    assert torch.equal(before[:8], model.self_attn.in_proj_weight[:8])
    assert model.self_attn.in_proj_weight.isfinite().all()


def test_what_it_prints():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    attemper.projections(model, X)
    assert str(attemper.qk_clip(model, peaks(3.0, 5.0), 10.0)) == (
        "qk_clip(): step 0: no head is above 10; the largest logit is 5, self_attn head 1."
    )
    assert str(attemper.qk_clip(model, peaks(3.0, 5.0), 4.0)) == (
        "qk_clip(): step 0: 1 head of 1 layer clipped to 4; the largest logit is 5, self_attn head 1; the smallest factor is 0.8."
    )
    assert str(attemper.qk_clip(model, peaks(-3.0, -5.0), 4.0)).startswith("qk_clip(): step 0: no head is above 4")
    assert str(attemper.qk_clip(model.requires_grad_(False), peaks(3.0, 5.0), 4.0)) == (
        "qk_clip(): step 0: nothing was clipped to 4; the largest logit is 5, self_attn head 1.\nLeft alone, or to be noted: "
        "self_attn: self_attn.in_proj_weight is frozen (requires_grad=False), so that its rows are not scaled."
    )
