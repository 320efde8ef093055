"""A layer that runs at several depths: each of its calls is a row of the table, the document and the report."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import attemper
from attemper.scan.show.format import short_names
from attemper.scan.show.terminal import text
from close import in_float64

LAYER = "encoder.albert_layer_groups.0.albert_layers.0.attention"


@pytest.fixture(scope="module")
def albert():
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.AlbertConfig(vocab_size=99, num_hidden_layers=4, initializer_range=0.5, **sizes)
    return transformers.AlbertModel(config).double().eval(), torch.randint(5, 99, (1, 12))


def test_each_depth_has_the_signs_that_its_own_weights_have(albert):
    model, ids = albert
    scan = attemper.scan(model, {"input_ids": ids})
    eager = transformers.AlbertModel(model.config).double().eval()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(ids, output_attentions=True).attentions
    names = [LAYER, *(f"{LAYER} (call {number})" for number in (2, 3, 4))]
    assert [layer["layer"] for layer in scan.layers] == names
    assert [layer.get("call") for layer in scan.layers] == [None, 2, 3, 4]
    for name, one in zip(names, weights, strict=True):
        found = [head["entropy"] for head in scan.heads if head["layer"] == name]
        assert found == in_float64(torch.special.entr(one[0]).sum(-1).mean(-1).tolist())
    assert len({round(head["entropy"], 3) for head in scan.heads if head["head"] == 0}) == 4


def test_the_record_of_a_scan_has_modules_for_layers(albert):
    model, ids = albert
    scan = attemper.scan(model, {"input_ids": ids})
    assert scan.record.layers == [LAYER]
    for row in scan.record.to_dicts():
        calls = [head for head in scan.heads if head["head"] == row["head"]]
        assert row["rows"] == sum(head["rows"] for head in calls) == 4 * 12
        assert row["peak"] == max(head["peak"] for head in calls)


def test_the_table_and_the_rules_count_them(albert):
    model, ids = albert
    scan = attemper.scan(model, {"input_ids": ids}, what_if=["none"], deep=True)
    shown = text(scan.document)
    assert "the last number counts its calls" in " ".join(shown.split())
    assert [line.split()[0] for line in shown.splitlines() if "%" in line and line[0].isdigit()] == ["1", "2", "3", "4"]
    assert len(scan.to_dict()["what_if"][0]["heads"]) == len(scan.heads) == 8
    assert {picture["layer"] for picture in scan.document["attention"]} == {layer["layer"] for layer in scan.layers}
    assert not [check for check in scan.to_dict()["checks"] if check["state"] == "failed"]


def test_short_names_end_with_the_call():
    places = [(f"layers.{layer}.attention{call}", "self") for layer in (0, 1) for call in ("", " (call 2)")]
    assert list(short_names(places).values()) == ["0.1", "0.2", "1.1", "1.2"]
    assert list(short_names(places[::2]).values()) == ["0", "1"]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        both = ((self.q, x), (self.k, memory), (self.v, memory))
        q, k, v = (part(one).unflatten(-1, (2, 8)).transpose(1, 2) for part, one in both)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Towers(nn.Module):
    """One encoder for two inputs, which is no second depth."""

    def __init__(self):
        super().__init__()
        self.attention = Attends()

    def forward(self, left, right):
        return self.attention(left) @ self.attention(right).mT


class Steps(nn.Module):
    """A decoder that attends once for every token that it writes."""

    def __init__(self):
        super().__init__()
        self.attention, self.cell = Attends(), nn.Linear(16, 16)

    def forward(self, memory):
        state = memory[:, :1]
        for _ in range(6):
            state = self.cell(state + self.attention(state, memory))
        return state


@pytest.mark.parametrize("model", [Towers(), Steps()], ids=["two inputs", "one query"])
def test_other_repeated_calls_are_one_layer(model):
    torch.manual_seed(0)
    inputs = tuple(torch.randn(1, 9, 16) for _ in range(2 if isinstance(model, Towers) else 1))
    assert [layer["layer"] for layer in attemper.scan(model, inputs).layers] == ["attention"]


def test_a_watch_keeps_one_row_per_head(albert):
    model, ids = albert
    with attemper.watch(model) as watch:
        model(ids)
    assert watch.record.layers == [LAYER]
