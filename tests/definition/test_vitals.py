"""Vitals as an object: what is read, what raises, merging shards, folding rows into heads."""

import copy
import math

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import attemper
from attemper.errors import InputError, SignNotMeasured
from attemper.vitals import SIGNS, Vitals
from close import assert_float64, assert_reordered
from serving import ON_CPU


def attend(lq=6, lk=9, **options):
    q, k, v = torch.randn(2, 3, lq, 8), torch.randn(2, 3, lk, 8), torch.randn(2, 3, lk, 8)
    return attemper.attention(q.double(), k.double(), v.double(), **options)


def test_a_sign_not_asked_for_raises_with_a_sentence():
    vitals = attend(signs=("entropy", "lse")).vitals
    assert vitals.measured == ("lse", "entropy")
    with pytest.raises(SignNotMeasured) as error:
        _ = vitals.sum_p2
    assert str(error.value) == (
        "vitals.sum_p2 was not measured: this call asked for signs=('lse', 'entropy'). "
        "Add 'sum_p2' to signs=, or use signs='all'."
    )
    with pytest.raises(SignNotMeasured, match=r"top_weight was not measured.*Add 'peak' to signs"):
        _ = vitals.top_weight
    assert not hasattr(vitals, "variance")
    with pytest.raises(AttributeError, match="no sign 'colour'"):
        _ = vitals.colour


def test_a_derived_name_asks_for_its_parts():
    assert attend(signs="top_weight").vitals.measured == ("peak", "lse")
    assert attend(signs=["evenness"]).vitals.measured == ("visible", "entropy")
    assert attend(signs=()).vitals.measured == ()
    assert attend().vitals.measured == SIGNS


def test_vitals_survive_a_copy_and_a_pickle_free_round_trip():
    vitals = attend().vitals
    again = copy.deepcopy(vitals)
    assert torch.equal(again.entropy, vitals.entropy)
    assert isinstance(tree_unflatten(*tree_flatten(vitals)), Vitals)
    assert repr(vitals) == "Vitals(visible, mean, variance, peak, lse, entropy, sum_p2; rows (2, 3, 6))"


def test_merge_gives_the_gradients_of_the_whole():
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    mask = torch.rand(5, 7) > 0.2
    mask[0] = False  # a row without keys at all
    mask[1, :3] = False  # a row that sees nothing of the first shard
    whole = attemper.attention(q, k, v, mask=mask)
    cuts = [(0, 3), (3, 3), (3, 7)]
    parts = [attemper.attention(q, k[..., a:b, :], v[..., a:b, :], mask=mask[:, a:b]) for a, b in cuts]
    merged = attemper.merge(parts)
    for name, one, other in [("output", whole.output, merged.output)] + [
        (name, getattr(whole.vitals, name), getattr(merged.vitals, name)) for name in SIGNS
    ]:
        assert_float64(other, one, name)
        if name == "visible":
            continue
        finite = one.isfinite()
        weights = torch.randn_like(one)[finite]
        expected = torch.autograd.grad((one[finite] * weights).sum(), (q, k, v), retain_graph=True, allow_unused=True)
        actual = torch.autograd.grad((other[finite] * weights).sum(), (q, k, v), retain_graph=True, allow_unused=True)
        for a, b in zip(actual, expected, strict=True):
            assert_float64(
                torch.zeros_like(q) if a is None else a, torch.zeros_like(a if b is None else b) if b is None else b
            )


@pytest.mark.parametrize("level", [-1e9, 5e3, 1e6])
def test_merge_far_from_zero_keeps_its_weights_normalised(level):
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 6, 8)
    ones, mask = torch.ones(1, 2, 6, 1), torch.full((5, 6), level)
    halves = [attemper.attention(q, k[:, :, s], ones[:, :, s], mask=mask[:, s]) for s in (slice(0, 3), slice(3, 6))]
    merged = attemper.merge(halves)
    assert_reordered(merged.output, torch.ones(1, 2, 5, 1), terms=6)
    bound = torch.full((1, 2, 5), math.log(6))
    assert_reordered(merged.vitals.entropy.maximum(bound), bound, terms=6)


FAR = {
    "-1e9": (torch.full((4,), -1e9), 3),
    "finfo.min": (torch.full((12,), torch.finfo(torch.float32).min), 2),
    "1e8": (torch.full((9,), 1e8), 5),
    "a gap": (torch.tensor([-1e9, -1e9, -1e9, -1e9 + 64]), 2),
    "one inf": (torch.tensor([0.0, 1.0, math.inf, 0.0]), 3),
    "inf twice": (torch.tensor([math.inf, 1.0, 0.0, math.inf]), 2),
    "-inf": (torch.tensor([-math.inf, -math.inf, -1e9, -1e9]), 2),
}


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize(("bias", "cut"), FAR.values(), ids=FAR)
def test_merge_gives_the_whole_however_far_from_zero(kernel, bias, cut):
    """Far from zero lse holds no digit of ln Σe: what rounding took from it goes along, through reshapes, copies and pytrees."""
    keys = len(bias)
    value = torch.arange(keys, dtype=torch.float32).view(keys, 1).requires_grad_()
    bias = bias.clone().requires_grad_()

    def part(a, b):
        return attemper.attention(torch.zeros(1, 8), torch.zeros(b - a, 8), value[a:b], mask=bias[a:b], kernel=kernel)

    whole, parts = part(0, keys), [part(0, cut), part(cut, keys)]
    carried = [
        [p._replace(vitals=p.vitals.each(lambda sign: sign.reshape(1, 1).view(1))) for p in parts],
        [tree_unflatten(*tree_flatten(p)) for p in parts],
        [p._replace(vitals=copy.deepcopy(p.vitals.each(torch.Tensor.detach))) for p in parts],
        [attemper.merge(parts[:1]), *parts[1:]],  # merged before
    ]
    for these in (parts, *carried):
        merged = attemper.merge(these)
        assert_reordered(merged.output, whole.output, keys)
        for name in (*SIGNS, "top_weight"):
            one, two = getattr(merged.vitals, name), getattr(whole.vitals, name)
            if name == "visible":
                assert torch.equal(one, two)
            else:
                assert_reordered(one, two, keys, name)
        alone = attemper.merge([p.vitals for p in these])
        assert torch.equal(alone.entropy.nan_to_num(7.0), merged.vitals.entropy.nan_to_num(7.0))
    if whole.output.isfinite():
        leaves = (value, bias) if bias.isfinite().all() else (value,)
        each = (attended.output.sum() + attended.vitals.entropy.sum() for attended in (attemper.merge(parts), whole))
        for one, two in zip(*(torch.autograd.grad(loss, leaves) for loss in each), strict=True):
            assert_reordered(one, two, keys)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_of_tied_peaks_the_lowest_key_has_the_gradient(kernel):
    key = torch.zeros(6, 8, requires_grad=True)
    parts = [attemper.measure(torch.ones(1, 8), key[a:b], kernel=kernel) for a, b in ((0, 2), (2, 2), (2, 6))]
    (grad,) = torch.autograd.grad(attemper.merge(parts).peak.sum(), key)
    assert grad.any(-1).tolist() == [True] + [False] * 5


def test_evenness_has_a_gradient_though_single_keys_have_none():
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    attemper.attention(x, x, x, causal=True).vitals.evenness[..., 1:].sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()


def test_by_head_leaves_out_rows_without_keys_whatever_was_measured():
    mask = torch.zeros(6, 9)
    mask[0] = float("-inf")
    everything = attend(mask=mask).vitals.by_head().rows.tolist()
    assert everything == [10.0] * 3
    for sign in ("visible", "lse", "peak", "sum_p2"):
        assert attend(mask=mask, signs=sign).vitals.by_head().rows.tolist() == everything, sign
    mask[0] = torch.finfo(torch.float32).min
    assert attend(mask=mask).vitals.by_head().rows.tolist() == everything


def test_merge_says_what_it_needs():
    with pytest.raises(InputError, match="at least one shard; got none"):
        attemper.merge([])
    part = attend()
    with pytest.raises(InputError, match="all Attended or all Vitals; got Attended, Vitals"):
        attemper.merge([part, part.vitals])
    with pytest.raises(InputError, match="every shard must have measured `lse`"):
        attemper.merge([attend(signs="sum_p2").vitals])
    with pytest.raises(InputError, match=r"the same rows; got visible of shapes \(2, 3, 5\), \(2, 3, 6\)"):
        attemper.merge([part, attend(lq=5)])
    with pytest.raises(InputError, match=r"unknown sign 'entorpy'. Did you mean 'entropy'"):
        Vitals(entorpy=torch.ones(1))
    # what only one part measured is left out
    mixed = attemper.merge([part.vitals, attend(signs=("lse", "peak")).vitals])
    assert mixed.measured == ("peak", "lse")


def test_by_head_is_a_mean_over_rows_and_merges_exactly():
    one, two = attend(causal=True).vitals, attend(causal=True).vitals
    summary = one.by_head().merge(two.by_head())
    for name in ("entropy", "variance", "sum_p2", "lse", "top_weight"):
        both = torch.cat([getattr(one, name), getattr(two, name)])  # (4, 3, 6)
        assert_float64(getattr(summary, name), both.mean((0, 2)))
    assert_float64(summary.peak, torch.cat([one.peak, two.peak]).amax((0, 2)))
    assert summary.rows.tolist() == [24.0] * 3
    assert not summary.sums.requires_grad
    assert [row["head"] for row in summary.to_dicts()] == [0, 1, 2]


def test_by_head_leaves_padded_and_empty_rows_out():
    vitals = attend(causal=True).vitals
    keep = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    summary = vitals.by_head(rows=keep[:, None, :])
    expected = torch.stack([vitals.entropy[:, h][keep].mean() for h in range(3)])
    assert_float64(summary.entropy, expected)
    # evenness has no meaning where there is one key; those rows do not count in it
    even = torch.stack([vitals.evenness[:, h][keep & (torch.arange(6) > 0)].mean() for h in range(3)])
    assert_float64(summary.evenness, even)
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[0] = False
    assert attend(mask=mask).vitals.by_head().rows.tolist() == [10.0] * 3


def test_saturated_share_counts_rows_with_a_choice():
    """Of 16 causal rows, those with 8 or more keys can saturate; with a huge scale all of them do."""
    q = torch.randn(1, 1, 16, 4, dtype=torch.float64)
    summary = attemper.attention(q, q, q, scale=1e4, causal=True).vitals.by_head()
    assert summary.saturable_rows.tolist() == [9.0]
    assert summary.saturated.tolist() == [1.0]
    assert attemper.attention(q, q, q, scale=0.0, causal=True).vitals.by_head().saturated.tolist() == [0.0]
    short = attemper.attention(q[..., :4, :], q[..., :4, :], q[..., :4, :]).vitals.by_head()
    assert math.isnan(short.saturated.item())


def test_by_head_says_what_is_wrong():
    vitals = attend().vitals
    with pytest.raises(InputError, match=r"`rows` must be boolean.*got torch.float32"):
        vitals.by_head(rows=torch.ones(6))
    with pytest.raises(InputError, match=r"`rows` must broadcast to \(2, 3, 6\); got \(2, 6\).*keep\[:, None, :\]"):
        vitals.by_head(rows=torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(InputError, match="`rows` must be a boolean tensor; got list"):
        vitals.by_head(rows=[True] * 6)
    with pytest.raises(InputError, match="no sign was measured"):
        attend(signs=()).vitals.by_head()
    with pytest.raises(SignNotMeasured, match=r"'sum_p2' was not measured. This summary has: rows, lse"):
        _ = attend(signs="lse").vitals.by_head().sum_p2
    with pytest.raises(InputError, match="same signs and heads"):
        vitals.by_head().merge(attend(signs="lse").vitals.by_head())


def test_to_dict_has_every_sign_that_can_be_read():
    q = torch.randn(2, 6, 8, requires_grad=True)
    vitals = attemper.attention(q, q, q).vitals
    found = vitals.to_dict()
    assert list(found) == [*SIGNS, "top_weight", "effective_keys", "evenness", "jacobian_trace"]
    assert all(torch.equal(sign, getattr(vitals, name)) for name, sign in found.items())
    assert found["evenness"].requires_grad
    assert list(attemper.measure(q, q, signs=("lse", "sum_p2")).to_dict()) == ["lse", "sum_p2", "jacobian_trace"]
