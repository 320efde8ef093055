"""Calls like earlier ones, counted by the rows of their signs alone: the same record, and only where nothing else is needed.

They go that way on a GPU. Here the launch is replaced by the CPU kernel, so that everything around it is tested without one.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.attention import attention_with_detached_signs
from attemper.operation.tally import folded
from attemper.vitals import SIGNS
from attemper.watch.attach import again
from attemper.watch.examine import Examiner
from attemper.watch.routes import replace


@pytest.fixture
def counted(monkeypatch):
    """The facts of the calls that went the short way."""
    found, count_rows = [], again.count_rows

    def rows_again(query, key, causal, scale, observer):
        return folded(attemper.measure(query.detach(), key.detach(), causal=causal, scale=scale), None)

    def attention_again(query, key, value, **asked):
        output, vitals = attention_with_detached_signs(query, key, value, signs=SIGNS, **asked)
        return output, folded(vitals, None)

    def counting(facts, *rest):
        found.append(facts)
        count_rows(facts, *rest)

    monkeypatch.setattr(again, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(again, "rows_again", rows_again)
    monkeypatch.setattr(replace, "attention_again", attention_again)
    monkeypatch.setattr(replace, "unfolded", lambda query, rows: rows)
    for place in (again, replace):
        monkeypatch.setattr(place, "count_rows", counting)
    return found


class Attends(nn.Module):
    def __init__(self, masked=False, recomputes=False):
        super().__init__()
        self.project, self.masked, self.recomputes = nn.Linear(16, 48), masked, recomputes

    def forward(self, x, memory=None):
        return checkpoint(self.attend, x, memory, use_reentrant=False) if self.recomputes else self.attend(x, memory)

    def attend(self, x, memory):
        query, key, value = self.project(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        if memory is not None:
            _, key, value = self.project(memory).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
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


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_record_is_that_of_full_passes(counted, recomputes):
    model = Attends(recomputes=recomputes)
    expected = rows_of(model, X, full=True)
    assert counted == []
    assert rows_of(model, X) == expected
    # the first pass is a full one, and the second is the first to read the call
    assert len(counted) == STEPS - 2


def test_replaced_calls(counted):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 1}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off))
    ids = torch.randint(0, 32, (2, 9))

    def run(**options):
        with attemper.watch(model, replace=True, **options) as watch:
            for _ in range(STEPS):
                model.zero_grad()
                model(ids, labels=ids).loss.backward()
                watch.step()
        return watch.record.to_dicts(), [p.grad.clone() for p in model.parameters()], watch.record.facts

    rows, gradients, facts = run(full=True)
    assert counted == []
    found, others, same = run()
    assert (found, same) == (rows, facts)
    assert all(map(torch.equal, others, gradients))
    assert len(counted) == 2 * (STEPS - 1)


def test_a_mask_needs_more(counted):
    rows_of(Attends(masked=True), X)
    assert counted == []


def test_cross_attention_needs_more(counted):
    rows_of(Attends(), X, torch.randn(3, 4, 16))
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
    def fails(*args):
        raise RuntimeError("out of memory.")

    model = Attends()
    with attemper.watch(model) as watch:
        for _ in range(3):
            step(model, X)
            watch.step()
        monkeypatch.setattr(again, "rows_again", fails)
        with pytest.warns(UserWarning, match="not measured: out of memory"), pytest.warns(UserWarning, match="fewer"):
            step(model, X)
    assert watch.record.steps == [0, 1, 2]
    assert watch.unmeasured == 1
