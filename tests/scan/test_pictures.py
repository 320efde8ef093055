"""Attention maps: unpacked, they are the weights of the whole matrix; long texts and large models stay small; never n × n."""

import base64
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
import zoo
from attemper.scan.document import plain
from attemper.scan.examiners import maps as pictures
from attemper.scan.examiners.items import BatchItems, CurrentInput
from attemper.scan.examiners.maps import AttentionMaps
from attemper.scan.examiners.neighbours import Neighbours
from attemper.scan.examiners.sinks import Sinks
from attemper.scan.examiners.text_dependence import TextDependence
from attemper.watch import weights
from attemper.watch.attach.measuring import vitals_of
from attemper.watch.call import AttentionCall, CallInfo
from examined import examine, items_of, rounding


def numbers(text, kind, *shape):
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=f"<{kind}").astype(np.int64)).reshape(shape)


def unpacked(picture):
    """The weights of a picture, (H, queries, keys), NaN where a row was not kept, written as the contract says."""
    heads, queries, keys = picture["heads"], picture["queries"], picture["keys"]
    if picture["format"] == "dense":
        bits = picture["bits"]
        return numbers(picture["data"], f"u{bits // 8}", heads, queries, keys).double() / (2**bits - 1)
    rows, k = picture["rows"], picture["k"]
    places = numbers(picture["indices"], "u2" if keys <= 65535 else "u4", heads, len(rows), k)
    found = torch.full((heads, queries, keys), torch.nan, dtype=torch.float64)
    found[:, rows] = 0.0
    largest = numbers(picture["weights"], "u2", heads, len(rows), k).double() / 65535
    found[:, rows] = found[:, rows].scatter(-1, places, largest)
    return found


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "gpt_neo", "by_hand", "vit"])
def test_a_picture_is_the_whole_matrix_without_padding(name):
    subject, examiner = zoo.make(name), AttentionMaps()
    if subject.keep is not None:
        examiner.current.items = items_of(subject)
    matrices = examine(subject, examiner)
    found = {(one["layer"], one["kind"], one["input"]): one for one in plain(examiner.attention())}
    assert len(found) == 2 * len(matrices)
    assert examiner.notes == []
    for matrix in matrices:
        for item in range(2):
            picture = found[matrix.layer, matrix.kind, item]
            start, stop = matrix.span(item)
            first, last = (start, stop) if matrix.kind == "self" else (0, matrix.logits.shape[-1])
            expected = matrix.weights[item, :, start:stop, first:last]
            assert (picture["format"], picture["bits"]) == ("dense", 16)
            assert unpacked(picture).shape == expected.shape
            assert (unpacked(picture) - expected).abs().max() <= rounding(matrix) + 0.5 / 65535


class Layers(nn.Module):
    """Self-attention on random q and k, so many layers and heads."""

    def __init__(self, layers, heads, width=16):
        super().__init__()
        self.layers = nn.ModuleList(Drawn(heads, width) for _ in range(layers))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


class Drawn(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads, self.width = heads, width

    def forward(self, x):
        self.q, self.k = torch.randn(2, 1, self.heads, x.shape[1], self.width)
        return F.scaled_dot_product_attention(self.q, self.k, self.k)


def drawn(model, lengths, image=False):
    examiner = AttentionMaps()
    watch = attemper.watch(model, examiners=[examiner])
    with torch.no_grad(), watch:
        for number, length in enumerate(lengths):
            examiner.current.items = BatchItems((number,), image=image)
            model(torch.zeros(1, length, 1))
    return examiner


@pytest.mark.parametrize(
    ("layers", "heads", "length", "form"),
    [(2, 4, 100, ("dense", 16)), (3, 12, 128, ("dense", 8)), (6, 12, 128, ("top", None)), (2, 4, 129, ("top", None))],
)
def test_the_format_follows_the_size(layers, heads, length, form):
    model = Layers(layers, heads)
    found = plain(drawn(model, [length]).attention())
    assert [(one["format"], one.get("bits")) for one in found] == [form] * layers
    last = found[-1]
    layer = model.layers[-1]
    whole = attemper.weights(layer.q.double(), layer.k.double())[0]
    if form[0] == "dense":
        assert (unpacked(last) - whole).abs().max() <= 1e-6 + 0.5 / (2 ** form[1] - 1)
        return
    assert last["rows"] == list(range(length))
    shown, limit = unpacked(last), 1e-6 + 0.5 / 65535
    assert (shown.topk(8, -1).values - whole.topk(8, -1).values).abs().max() <= limit
    assert (shown - whole).where(shown > 0, 0).abs().max() <= limit
    assert ((shown > 0).sum(-1) <= 8).all()


def small(picture):
    """The shares of a thumbnail, (H, rows, columns), as the contract says."""
    found = picture["thumbnail"]
    return numbers(found["data"], "u1", picture["heads"], found["rows"], found["columns"]).double() / 255


def blocks(whole, rows, columns):
    """The same from the whole matrix: the sum over each block of keys, the mean over each block of queries."""
    queries, keys = whole.shape[-2:]
    at = torch.arange(queries) * rows // queries, torch.arange(keys) * columns // keys
    mean = [
        torch.stack([whole[:, at[0] == row][..., at[1] == column].sum(-1).mean(-1) for column in range(columns)], -1)
        for row in range(rows)
    ]
    return torch.stack(mean, 1)


@pytest.mark.parametrize(
    ("layers", "heads", "length", "side"), [(2, 4, 129, 16), (2, 4, 300, 16), (2, 1500, 13, 8), (1, 4200, 9, 0)]
)
def test_a_thumbnail_shares_out_the_whole_weight(layers, heads, length, side, monkeypatch):
    monkeypatch.setattr(pictures, "COARSE", 0)
    model = Layers(layers, heads, width=4)
    examiner = drawn(model, [length])
    found = plain(examiner.attention())
    if not side:
        assert "thumbnail" not in found[0]
        assert examiner.notes == [
            f"the thumbnails of {heads} heads are made from their largest weights, because there are so many"
        ]
        return
    layer = model.layers[-1]
    whole = attemper.weights(layer.q.double(), layer.k.double())[0]
    shares = small(found[-1])
    assert shares.shape == (heads, min(side, length), min(side, length))
    assert (shares.sum(-1) - 1).abs().max() <= 0.5 * side / 255 + 1e-6
    if side == pictures.SIDES[0]:
        assert (shares - blocks(whole, *shares.shape[1:])).abs().max() <= 0.5 / 255 + 1e-6


def test_a_long_text_keeps_rows_from_the_first_to_the_last():
    found = plain(drawn(Layers(1, 2), [1500]).attention())[0]
    assert len(found["rows"]) == pictures.ROWS
    assert (found["rows"][0], found["rows"][-1]) == (0, 1499)
    assert found["rows"] == sorted(set(found["rows"]))


@pytest.mark.parametrize(
    ("layers", "heads", "lengths"),
    [(6, 12, [512]), (6, 12, [300, 300]), (24, 16, [200]), (6, 12, [100, 100, 512]), (6, 12, [128] * 4)],
)
def test_a_report_stays_small(layers, heads, lengths):
    found = plain(drawn(Layers(layers, heads, width=4), lengths).attention())
    assert len(found) == layers * len(lengths)
    assert len(json.dumps(found)) < 3_000_000
    assert all(len(one.get("rows", [0])) > 0 for one in found)
    tops = [one for one in found if one["format"] == "top"]
    assert sum(len(one["thumbnail"]["data"]) for one in tops) <= 4 / 3 * pictures.SMALL + 4 * len(tops)


@pytest.mark.parametrize(
    ("layers", "heads", "length", "form", "rows"),
    [(1, 4, 197, "dense", 197), (2, 4, 197, "top", 197), (12, 12, 197, "top", 42), (2, 16, 577, "top", 192)],
)
def test_of_an_image_whole_rows_or_their_64_largest_weights_are_kept(layers, heads, length, form, rows):
    found = plain(drawn(Layers(layers, heads, width=4), [length], image=True).attention())
    assert {one["format"] for one in found} == {form}
    assert {one.get("bits", 16) for one in found} == {16}  # a 200th of a row's weight is a step of 8 bits
    assert {one.get("k", 64) for one in found} == {64}
    assert {len(one.get("rows", range(length))) for one in found} == {rows}
    assert len(json.dumps(found)) < 3_000_000


def test_only_the_first_texts_are_drawn_and_it_is_said():
    examiner = drawn(Layers(1, 2), [10] * 6)
    assert [one["input"] for one in plain(examiner.attention())] == list(range(pictures.TEXTS))
    assert examiner.notes == ["the report shows the attention weights of the first 4 inputs only"]


def test_weights_shared_by_layers_are_drawn_once_and_it_is_said():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Drawn(2, 8)

        def forward(self, x):
            return self.inner(x) + self.inner(x)

    examiner = drawn(Twice(), [10])
    assert len(plain(examiner.attention())) == 1
    assert examiner.notes == ["inner: runs more than once in a pass; the weights of its first call are shown"]


def test_of_a_batch_the_first_item_is_drawn():
    subject, examiner = zoo.make("bert"), AttentionMaps()
    examiner.current.items = BatchItems((0,))
    (first, _) = examine(subject, examiner)
    found = plain(examiner.attention())[0]
    assert (found["input"], found["queries"]) == (0, zoo.LENGTH)
    assert (unpacked(found) - first.weights[0]).abs().max() <= rounding(first) + 0.5 / 65535


class Largest(TorchDispatchMode):
    """The most memory that any one result holds; a view holds that of its base."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("examiner", [Sinks, Neighbours, TextDependence, AttentionMaps])
@pytest.mark.parametrize("hand_written", [False, True])
def test_a_text_of_8192_tokens_fits(examiner, hand_written):
    """One layer of 8 heads: n × n would be 2 GiB of float32; an examiner makes nothing larger than q, k and its budget."""
    length, heads = 8192, 8
    q, k = torch.randn(1, heads, length, 16), torch.randn(1, heads // 2, length, 16)
    info = CallInfo.of("sdpa", "self", q, k, scale=None, causal=True, mask=None)
    call = AttentionCall(info, (), q, k, causal=True)
    vitals = vitals_of(call, attemper.vitals.SIGNS, "auto")
    if hand_written:  # the model's own matrix; a view stands for it, so that the test needs no n × n either
        call.logits = torch.zeros(1, 1, 1, 1).expand(1, heads, length, length)
    current = CurrentInput(BatchItems(special=((True, *[False] * (length - 1)),)))
    looking = examiner() if examiner is Neighbours else examiner(current)
    with Largest() as largest:
        seen = looking.look(call, vitals, None)
    assert 0 < largest.bytes <= 4 * max(weights.BUDGET, q.numel())
    looking.keep("layer", call, seen)
