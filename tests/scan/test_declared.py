"""What the user declares settles what a design and a fault have in common; and designs that need no declaration."""

import math

import pytest
import torch
import transformers
from torch import nn

import attemper
from attemper.errors import InputError
from attemper.health.faults import ATTENTION_FAULTS, FAULTS, MEANT
from scan import probed, wrong


def made(maker):
    torch.manual_seed(0)
    return maker()


def faults(found):
    return {finding["fault"] for finding in found.findings if finding["fault"] is not None}


@pytest.mark.parametrize("name", ["noise in evaluation", "√heads for √d_k", "a bias after the softmax"])
def test_a_declared_fault_is_none(name):
    case = made(probed.WRONG[name])
    (fault,) = (*case.faults, *case.also)
    accused = attemper.scan(case.model, case.inputs, deep=True)
    assert faults(accused) == {fault}
    advice = next(finding["advice"] for finding in accused.findings if finding["fault"] == fault)
    assert advice.endswith(f"If it is meant: declared={{'{fault}': True}}, or --declare {fault}.")
    found = attemper.scan(case.model, case.inputs, deep=True, declared={fault: True})
    assert faults(found) == set()
    assert found.verdict["level"] in ("ok", "note")
    assert all(one["state"] != "failed" for one in found.document["checks"])
    assert all(layer["scale"]["verdict"] == "ok" for layer in found.layers)


def test_a_declaration_of_another_fault_settles_nothing():
    case = made(probed.WRONG["√heads for √d_k"])
    assert faults(attemper.scan(case.model, case.inputs, declared={"sqrt_dmodel": True})) == {"sqrt_heads"}
    assert faults(attemper.scan(case.model, case.inputs, declared={"sqrt_heads": False})) == {"sqrt_heads"}


def test_causal_decides_where_the_model_says_nothing():
    model = made(lambda: wrong.model(nn.functional.scaled_dot_product_attention))
    silent = attemper.scan(model, wrong.ids(), deep=True)
    assert faults(silent) == set()
    assert faults(attemper.scan(model, wrong.ids(), deep=True, declared={"causal": True})) == {
        "missing_mask",
        "future_leak",
    }
    found = attemper.scan(model, wrong.ids(), deep=True, declared={"causal": False})
    (future,) = (one for one in found.document["checks"] if one["name"] == "future")
    assert (faults(found), future["state"]) == (set(), "skipped")


def test_what_can_be_declared_exists():
    assert set(FAULTS | ATTENTION_FAULTS) >= MEANT


@pytest.mark.parametrize(
    ("declared", "said"), [({"causl": True}, "Did you mean 'causal'?"), ({"causal": "yes"}, "True or False")]
)
def test_a_declaration_that_means_nothing_is_refused(declared, said):
    with pytest.raises(InputError, match="scan\\(\\): ") as raised:
        attemper.scan(nn.TransformerEncoderLayer(8, 2, batch_first=True), torch.randn(1, 6, 8), declared=declared)
    assert said in str(raised.value)


def test_the_command_takes_declarations(attemper_command):
    code, _, err = attemper_command("scan", "--declare", "causal=perhaps")
    assert code == 2
    assert "neither yes nor no" in err
    code, out, _ = attemper_command("scan", "--declare", "causal=no", "--declare", "order_ignored", "--deep")
    assert code == 0
    assert "Healthy: no problem was found." in out


class RowSelfAttention(nn.Module):
    """One attention for all rows of an alignment: scores are summed over the rows, and divided by √rows too."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.num_heads, self.scaling = heads, (width // heads) ** -0.5
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (self.num_heads, -1)) for part in (self.q, self.k, self.v))
        q = q * (self.scaling / math.sqrt(len(x)))
        weights = torch.einsum("rinhd,rjnhd->hnij", q, k).softmax(-1)
        return x + self.out(torch.einsum("hnij,rjnhd->rinhd", weights, v).flatten(-2))


class Alignment(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.row = nn.Embedding(30, 32), nn.Embedding(30, 32), RowSelfAttention()

    def forward(self, tokens):
        x = (self.words(tokens) + self.places(torch.arange(tokens.shape[2]))).permute(1, 2, 0, 3)
        return self.row(x).permute(2, 0, 1, 3)


def test_rows_that_share_one_attention_ignore_no_setting():
    draws = torch.Generator().manual_seed(0)
    for rows in (3, 5):
        tokens = torch.randint(4, 24, (1, rows, 12), generator=draws)
        found = attemper.scan(made(Alignment), tokens, deep=True)
        assert faults(found) == set()
        assert found.layers[0]["scale"]["rule"] == "sqrt_dk"


def test_sampled_queries_mix_no_positions():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sizes |= {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "lags_sequence": [1, 2],
        "num_time_features": 1,
    }
    config = transformers.InformerConfig(prediction_length=6, context_length=14, input_size=1, **sizes)
    draws = torch.Generator().manual_seed(0)
    given = {
        f"{when}_{what}": (2, length)
        for when, length in (("past", 16), ("future", 6))
        for what in ("values", "time_features")
    }
    batch = {
        name: torch.randn(*shape, 1, generator=draws) if "time" in name else torch.randn(shape, generator=draws)
        for name, shape in given.items()
    }
    batch["past_observed_mask"] = torch.ones(2, 16)
    found = attemper.scan(made(lambda: transformers.InformerModel(config)), batch, deep=True)
    assert faults(found) == set()


def test_a_scale_that_no_rule_gives_is_a_note_unless_the_module_states_it():
    case = wrong.Case(wrong.model(probed.divided_by(128**0.5)))
    assert faults(attemper.scan(case.model, case.inputs)) == {"unknown"}
    for layer in case.model.layers:
        layer.scale = 128**-0.5
    assert not faults(attemper.scan(case.model, case.inputs))
