"""FlashAttention's functions on attemper's kernels, against a definition of them in float64."""

import pytest
import torch

import attemper
import packed
from attemper.errors import InputError
from attemper.flash import flash_attn_func, flash_attn_varlen_func
from close import assert_float64

HOW = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (3, 3)},
    "behind": {"window_size": (3, 0)},
    "around": {"window_size": (2, 2)},
    "scale": {"softmax_scale": 0.7, "causal": True},
    "softcap": {"softcap": 1.5},
}
E, HEADS, GROUPS = 8, 4, 2
OFFSETS = torch.tensor([0, 3, 3, 10, 15], dtype=torch.int32)


@pytest.fixture(autouse=True)
def empty():
    yield
    packed.SEEN.clear()
    packed.GRADIENTS.clear()


def tensors(*leading, keys=None):
    shapes = [(*leading, HEADS, E), *[((*leading[:-1], keys or leading[-1]), GROUPS)] * 2]
    made = [torch.randn(shapes[0], dtype=torch.float64)]
    made += [torch.randn(*lead, groups, E, dtype=torch.float64) for lead, groups in shapes[1:]]
    return [one.requires_grad_() for one in made]


def compare(ours, theirs, inputs, how):
    found, expected = ours(*inputs, **how), theirs(*inputs, **how)
    assert_float64(found, expected)
    if "softcap" in how:
        return
    cotangent = torch.randn_like(expected)
    for one, other in zip(
        *(torch.autograd.grad((out * cotangent).sum(), inputs[:3]) for out in (found, expected)), strict=True
    ):
        assert_float64(one, other)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("keys", [9, 14, 5])
def test_dense(how, keys):
    """A window around each query needs as many keys."""
    compare(flash_attn_func, packed.dense, tensors(2, 9, keys=9 if how == "around" else keys), HOW[how])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("other_keys", [False, True])
def test_packed(how, other_keys):
    other_keys &= how != "around"
    keys = torch.tensor([0, 5, 7, 14, 20], dtype=torch.int32) if other_keys else OFFSETS.clone()
    q, k, v = tensors(15, keys=int(keys[-1]))
    compare(flash_attn_varlen_func, packed.varlen, [q, k, v, OFFSETS, keys, 7, 7], HOW[how])


def test_the_log_sum_exp_of_each_row_and_a_sink():
    q, k, v = (tensor.detach() for tensor in tensors(1, 9))
    out, lse, nothing = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected = attemper.attention(*(one.transpose(1, 2) for one in (q, k, v)), causal=True)
    assert nothing is None
    assert_float64((out.transpose(1, 2), lse), (expected.output, expected.vitals.lse))
    offsets = torch.tensor([0, 9])
    packed_out, packed_lse, _ = flash_attn_varlen_func(
        q[0], k[0], v[0], offsets, offsets, 9, 9, causal=True, return_attn_probs=True
    )
    assert_float64((packed_out, packed_lse), (out[0], lse[0]))
    sink = torch.randn(HEADS, dtype=torch.float64)
    share = torch.sigmoid(lse - sink[:, None]).transpose(1, 2).unsqueeze(-1)
    assert_float64(flash_attn_func(q, k, v, causal=True, s_aux=sink), out * share)


def test_dropout_is_asked_for():
    q, k, v = (tensor.detach() for tensor in tensors(1, 9))
    torch.manual_seed(5)
    found = flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(5)
    expected = attemper.attention(*(one.transpose(1, 2) for one in (q, k, v)), dropout=0.5, signs=()).output
    assert torch.equal(found, expected.transpose(1, 2))


def test_what_is_not_there_is_refused():
    q, k, v = tensors(1, 9, keys=5)
    for options, says in (
        ({"alibi_slopes": torch.ones(4)}, "`alibi_slopes` must be None. Use attemper.attention with a mask"),
        ({"window_size": (2, 2)}, r"`window_size` must be .* got \(2, 2\)"),
        ({"window_size": (2, 1)}, r"`window_size` must be .* got \(2, 1\)"),
    ):
        with pytest.raises(InputError, match=rf"^flash_attn_func\(\): {says}"):
            flash_attn_func(q, k, v, **options)
    with pytest.raises(InputError, match="unknown option 'softmax_scal'"):
        flash_attn_func(q, k, v, softmax_scal=1.0)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="`block_table` must be None"):
        flash_attn_varlen_func(q[0], k[0], v[0], OFFSETS, OFFSETS, block_table=torch.ones(1))
