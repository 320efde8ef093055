"""What bad input gets from the modules and the rules: one exact sentence each (sentences.json)."""

import warnings

import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm

import attemper
from attemper.errors import InputError
from snapshots import Sentences

KEPT = Sentences("modules")

X = torch.randn(2, 5, 24)
with warnings.catch_warnings(action="ignore"):  # torch calls nested tensors a prototype
    NESTED = torch.nested.nested_tensor([X[0], X[1, :3]])


def build(**options):
    return attemper.MultiHeadAttention(24, 4, batch_first=True, **options)


SENTENCES = {
    "unknown rule": lambda: build(rule="sqrt_d"),
    "a rule that is not a name": lambda: attemper.rule(8),
    "layer without a layer": lambda: build(rule="layer"),
    "scale of a rule": lambda: attemper.rule("layer").scale(head_dim=64),
    "heads do not divide": lambda: attemper.MultiHeadAttention(100, 8),
    "more heads than width": lambda: attemper.MultiHeadAttention(6, 8),
    "kv heads do not divide": lambda: attemper.MultiHeadAttention(24, 12, kv_heads=5),
    "no heads": lambda: attemper.MultiHeadAttention(24, 0),
    "dropout": lambda: build(dropout=1.5),
    "signs": lambda: build(signs="entropi"),
    "width": lambda: build()(torch.randn(2, 5, 16)),
    "dimensions": lambda: build()(X, X[0], X[0]),
    "not a tensor": lambda: build()([1]),
    "mask shape": lambda: build()(X, attn_mask=torch.zeros(5, 6, dtype=torch.bool)),
    "mask of integers": lambda: build()(X, attn_mask=torch.zeros(5, 5, dtype=torch.int64)),
    "padding shape": lambda: build()(X, key_padding_mask=torch.zeros(5, 2, dtype=torch.bool)),
    "nested with a mask": lambda: build()(NESTED, attn_mask=torch.zeros(5, 5)),
    "mask of a list": lambda: build()(X, attn_mask=[[1]]),
    "batch": lambda: build()(X, X[:1], X[:1]),
    "value length": lambda: build()(X, X, X[:, :3]),
    "widths": lambda: build(kdim=0),
    "a layer that is no place": lambda: build(rule="layer", layer=1.5),
    "kernel": lambda: build(kernel="blokwise"),
    "gain": lambda: attemper.rule("learned").scale(head_dim=4, gain="a"),
    "additive width": lambda: attemper.AdditiveAttention(24)(X, X[..., :8]),
    "additive padding mask": lambda: attemper.AdditiveAttention(24)(
        X, X[:, :4], mask=torch.ones(2, 4, dtype=torch.bool)
    ),
    "parametrised": lambda: attemper.MultiHeadAttention.from_torch(
        spectral_norm(torch.nn.MultiheadAttention(24, 4), "in_proj_weight")
    ),
    "not torch's": lambda: attemper.MultiHeadAttention.from_torch(torch.nn.Linear(2, 2)),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_sentence(case):
    with pytest.raises(InputError) as error:
        SENTENCES[case]()
    name, _, said = str(error.value).partition("(): ")
    assert name.startswith(("AdditiveAttention", "MultiHeadAttention", "from_torch", "rule"))
    assert said.endswith(".")
    KEPT.compare("modules", case, str(error.value))


def test_the_file_has_these_sentences_and_no_other():
    KEPT.assert_cases("modules", SENTENCES)
