"""What bad input gets from the modules and the rules: one exact sentence each."""

import warnings

import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm

import attemper
from attemper.errors import InputError

X = torch.randn(2, 5, 24)
with warnings.catch_warnings(action="ignore"):  # torch calls nested tensors a prototype
    NESTED = torch.nested.nested_tensor([X[0], X[1, :3]])


def build(**options):
    return attemper.MultiHeadAttention(24, 4, batch_first=True, **options)


KERNELS = ", ".join(repr(name) for name in ("auto", *attemper.kernels.KERNELS))
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
        "MultiHeadAttention(): `heads` must be a whole number, at least 1; got 0. Use heads=8.",
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
        "MultiHeadAttention(): `query` must be 24 wide; got 16 (shape (2, 5, 16)). "
        "Give the constructor its width, or project it.",
    ),
    "dimensions": (
        lambda: build()(X, X[0], X[0]),
        "MultiHeadAttention(): `key` must be (length, width), or 3-d with a batch, and all with the same "
        "number of dimensions; got shape "
        "(5, 24). Use key.unsqueeze(0) to add a batch.",
    ),
    "not a tensor": (
        lambda: build()([1]),
        "MultiHeadAttention(): `query` must be a torch.Tensor; got list. Use torch.as_tensor(query).",
    ),
    "mask shape": (
        lambda: build()(X, attn_mask=torch.zeros(5, 6, dtype=torch.bool)),
        "MultiHeadAttention(): `attn_mask` must have shape (5, 5) or (8, 5, 5), (Lq, Lk) or (B·heads, Lq, Lk); got (5, 6). "
        "One mask per sequence is mask.repeat_interleave(4, 0).",
    ),
    "mask of integers": (
        lambda: build()(X, attn_mask=torch.zeros(5, 5, dtype=torch.int64)),
        "MultiHeadAttention(): `attn_mask` must be boolean (True = hidden, as in torch.nn.MultiheadAttention) or floating "
        "point (added to the logits); got torch.int64. Use attn_mask.bool().",
    ),
    "padding shape": (
        lambda: build()(X, key_padding_mask=torch.zeros(5, 2, dtype=torch.bool)),
        "MultiHeadAttention(): `key_padding_mask` must have shape (2, 5), (B, Lk); got (5, 2). "
        "For one per query and key use attn_mask.",
    ),
    "nested with a mask": (
        lambda: build()(NESTED, attn_mask=torch.zeros(5, 5)),
        "MultiHeadAttention(): a nested tensor is accepted only for self-attention, batch first and without masks. Pad it with "
        "to_padded_tensor(0.0), and hide the padding with key_padding_mask.",
    ),
    "mask of a list": (
        lambda: build()(X, attn_mask=[[1]]),
        "MultiHeadAttention(): `attn_mask` must be a torch.Tensor; got list. Use torch.as_tensor(attn_mask).",
    ),
    "batch": (
        lambda: build()(X, X[:1], X[:1]),
        "MultiHeadAttention(): `key` must have query's batch of 2; got 1 (shape (1, 5, 24)). The batch is dimension 0 with "
        "batch_first=True.",
    ),
    "value length": (
        lambda: build()(X, X, X[:, :3]),
        "MultiHeadAttention(): `value` must have length 5 like `key`; got 3 (shape (2, 3, 24)). Each key has one value.",
    ),
    "widths": (
        lambda: build(kdim=0),
        "MultiHeadAttention(): `kdim` must be a whole number, at least 1; got 0. Use kdim=512.",
    ),
    "a layer that is no place": (
        lambda: build(rule="layer", layer=1.5),
        "MultiHeadAttention(): `layer` must be a whole number, at least 0; got 1.5. Use layer=0.",
    ),
    "kernel": (
        lambda: build(kernel="blokwise"),
        f"MultiHeadAttention(): unknown kernel 'blokwise'. Did you mean 'blockwise'? Known: {KERNELS}.",
    ),
    "gain": (
        lambda: attemper.rule("learned").scale(head_dim=4, gain="a"),
        "rule('learned').scale(): `gain` must be a number or a tensor; got 'a'.",
    ),
    "additive width": (
        lambda: attemper.AdditiveAttention(24)(X, X[..., :8]),
        "AdditiveAttention(): `key` must be 24 wide; got 8 (shape (2, 5, 8)). Give the constructor its width, or project it.",
    ),
    "additive padding mask": (
        lambda: attemper.AdditiveAttention(24)(X, X[:, :4], mask=torch.ones(2, 4, dtype=torch.bool)),
        "AdditiveAttention(): `mask` must broadcast to (2, 5, 4), (B, Lq, Lk); got (2, 4). For a (B, Lk) padding mask pass "
        "mask[:, None, :].",
    ),
    "parametrised": (
        lambda: attemper.MultiHeadAttention.from_torch(
            spectral_norm(torch.nn.MultiheadAttention(24, 4), "in_proj_weight")
        ),
        "from_torch(): `module` must hold its own weights; this one computes them (parametrised or pruned): it has "
        "in_proj_bias where in_proj_bias, in_proj_weight are needed. Make them plain first, with "
        "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove.",
    ),
    "not torch's": (
        lambda: attemper.MultiHeadAttention.from_torch(torch.nn.Linear(2, 2)),
        "from_torch(): `module` must be a torch.nn.MultiheadAttention; got Linear. "
        "For another attention build MultiHeadAttention(d_model, heads) and load a state dict.",
    ),
}


@pytest.mark.parametrize(("act", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_sentence(act, sentence):
    with pytest.raises(InputError) as error:
        act()
    assert str(error.value) == sentence
