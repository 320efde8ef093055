"""Calls that a plan knows, of which a watch needs the sums alone: the same record, and only where nothing else is needed."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import attemper
from attemper import kernels
from attemper.watch.attach import measuring
from attemper.watch.attach.running import Pass
from attemper.watch.examine import Examiner


@pytest.fixture
def counted(monkeypatch):
    """The info of the calls that went the short way."""
    found, add_sums = [], Pass.add_sums

    def adding(self, info, *rest):
        found.append(info)
        add_sums(self, info, *rest)

    monkeypatch.setattr(Pass, "add_sums", adding)
    return found


class Attends(nn.Module):
    def __init__(self, mask=None, recomputes=False):
        super().__init__()
        self.project, self.mask, self.recomputes = nn.Linear(16, 48), mask, recomputes

    def forward(self, x, memory=None):
        return checkpoint(self.attend, x, memory, use_reentrant=False) if self.recomputes else self.attend(x, memory)

    def attend(self, x, memory):
        query, key, value = self.project(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        if memory is not None:
            _, key, value = self.project(memory).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        return out.transpose(1, 2).flatten(2)


STEPS = 5
X = torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(0))


def step(model, *args):
    model(*args).sum().backward()


def rows_of(model, *args, **options):
    with attemper.watch(model, **options) as watch:
        for _ in range(STEPS):
            step(model, *args)
            watch.step()
    assert not watch.record.notes
    return watch.record.to_dicts()


KEEP = torch.arange(40) < torch.tensor([40, 17, 3])[:, None]
MASKS = {
    "none": None,
    "causal": torch.ones(40, 40, dtype=torch.bool).tril(),
    "padding": KEEP[:, None, None],
    "padding as numbers": torch.zeros(3, 1, 1, 40).masked_fill(~KEEP[:, None, None], -torch.inf),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory", [None, torch.randn(3, 9, 16)], ids=["self", "cross"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_record_is_that_of_full_passes(counted, recomputes, mask, memory, autocast):
    lowered = autocast and mask == "padding as numbers"
    mask = MASKS[mask] if memory is None or MASKS[mask] is None else MASKS[mask][..., :9]
    model = Attends(mask, recomputes)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = rows_of(model, X, memory, full=True)
        assert counted == []
        assert rows_of(model, X, memory) == expected
    # the first pass is a full one; an op that is given another mask is learned first
    assert len(counted) == STEPS - 1 - lowered


@pytest.mark.parametrize("kernel", ["auto", "cpu"])
def test_a_call_is_summed_by_the_native_library_at_once(kernel, monkeypatch):
    summary, measured = kernels.load("cpu").summary, []
    by_head = summary.measure_by_head
    monkeypatch.setattr(summary, "measure_by_head", lambda *call: measured.append(by_head(*call)) or measured[-1])
    rows_of(Attends(), X, kernel=kernel)
    assert len(measured) == STEPS - 1
    assert None not in measured


class Crosses(nn.Module):
    """Its queries are padding where a self-attention before showed it."""

    def __init__(self):
        super().__init__()
        self.own, self.other = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, x, memory):
        x = x + self.own(x, x, x, key_padding_mask=~KEEP, need_weights=False)[0]
        return x + self.other(x, memory, memory, need_weights=False)[0]


def test_padding_of_a_self_attention_is_known_to_a_cross_attention(counted):
    model, memory = Crosses(), torch.randn(3, 9, 16)
    expected = rows_of(model, X, memory, full=True)
    assert rows_of(model, X, memory) == expected
    assert {(row["kind"], row["rows"]) for row in expected} == {("self", 60.0), ("cross", 60.0)}
    assert [info.kind for info in counted[:2]] == ["self", "cross"]


class Own(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.project, self.options = nn.Linear(16, 48), options

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        out = attemper.attention(query, key, value, signs=(), **self.options).output
        return out.transpose(1, 2).flatten(2)


OPTIONS = {
    "plain": ({}, True),
    "causal": ({"causal": True}, True),
    "scale": ({"scale": 0.3}, True),
    "mask": ({"mask": MASKS["padding"]}, True),
    "window": ({"window": 9}, False),
    "softcap": ({"softcap": 2.0}, False),
    "sink": ({"sink": torch.tensor([1.0, -2.0])}, False),
    "learned scale": ({"scale": torch.tensor([0.5, 2.0])}, False),
    "documents": ({"documents": torch.tensor([0, 7, 40])}, False),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_changes_the_signs_of_a_call_is_not_left_out(counted, name):
    options, alone = OPTIONS[name]
    model = Own(**options)
    expected = rows_of(model, X, full=True)
    assert rows_of(model, X) == expected
    assert len(counted) == (STEPS - 1 if alone else 0)


def test_numbers_added_to_the_scores_need_more(counted):
    model = Attends(torch.randn(40, 40))
    expected = rows_of(model, X, full=True)
    assert rows_of(model, X) == expected
    assert counted == []


class Looks(Examiner):
    def keep(self, name, call, found):
        pass


@pytest.mark.parametrize("options", [{"gradients": True}, {"examiners": [Looks()]}], ids=["gradients", "examiner"])
def test_a_watch_may_need_more(counted, options):
    rows_of(Attends(), X, **options)
    assert counted == []


def test_given_rows_need_more(counted):
    model, keep = Attends(), torch.ones(3, 40, dtype=torch.bool)
    keep[:, 5:] = False
    with attemper.watch(model) as watch:
        watch.rows(keep)
        for _ in range(STEPS):
            step(model, X)
            watch.step()
    assert counted == []
    assert {row["rows"] for row in watch.record.to_dicts()} == {15.0}


def test_two_watches_need_more(counted):
    model = Attends()
    with attemper.watch(model) as one, attemper.watch(model) as two:
        for _ in range(STEPS):
            step(model, X)
            one.step()
            two.step()
    assert counted == []
    assert one.record.to_dicts() == two.record.to_dicts()


def test_a_call_that_cannot_be_measured_is_reported(counted, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("out of memory.")

    model = Attends()
    with attemper.watch(model) as watch:
        for _ in range(3):
            step(model, X)
            watch.step()
        native = watch.observer.native
        monkeypatch.setattr(*((measuring, "attend") if native is None else (native, "measure_by_head")), fails)
        with pytest.warns(UserWarning, match="not measured: out of memory"), pytest.warns(UserWarning, match="fewer"):
            step(model, X)
    assert watch.record.steps == [0, 1, 2]
    assert watch.unmeasured == 1
