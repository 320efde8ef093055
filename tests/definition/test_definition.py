"""The reference is right: it equals torch's SDPA, the textbook formulas and closed forms, and its gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

import attemper
from attemper.kernels.reference import define
from attemper.operation.call import prepare
from cases import GRID, pairwise
from close import assert_float64
from serving import ON_CPU

F64_GRID = {**GRID, "dtype": ["f64"], "window": [None], "softcap": [None], "scale": ["default"]}


@pytest.mark.parametrize("case", pairwise(F64_GRID), ids=str)
def test_output_equals_torch_sdpa(case):
    tensors = case.tensors()
    query, key, value, mask = (tensors.get(name) for name in ("query", "key", "value", "mask"))
    rows, keys = case.lengths
    if case.causal:
        band = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows if case.causal == "lower_right" else 0)
        if mask is None or mask.dtype == torch.bool:
            mask = band if mask is None else mask & band
        else:
            mask = mask.masked_fill(~band, float("-inf"))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    options = {"mask": tensors["mask"]} if "mask" in tensors else {}
    actual = attemper.attention(query, key, value, causal=case.causal, **options, kernel="reference").output
    assert_float64(actual, expected)


def test_window_and_softcap_by_hand():
    q, k, v = torch.randn(3, 1, 6, 4, dtype=torch.float64)
    z = 2.0 * torch.tanh(q @ k.mT / math.sqrt(4) / 2.0)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    both = z.masked_fill((i - j).abs() >= 2, float("-inf")).softmax(-1) @ v
    past = z.masked_fill((i - j >= 2) | (j > i), float("-inf")).softmax(-1) @ v
    assert_float64(attemper.attention(q, k, v, window=2, softcap=2.0, kernel="reference").output, both)
    causal = attemper.attention(q, k, v, window=2, softcap=2.0, causal=True, kernel="reference").output
    assert_float64(causal, past)


def test_lower_right_window_counts_from_the_last_query():
    """With a KV cache the one new query is the last position: a window of 3 shows it the last three keys."""
    q, k, v = (torch.randn(1, n, 4, dtype=torch.float64) for n in (1, 9, 9))
    seen = attemper.attention(q, k, v, causal="lower_right", window=3)
    last = attemper.attention(q, k[:, -3:], v[:, -3:])
    assert_float64(seen.output, last.output)
    assert seen.vitals.visible.item() == 3


def test_vitals_are_the_textbook_formulas():
    q, k, v = torch.randn(3, 2, 3, 7, 5, dtype=torch.float64)
    vitals = attemper.attention(q, k, v, kernel="reference").vitals
    z = q @ k.mT / math.sqrt(5)
    p = z.softmax(-1)
    expected = {
        "visible": torch.full((2, 3, 7), 7, dtype=torch.int32),
        "mean": z.mean(-1),
        "variance": z.var(-1, correction=0),
        "peak": z.amax(-1),
        "lse": z.logsumexp(-1),
        "entropy": -(p * p.log()).sum(-1),
        "sum_p2": (p * p).sum(-1),
        "top_weight": p.amax(-1),
        "effective_keys": (-(p * p.log()).sum(-1)).exp(),
        "evenness": -(p * p.log()).sum(-1) / math.log(7),
        "jacobian_trace": torch.stack([torch.diag(r) - torch.outer(r, r) for r in p.flatten(0, -2)])
        .diagonal(dim1=-2, dim2=-1)
        .sum(-1)
        .view(2, 3, 7),
    }
    for name, sign in expected.items():
        assert_float64(getattr(vitals, name), sign, name)


def test_weights_and_argmax_are_part_of_the_definition():
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    definition = define(prepare("test", q, k, v, causal=True).problem)
    assert_float64(definition.weights @ v, definition.output)
    assert torch.equal(definition.argmax, definition.weights.argmax(-1))


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_row_without_keys(kernel):
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    mask = torch.tensor([True, True, False, True])[:, None] & torch.ones(4, 4, dtype=torch.bool)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    output, vitals = attemper.attention(*leaves, mask=mask, kernel=kernel)
    row = {name: getattr(vitals, name)[0, 0, 2].item() for name in (*vitals.measured, "top_weight", "effective_keys")}
    assert row == {
        "visible": 0,
        "mean": 0.0,
        "variance": 0.0,
        "peak": -math.inf,
        "lse": -math.inf,
        "entropy": 0.0,
        "sum_p2": 0.0,
        "top_weight": 0.0,
        "effective_keys": 0.0,
    }
    assert vitals.jacobian_trace[0, 0, 2] == 0
    assert vitals.evenness[0, 0, 2].isnan()
    assert torch.equal(output[0, 0, 2], torch.zeros(8))
    (output.sum() + vitals.entropy.sum() + vitals.variance.sum() + vitals.sum_p2.sum()).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
    assert torch.equal(leaves[0].grad[0, 0, 2], torch.zeros(8))


def test_a_mask_of_large_negatives_hides_keys_but_follows_the_softmax():
    """-1e9 is how people write a mask: such keys are not visible, and a row of nothing else attends evenly, as in torch."""
    q, k, v = torch.randn(3, 1, 1, 4, 8, dtype=torch.float64)
    mask = torch.zeros(4, 4, dtype=torch.float64)
    mask[1, 2:] = -1e9
    mask[3] = torch.finfo(torch.float32).min
    output, vitals = attemper.attention(q, k, v, mask=mask)
    assert vitals.visible.tolist() == [[[4, 2, 4, 0]]]
    assert_float64(output[0, 0, 3], v[0, 0].mean(0))
    z = q @ k.mT / math.sqrt(8)
    assert_float64(vitals.mean[0, 0, 1], z[0, 0, 1, :2].mean())
    assert_float64(vitals.variance[0, 0, 1], z[0, 0, 1, :2].var(correction=0))
    assert vitals.variance[0, 0, 3] == 0


def test_equal_logits_give_the_peak_gradient_to_the_lowest_key():
    q = torch.ones(1, 1, 2, 4, requires_grad=True)
    k = torch.ones(1, 1, 3, 4, requires_grad=True)
    for kernel in ON_CPU:
        vitals = attemper.attention(q, k, k, kernel=kernel).vitals
        (grad,) = torch.autograd.grad(vitals.peak.sum(), k)
        assert grad[0, 0, :, 0].tolist() == [1.0, 0.0, 0.0], kernel
