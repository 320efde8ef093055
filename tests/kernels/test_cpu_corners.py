"""The native kernel's corners, on every variant: rows that pad a strip, -inf scores, extreme scales and caps, ties, coins."""

import math

import pytest
import torch

import attemper
from judge import assert_values, by_definition, judge
from native import needed
from rounding import sign_mass

pytestmark = [needed, pytest.mark.usefixtures("every_variant")]


def attend(query, key, value, **options):
    return attemper.attention(query, key, value, kernel="cpu", **options)


def query_gradient(query, key, value, rows=slice(None), **options):
    query = query.clone().requires_grad_()
    output = attend(query, key, value, signs=(), **options).output
    return torch.autograd.grad(output[:, rows].sum(), query)[0]


@pytest.mark.parametrize(("count", "groups"), [(1, 1), (2, 3)])
def test_a_nan_key_stays_in_its_head_and_its_rows(count, groups):
    """101 rows fill no whole strip: what pads the last one must not be the rows of the next head."""
    torch.set_num_threads(count)
    query, key = torch.randn(1, 3, 101, 16), torch.randn(1, groups, 800, 16)
    value = torch.randn(1, groups, 800, 16)
    if groups == 1:  # only the last row of each head sees the NaN
        key, value = key[:, :, :101].clone(), value[:, :, :101]
        key[0, 0, 100] = math.nan
        clean = query_gradient(query, key, value, causal=True)[:, :, :90]
    else:
        key[0, 2, 5] = math.nan
        clean = query_gradient(query, key, value, rows=slice(2))[:, :2]
    assert clean.isfinite().all()


def test_parts_of_the_keys_share_no_row():
    """5 rows and 8 parts: each part pads its own rows, and no worker's sum is lost, however often it runs."""
    torch.set_num_threads(4)
    query, key, value = (torch.randn(1, 1, n, 8) for n in (5, 3072, 3072))
    first = query_gradient(query, key, value)
    judge({"query": query, "key": key, "value": value}, {}, "cpu")
    for _ in range(300):
        assert torch.equal(query_gradient(query, key, value), first)


def assert_defined(query, key, value, mask=None, **options):
    """Output and signs, judged; what rounding leaves is that of the finite inputs alone."""
    tensors = {"query": query, "key": key, "value": value} | ({} if mask is None else {"mask": mask})
    output, vitals = attend(query, key, value, mask=mask, **options)
    found = {"output": output, **{name: getattr(vitals, name) for name in vitals.measured}}
    exact, plain = (by_definition(tensors, options, dtype)[1] for dtype in (torch.float64, torch.float32))
    finite = {name: t.nan_to_num(0.0, 0.0, 0.0) for name, t in tensors.items()}
    _, results, problem = by_definition(finite, options, torch.float64)
    assert_values(found, exact, plain, sign_mass(problem, results))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("keys", [64, 70, 128, 1100])
class TestMinusInfinity:
    """A score of -inf is not a masked key: the row sees it and gives it no weight."""

    def test_of_every_key_leaves_the_row_empty(self, rows, keys):
        query, key, value = (
            torch.ones(1, 1, rows, 8),
            torch.full((1, 1, keys, 8), -math.inf),
            torch.randn(1, 1, keys, 8),
        )
        assert_defined(query, key, value)
        assert not attend(query, key, value).output.any()

    def test_of_some_keys_counts_and_adds_nothing(self, rows, keys):
        query, key, value = torch.rand(1, 1, rows, 8), torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, 8)
        key[0, 0, 3:60:7] = -math.inf
        assert_defined(query, key, value)
        assert_defined(query, key, value, causal="lower_right")
        assert_defined(query, key, value, mask=torch.randn(rows, keys))

    def test_of_a_bias_is_a_masked_key(self, rows, keys):
        query, key, value = torch.rand(1, 1, rows, 8), torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, 8)
        mask = torch.zeros(keys).index_fill(0, torch.tensor([3, 50]), -math.inf)
        assert_defined(query, key, value, mask=mask)

    def test_at_an_infinite_value_is_nan(self, rows, keys):
        query, key, value = torch.ones(1, 1, rows, 8), torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, 8)
        key[0, 0, 5], value[0, 0, 5, 0] = -1e4, math.inf
        assert attend(query, key, value).output[..., 0].isnan().all()
        assert attend(query, key, value).output[..., 1:].isfinite().all()


@pytest.mark.parametrize("rows", [1, 20])
def test_a_bias_of_infinity_is_the_peak(rows):
    query, key, value = torch.ones(1, 1, rows, 8), torch.randn(1, 1, 70, 8), torch.randn(1, 1, 70, 8)
    mask = torch.zeros(70)
    mask[3] = math.inf
    assert_defined(query, key, value, mask=mask)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("softcap", [1e-30, 3.0, 1e30, 1e38])
def test_a_softcap_of_any_size(rows, dtype, softcap):
    query, key, value = (torch.randn(1, 1, n, 8, dtype=dtype) for n in (rows, 70, 70))
    assert_defined(query, key, value, softcap=softcap)


@pytest.mark.parametrize("rows", [1, 20])
def test_half_precision_survives_flushed_denormals(rows):
    """3e-5 is subnormal in float16; what torch.set_flush_denormal does to float32 is not its business."""
    value = torch.full((1, 1, 4, 8), 3e-5, dtype=torch.float16)
    zero = torch.zeros(1, 1, rows, 8, dtype=torch.float16)
    torch.set_flush_denormal(True)
    try:
        output = attend(zero, torch.zeros(1, 1, 4, 8, dtype=torch.float16), value).output
    finally:
        torch.set_flush_denormal(False)
    assert (output == value[0, 0, 0, 0]).all()


@pytest.mark.parametrize("rows", [1, 20])
def test_a_bias_of_exactly_minus_ten_thousand_hides(rows):
    query, key, value = (torch.randn(1, 1, n, 8) for n in (rows, 70, 70))
    mask = torch.zeros(70).index_fill(0, torch.tensor([3, 50]), -1e4)
    assert (attend(query, key, value, mask=mask).vitals.visible == 68).all()
    assert_defined(query, key, value, mask=mask)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("climb", [3.3, 7.9, 39.9, 80.0])
@pytest.mark.parametrize("spread", [0.0, 0.125])
def test_many_logits_far_above_the_first_tile(rows, climb, spread):
    """Were the reference not raised, the squares of 15,872 weights of exp(39.9) would overflow.

    Equal terms all round the same way: sums of 16,384 of them without what rounding took had entropies off by 2.7e-5.
    """
    query, key, value = torch.zeros(1, 1, rows, 4), torch.randn(1, 1, 16384, 4), torch.randn(1, 1, 16384, 64)
    mask = torch.randn(16384) * spread
    mask[:512] -= climb
    assert_defined(query, key, value, mask=mask)


@pytest.mark.parametrize("count", [1, 4])
def test_equal_logits_of_a_long_cache(count):
    """One row and 131,072 keys in 256 tiles; with four threads also in parts, which are joined."""
    torch.set_num_threads(count)
    query, key, value = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 131072, 1), torch.randn(1, 1, 131072, 8)
    mask = torch.zeros(131072).index_fill(0, torch.arange(512), -3.3)
    assert_defined(query, key, value, mask=mask)


@pytest.mark.parametrize("rows", [1, 20])
def test_the_lowest_of_equal_peaks_gets_the_gradient(rows):
    """Equal logits in every tile, and with one row in every part of the keys."""
    torch.set_num_threads(4)
    mask = torch.zeros(rows, 4096).requires_grad_()
    zero = torch.zeros(1, 1, 4096, 8)
    vitals = attend(zero[:, :, :rows], zero, zero, mask=mask).vitals
    (found,) = torch.autograd.grad(vitals.peak.sum(), mask)
    assert torch.equal(found[:, 0], torch.ones(rows))
    assert not found[:, 1:].any()


@pytest.mark.parametrize("rows", [1, 20])
def test_the_coins_of_two_tiles_differ(rows):
    """Keys j and j + 512 are at the same place of their tiles, and toss coins of their own."""
    zero, eye = torch.zeros(1, 1, 1024, 8), torch.eye(1024).expand(1, 1, 1024, 1024)
    kept = attend(zero[:, :, :rows], zero, eye, dropout=0.5).output[0, 0] != 0
    same = (kept[:, :512] == kept[:, 512:]).double().mean().item()
    assert abs(same - 0.5) < 5 * 0.5 / math.sqrt(512 * rows)  # fair: five standard deviations


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("at", [3, 900, 2000])
def test_an_infinite_logit_makes_the_mean_infinite(rows, at):
    """In whichever tile, or part of the keys, it is met."""
    torch.set_num_threads(2)
    query, key, value = torch.rand(1, 1, rows, 8), torch.randn(1, 1, 2100, 8), torch.randn(1, 1, 2100, 8)
    key[0, 0, at] = math.inf
    assert_defined(query, key, value)


@pytest.mark.parametrize("wanted", ["query", "key", "value"])
def test_gradients_alone_are_those_of_all(wanted):
    """Parts of the keys are joined for the query's gradient, and only for it."""
    torch.set_num_threads(3)
    tensors = {name: torch.randn(1, 1, n, 8) for name, n in (("query", 20), ("key", 900), ("value", 900))}
    every = [t.clone().requires_grad_() for t in tensors.values()]
    expected = torch.autograd.grad(attend(*every).output.square().sum(), every)[list(tensors).index(wanted)]
    alone = {n: t.clone().requires_grad_(n == wanted) for n, t in tensors.items()}
    (found,) = torch.autograd.grad(attend(**alone).output.square().sum(), alone[wanted])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "keys", "heads"), [(1, 27, 1), (4, 93, 1), (2, 700, 4)])
def test_gradients_of_few_rows_with_huge_logits(rows, keys, heads):
    """Decode adds up scores in its own order; at 1e4 that is another 1e-3, and the backward must have found the same scores."""
    query, key, value = torch.randn(2, heads, rows, 3), torch.randn(2, 1, keys, 3), torch.randn(2, 1, keys, 4)
    scale = 1e4 / (query.norm(dim=-1).max() * key.norm(dim=-1).max()).item()
    judge({"query": query, "key": key, "value": value}, {"scale": scale}, "cpu")
