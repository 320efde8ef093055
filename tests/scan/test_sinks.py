"""Weight on first and special tokens, evenness without them, and weight on neighbours, against whole matrices in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
import zoo
from attemper.scan.examiners import sinks
from attemper.scan.examiners.items import BatchItems
from attemper.scan.examiners.neighbours import OFFSETS, Neighbours
from attemper.scan.examiners.sinks import Sinks
from close import assert_float64, in_float32, in_float64
from examined import examine, items_of, rounding

MODELS = [
    "bert",
    "gpt2",
    "llama",
    "mistral",
    "t5",
    "gemma2",
    "gpt_neo",
    "deberta",
    "torch_transformer",
    "by_hand",
    "vit",
]


def judged(matrix, reading):
    """Sink weight by name, and evenness without the sinks, from whole rows; per head, in float64."""
    weights, visible = matrix.weights, matrix.visible
    batch, heads, length, keys = weights.shape
    by_name, rows = {}, torch.zeros(heads)
    even, even_rows = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads)
    for item in range(batch):
        start, stop = matrix.span(item) if matrix.kind == "self" and length == keys else (0, keys)
        tokens, special = reading.tokens[item], reading.special[item]
        if len(tokens) == stop - start:
            named = {start + i: token for i, token in enumerate(tokens) if special[i]}
        else:
            named = {start: sinks.FIRST}
        for head in range(heads):
            for row in matrix.keep[item].nonzero().flatten().tolist():
                line, seen = weights[item, head, row], int(visible[item, head, row])
                if seen >= 8:
                    rows[head] += 1
                    for column, name in named.items():
                        by_name.setdefault(name, torch.zeros(heads, dtype=torch.float64))[head] += line[column]
                rest = line.clone()
                rest[list(named)] = 0
                left = seen - int((matrix.logits[item, head, row, list(named)] > -1e4).sum())
                if left >= 2 and rest.sum() > sinks.LEAST_REST:
                    even[head] += torch.special.entr(rest / rest.sum()).sum() / math.log(left)
                    even_rows[head] += 1
    return by_name, rows, even / even_rows


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_sinks_are_those_of_the_whole_matrix(name):
    subject, examiner = zoo.make(name), Sinks()
    reading = examiner.current.items = items_of(subject)
    if name == "vit":
        reading = examiner.current.items = BatchItems(tokens=((), ()), special=((), ()))
    matrices = examine(subject, examiner)
    table = examiner.table()
    assert set(table) == {(matrix.layer, matrix.kind) for matrix in matrices}
    for matrix in matrices:
        by_name, rows, even = judged(matrix, reading)
        for head, row in enumerate(table[matrix.layer, matrix.kind]):
            if not rows[head]:
                assert row["sink_weight"] is None
            else:
                best = max(by_name, key=lambda name: by_name[name][head])
                assert abs(row["sink_weight"] - by_name[best][head] / rows[head]) <= rounding(matrix)
                assert row["sink_token"] == (None if best == sinks.FIRST else best)
            if math.isnan(even[head]):
                assert row["evenness_without_sinks"] is None
            else:  # what is left of a row is as exact as it is large
                assert abs(row["evenness_without_sinks"] - even[head]) <= 4 * rounding(matrix) / math.sqrt(
                    sinks.LEAST_REST
                )


def test_without_sinks_is_exact_in_float64():
    """The formula, not its rounding: the same against renormalised rows, in a model that runs in float64."""
    torch.manual_seed(1)
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    model = nn.MultiheadAttention(16, 2, batch_first=True).double().eval()
    examiner = Sinks()
    examiner.current.items = BatchItems(tokens=(tuple("[abcdefghijklmnopqr]"),), special=((True, *[False] * 18, True),))
    with torch.no_grad(), _watched(model, examiner):
        _, weights = model(x, x, x, average_attn_weights=False)
    rest = weights[0, :, :, 1:-1]
    rest = rest / rest.sum(-1, keepdim=True)
    expected = (torch.special.entr(rest).sum(-1) / math.log(18)).mean(-1)
    found = [row["evenness_without_sinks"] for row in examiner.table()["", "self"]]
    assert_float64(torch.tensor(found, dtype=torch.float64), expected)


def _watched(model, *examiners):
    return attemper.watch(model, examiners=list(examiners))


class Choosing(nn.Module):
    """One head per answer to the question which key a query takes; sharp, in a causal model or not."""

    def __init__(self, *answers, causal=False, strength=30.0):
        super().__init__()
        self.answers, self.causal, self.strength = answers, causal, strength

    def forward(self, x):
        length = x.shape[1]
        places = torch.eye(length)
        taken = torch.stack([places[[answer(i, length) for i in range(length)]] for answer in self.answers])[None]
        scale = self.strength * math.sqrt(length)
        keys = places.expand(1, len(self.answers), length, length)
        return F.scaled_dot_product_attention(taken * scale, keys, keys, is_causal=self.causal)


def test_which_token_is_the_sink_and_where():
    model = Choosing(lambda i, n: 0, lambda i, n: n - 1, lambda i, n: 4, lambda i, n: i)
    examiner = Sinks()
    with _watched(model, examiner) as watch:
        for number, words in enumerate(("the dog ran home last night again", "a cat sat by the old wall and slept")):
            tokens = ("[CLS]", *words.split(), "[SEP]")
            special = (True, *[False] * (len(tokens) - 2), True)
            examiner.current.items = BatchItems((number,), (tokens,), (special,))
            model(torch.zeros(1, len(tokens), 1))
    assert watch.record.layers == [""]
    first, last, word, itself = examiner.table()["", "self"]
    assert (first["sink_token"], first["sink_position"], round(first["sink_weight"], 4)) == ("[CLS]", 0, 1.0)
    assert (last["sink_token"], last["sink_position"], round(last["sink_weight"], 4)) == ("[SEP]", 8, 1.0)
    assert word["sink_weight"] < 1e-6
    assert itself["sink_weight"] == in_float32(2 / 20, terms=8)  # only [CLS] itself, in each of 9 + 11 rows
    assert first["evenness_without_sinks"] is None  # nothing is left


def test_the_first_token_of_different_texts_is_one_sink():
    model, examiner = Choosing(lambda i, n: 0, causal=True), Sinks()
    with _watched(model, examiner):
        for number, first in enumerate(("The", "A")):
            tokens = (first, *"bcdefghijk")
            examiner.current.items = BatchItems((number,), (tokens,), ((False,) * len(tokens),))
            model(torch.zeros(1, len(tokens), 1))
    (row,) = examiner.table()["", "self"]
    assert (row["sink_token"], row["sink_position"], round(row["sink_weight"], 4)) == ("The", 0, 1.0)


def test_a_text_too_short_to_tell_says_nothing():
    model, examiner, near = Choosing(lambda i, n: 0), Sinks(), Neighbours()
    with _watched(model, examiner, near):
        model(torch.zeros(1, 7, 1))
    assert examiner.table()["", "self"][0]["sink_weight"] is None
    assert near.table()["", "self"][0] == {"neighbour_weight": None, "neighbour_offset": None}


class Appended(nn.Module):
    """Hand-written attention with a learned column beside the keys, as gpt-oss has it."""

    def __init__(self):
        super().__init__()
        self.packed, self.column = nn.Linear(16, 48), nn.Parameter(torch.full((1, 2, 1, 1), 3.0))

    def forward(self, x):
        q, k, v = self.packed(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(8)
        scores = torch.cat([scores, self.column.expand(x.shape[0], 2, x.shape[1], 1)], -1)
        self.weights = scores.softmax(-1)
        return self.weights[..., :-1] @ v


@pytest.mark.usefixtures("float64")
def test_a_learned_column_is_a_sink_of_its_own():
    model, examiner = Appended(), Sinks()
    with torch.no_grad(), _watched(model, examiner):
        model(torch.randn(1, 12, 16))
    column = model.weights[0, :, :, -1].mean(-1)
    for head, row in enumerate(examiner.table()["", "self"]):
        assert row["sink_weight"] == in_float64(column[head].item())
        assert (row["sink_token"], row["sink_position"]) == (None, None)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "by_hand", "torch_encoder_norm_first"])
def test_neighbours_are_those_of_the_whole_matrix(name):
    subject, examiner = zoo.make(name), Neighbours()
    for matrix in examine(subject, examiner):
        weights = matrix.weights
        counted = matrix.keep[:, None, :] & (matrix.visible >= 8)
        for head, row in enumerate(examiner.table()[matrix.layer, matrix.kind]):
            means = {}
            for offset in OFFSETS:
                line = torch.zeros(counted[:, head].shape, dtype=torch.float64)
                for i in range(max(0, -offset), line.shape[1] - max(0, offset)):
                    line[:, i] = weights[:, head, i, i + offset]
                means[offset] = (line * counted[:, head]).sum() / counted[:, head].sum()
            if not counted[:, head].any():  # a window of 5
                assert row["neighbour_weight"] is None
                continue
            best = max(means, key=means.get)
            assert row["neighbour_offset"] == best
            assert abs(row["neighbour_weight"] - means[best]) <= rounding(matrix)


def test_cross_attention_has_no_neighbours():
    examiner = Neighbours()
    examine(zoo.make("whisper"), examiner)
    assert {kind for _, kind in examiner.table()} == {"self"}
