"""What bad input gets from the modules and the rules: one exact sentence each."""

import warnings

import pytest
import torch

import attemper
from attemper.errors import InputError

X = torch.randn(2, 5, 24)
with warnings.catch_warnings(action="ignore"):  # torch calls nested tensors a prototype
    NESTED = torch.nested.nested_tensor([X[0], X[1, :3]])


def build(**options):
    return attemper.MultiHeadAttention(24, 4, batch_first=True, **options)


KNOWN = "'sqrt_dk', 'none', 'dk', 'sqrt_dmodel', 'layer', 'log_n', 'learned', 'qk_norm', 'softcap'"
SENTENCES = {
    "unknown rule": (
        lambda: build(rule="sqrt_d"),
        f"rule(): unknown rule 'sqrt_d'. Did you mean 'sqrt_dk'? Known: {KNOWN}.",
    ),
    "a rule that is not a name": (lambda: attemper.rule(8), f"rule(): unknown rule 8. Known: {KNOWN}."),
    "layer without a layer": (
        lambda: build(rule="layer"),
        "MultiHeadAttention(): rule 'layer' (q·k / ((layer + 1) √d_k)) needs `layer`, the layer's place in the model, "
        "counted from 0; got none. Add layer=0.",
    ),
    "scale of a rule": (
        lambda: attemper.rule("layer").scale(head_dim=64),
        "rule('layer').scale(): `layer`, the layer's place in the model, counted from 0, must be a whole number, at least 0; "
        "got None. For example: rule('layer').scale(head_dim=64, layer=0).",
    ),
    "heads do not divide": (
        lambda: attemper.MultiHeadAttention(100, 8),
        "MultiHeadAttention(): `d_model` (=100) must be a multiple of `heads` (=8). Use d_model=96 or 104, or heads=5 or 10.",
    ),
    "more heads than width": (
        lambda: attemper.MultiHeadAttention(6, 8),
        "MultiHeadAttention(): `d_model` (=6) must be a multiple of `heads` (=8). Use d_model=8, or heads=6.",
    ),
    "kv heads do not divide": (
        lambda: attemper.MultiHeadAttention(24, 12, kv_heads=5),
        "MultiHeadAttention(): `heads` (=12) must be a multiple of `kv_heads` (=5). Use kv_heads=4 or 6.",
    ),
    "no heads": (
        lambda: attemper.MultiHeadAttention(24, 0),
        "MultiHeadAttention(): `heads` must be a whole number, at least 1; got 0.",
    ),
    "dropout": (
        lambda: build(dropout=1.5),
        "MultiHeadAttention(): `dropout` must be a probability from 0 to 1; got 1.5.",
    ),
    "signs": (
        lambda: build(signs="entropi"),
        "MultiHeadAttention(): unknown sign 'entropi' in `signs`. Did you mean 'entropy'? Known: 'all', 'visible', 'mean', "
        "'variance', 'peak', 'lse', 'entropy', 'p2', 'top_weight', 'effective_keys', 'evenness', 'jacobian_trace'.",
    ),
    "width": (
        lambda: build()(torch.randn(2, 5, 16)),
        "MultiHeadAttention(): `query` must be 24 wide; got 16 (shape (2, 5, 16)).",
    ),
    "dimensions": (
        lambda: build()(X, X[0], X[0]),
        "MultiHeadAttention(): `key` must be (L, d_model), or with a batch 3-d like `query`; got shape (5, 24).",
    ),
    "not a tensor": (lambda: build()([1]), "MultiHeadAttention(): `query` must be a torch.Tensor; got list."),
    "mask shape": (
        lambda: build()(X, attn_mask=torch.zeros(5, 6, dtype=torch.bool)),
        "MultiHeadAttention(): `attn_mask` must have shape (5, 5) or (8, 5, 5), (Lq, Lk) or (B·heads, Lq, Lk); got (5, 6).",
    ),
    "mask of integers": (
        lambda: build()(X, attn_mask=torch.zeros(5, 5, dtype=torch.int64)),
        "MultiHeadAttention(): `attn_mask` must be boolean (True = hidden, as in torch.nn.MultiheadAttention) or floating "
        "point (added to the logits); got torch.int64. Use attn_mask.bool().",
    ),
    "padding shape": (
        lambda: build()(X, key_padding_mask=torch.zeros(5, 2, dtype=torch.bool)),
        "MultiHeadAttention(): `key_padding_mask` must have shape (2, 5), (B, Lk); got (5, 2).",
    ),
    "nested with a mask": (
        lambda: build()(NESTED, attn_mask=torch.zeros(5, 5)),
        "MultiHeadAttention(): a nested tensor is taken for self-attention alone, batch first and without masks. Pad it with "
        "to_padded_tensor(0.0), and hide the padding with key_padding_mask.",
    ),
    "not torch's": (
        lambda: attemper.MultiHeadAttention.from_torch(torch.nn.Linear(2, 2)),
        "from_torch(): `module` must be a torch.nn.MultiheadAttention; got Linear.",
    ),
}


@pytest.mark.parametrize(("act", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_sentence(act, sentence):
    with pytest.raises(InputError) as error:
        act()
    assert str(error.value) == sentence
