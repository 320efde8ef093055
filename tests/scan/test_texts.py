"""Dead heads: the same weights whatever the text, against whole matrices in float64, and heads made so by construction."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
import zoo
from attemper.scan.examiners import text_dependence as texts
from attemper.scan.examiners.items import BatchItems
from attemper.scan.examiners.text_dependence import TextDependence
from close import in_float32
from examined import examine, items_of, rounding

MODELS = ["bert", "gpt2", "llama", "gpt_neo", "t5", "by_hand", "torch_encoder", "vit"]


def variation(first, second, heads):
    """The mean total variation between two texts, per head, row by row: (weights, visible, ending special tokens) of each."""
    found = []
    for head in range(heads):
        rows = []
        for row in texts.ROWS:
            lines = []
            for weights, visible, tail in (first, second):
                ends = weights.shape[-1] - tail if weights.shape[1] == weights.shape[2] else weights.shape[1]
                if row >= min(ends, weights.shape[1]) or visible[head, row] < 2:
                    break
                lines.append(weights[head, row])
            if len(lines) < 2:
                continue
            keys = min(len(line) - text[2] for line, text in zip(lines, (first, second), strict=True))
            tail = min(first[2], second[2])
            lines = [torch.cat([line[:keys], line[len(line) - tail :]]) for line in lines]
            if all(line.sum() > texts.LEAST for line in lines):
                rows.append((lines[0] / lines[0].sum() - lines[1] / lines[1].sum()).abs().sum() / 2)
        found.append(torch.stack(rows).mean() if len(rows) >= texts.FEW_ROWS else torch.tensor(math.nan))
    return found


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_distances_are_those_of_the_whole_matrix(name):
    subject, examiner = zoo.make(name), TextDependence()
    if subject.keep is not None:
        examiner.current.items = items_of(subject)
    matrices = examine(subject, examiner)
    table = examiner.table()
    compared = 0
    for matrix in matrices:
        heads, square = matrix.logits.shape[1], matrix.kind == "self"
        parts = []
        for item in range(2):
            start, stop = matrix.span(item)
            first, last = (start, stop) if square else (0, matrix.logits.shape[-1])
            known = subject.keep is not None and len(examiner.current.items.tokens[item]) == last - first
            parts.append(
                (
                    matrix.weights[item, :, start:stop, first:last],
                    matrix.visible[item, :, start:stop],
                    1 if known else 0,
                )
            )
        for head, expected in enumerate(variation(*parts, heads)):
            found = table[matrix.layer, matrix.kind][head]["text_distance"]
            assert (found is None) == bool(expected.isnan())
            if found is not None:
                compared += 1
                # rows are kept in half precision: each weight is off by half a unit of its eleventh bit
                assert abs(found - expected) <= rounding(matrix) + 2**-11, f"{matrix.layer} {head}"
    assert compared


class ByPlace(nn.Module):
    """Heads by hand: one goes by position alone, two places back; one is flat; one looks at equal words."""

    def forward(self, x):
        length, places = x.shape[1], torch.eye(x.shape[1])
        back = places[[max(0, i - 2) for i in range(length)]]
        words = F.normalize(x[0], dim=-1)
        q = torch.stack([back * 30, places * 0, F.pad(words, (0, length - words.shape[1])) * 30])
        k = torch.stack([places, places, F.pad(words, (0, length - words.shape[1]))])
        return F.scaled_dot_product_attention(q[None], k[None], k[None], scale=1.0)


def read(model, examiner, *batches):
    watch = attemper.watch(model, examiners=[examiner])
    with torch.no_grad(), watch:
        for number, batch in enumerate(batches):
            examiner.current.items = BatchItems((number,))
            model(batch)
    return [row["text_distance"] for row in examiner.table()["", "self"]]


def test_heads_made_blind_to_the_text_are_at_distance_zero():
    vocabulary = torch.randn(8, 8)  # so few that every text repeats some: over 60 seeds the distance is 0.60 to 0.77
    batches = [vocabulary[torch.randint(0, 8, (length,))][None] for length in (20, 33, 26)]
    back, flat, words = read(ByPlace(), TextDependence(), *batches)
    assert back < 1e-3
    assert flat < 1e-3
    assert words > 0.3


def test_one_text_or_the_same_text_twice_tells_nothing():
    x = torch.randn(1, 20, 8)
    assert read(ByPlace(), TextDependence(), x) == [None] * 3
    examiner = TextDependence()
    watch = attemper.watch(ByPlace(), examiners=[examiner])
    with watch:
        for number in range(2):
            examiner.current.items = BatchItems((number,), (("w",) * 20,), ((False,) * 20,))
            watch.model(x)
    assert [row["text_distance"] for row in examiner.table()["", "self"]] == [None] * 3


def test_a_layer_that_runs_twice_in_a_pass_is_not_two_texts():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = ByPlace()

        def forward(self, x):
            self.inner(x)
            return self.inner(x)

    examiner = TextDependence()
    watch = attemper.watch(Twice(), examiners=[examiner])
    with watch:
        watch.model(torch.randn(1, 20, 8))
    assert examiner.table()["inner", "self"][0]["text_distance"] is None


def test_the_text_that_differs_most_speaks_for_the_head():
    torch.manual_seed(3)
    x, other = torch.randn(2, 1, 20, 8)
    nearly = x + 0.02 * torch.randn_like(x)
    near = read(ByPlace(), TextDependence(), x, nearly)[2]
    far = read(ByPlace(), TextDependence(), x, other)[2]
    assert near < far
    assert read(ByPlace(), TextDependence(), x, nearly, other)[2] == in_float32(far, terms=8)
    assert read(ByPlace(), TextDependence(), x, other, nearly)[2] == in_float32(far, terms=8)


def test_what_is_kept_does_not_grow_with_the_text():
    assert max(texts.ROWS) < texts.REACH
    assert len(texts.ROWS) <= 32
    examiner = TextDependence()
    read(Long(), examiner, torch.zeros(1, 3000, 1))
    (sample,) = examiner._first.values()
    assert sample.body.shape == (1, len(texts.ROWS), texts.REACH)


class Long(nn.Module):
    def forward(self, x):
        q = torch.ones(1, 1, x.shape[1], 4)
        return F.scaled_dot_product_attention(q, q, q)


class AtTheEnd(nn.Module):
    """Every word looks at the last token of its text, and what ends the text looks at the first."""

    def forward(self, x):
        length, places = x.shape[1], torch.eye(x.shape[1])
        words = length - int(x.sum())
        q = places[[length - 1 if i < words else 0 for i in range(length)]][None, None]
        return F.scaled_dot_product_attention(q * 30, places[None, None], places[None, None], scale=1.0)


@pytest.mark.parametrize("endings", [(1, 1), (1, 2), (2, 1)])
def test_what_ends_a_text_is_counted_from_its_end(endings):
    model, examiner = AtTheEnd(), TextDependence()
    watch = attemper.watch(model, examiners=[examiner])
    with watch:
        for number, (length, ending) in enumerate(zip((9, 21), endings, strict=True)):
            special = (False,) * (length - ending) + (True,) * ending
            examiner.current.items = BatchItems((number,), ((f"w{number}",) * length,), (special,))
            model(torch.tensor(special).float()[None, :, None])
    ((row,),) = examiner.table().values()
    assert row["text_distance"] < 1e-3
