"""The native kernel where the shape decides the way: bands on long caches, transposed caches, many heads, few keys."""

import math

import pytest
import torch

import attemper
from judge import assert_values, assert_within, by_definition, judge
from native import WAYS, needed, variant
from rounding import sign_mass

pytestmark = [needed, pytest.mark.usefixtures("poisoned", "poisoned_workspace")]
each_variant = pytest.mark.usefixtures("every_variant")


def draw(rows, keys, heads=2, groups=None, dim=8, batch=1, dtype=torch.float32, turned=()):
    """Query, key and value; those that are `turned` are stored (B, H, E, L)."""
    shapes = {"query": (heads, rows), "key": (groups or heads, keys), "value": (groups or heads, keys)}
    found = {}
    for name, (many, length) in shapes.items():
        drawn = torch.randn(batch, many, *((dim, length) if name in turned else (length, dim))).to(dtype)
        found[name] = drawn.transpose(2, 3) if name in turned else drawn
    return found


def attend(tensors, **options):
    return attemper.attention(tensors["query"], tensors["key"], tensors["value"], kernel="cpu", **options)


def assert_the_signs_change_no_bit(tensors):
    for way in WAYS:
        with variant(way.partition(":")[2]):
            assert torch.equal(attend(tensors, signs=()).output, attend(tensors).output), way


END = {"causal": "lower_right", "window": 70}
BANDS = {
    "the first keys": ({"rows": 50, "keys": 900, "heads": 1}, {"causal": True}, None),
    "the first keys, few rows": ({"rows": 5, "keys": 900}, {"causal": True, "softcap": 2.0}, (5, 900)),
    "the last keys, in bfloat16": ({"rows": 41, "keys": 1501, "dtype": torch.bfloat16}, END, None),
    "the last keys": ({"rows": 41, "keys": 1501}, END, (41, 1501)),
    "the last keys, few rows": ({"rows": 3, "keys": 1501, "dim": 33}, END, (1501,)),
    "the last keys, grouped": ({"rows": 9, "keys": 1501, "heads": 4, "groups": 1}, END, (9, 1)),
    "the last keys, grouped, one row": ({"rows": 1, "keys": 1501, "heads": 6, "groups": 2}, END, None),
    "several tiles": ({"rows": 20, "keys": 1801, "heads": 1}, {"causal": "lower_right", "window": 1100}, (1, 1801)),
    "several parts": ({"rows": 2, "keys": 3901, "heads": 1}, {"causal": "lower_right", "window": 3100}, None),
    "both sides": ({"rows": 30, "keys": 901, "turned": ("key",)}, {"window": 33}, (30, 901)),
    "rows without keys": ({"rows": 40, "keys": 9}, {"causal": "lower_right", "window": 2}, None),
}


@pytest.mark.parametrize(("shape", "options", "mask"), BANDS.values(), ids=BANDS)
def test_a_band_on_a_long_cache(shape, options, mask, threads):
    """Only the keys that some row sees are in the call: arg-max, mask and gradients must still be at their own keys."""
    threads(3)
    tensors = draw(**shape)
    judge(tensors if mask is None else {**tensors, "mask": torch.randn(mask)}, options, *WAYS)


@each_variant
@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("options", [{"causal": True}, END], ids=["first", "last"])
def test_keys_that_no_row_sees_are_not_read(rows, options):
    leaves = {name: t.requires_grad_() for name, t in draw(rows, 611).items()}
    with torch.no_grad():
        unseen = torch.ones(611, dtype=torch.bool)
        unseen[:rows] = options is END
        if options is END:
            unseen[612 - rows - END["window"] :] = False
        leaves["key"][:, :, unseen] = leaves["value"][:, :, unseen] = math.nan
    output, vitals = attend(leaves, **options)
    found = torch.autograd.grad(output.sum() + vitals.peak.sum(), list(leaves.values()))
    assert all(t.isfinite().all() for t in (output, vitals.variance, *found))
    assert all(not t[:, :, unseen].any() and t[:, :, ~unseen].all() for t in found[1:])


@each_variant
@pytest.mark.parametrize("rows", [2, 20])
def test_coins_do_not_depend_on_the_band(rows):
    """Key j tosses the same coin for row i, whichever of the others are seen."""
    zero, eye = torch.zeros(1, 1, 700, 8), torch.eye(700).expand(1, 1, 700, 700)
    kept = []
    for options in ({}, END):
        torch.manual_seed(3)
        kept.append(attend({"query": zero[:, :, :rows], "key": zero, "value": eye}, dropout=0.5, **options).output != 0)
    seen = torch.ones(rows, 700, dtype=torch.bool).tril(700 - rows).triu(701 - rows - END["window"])
    assert torch.equal(kept[1], kept[0] & seen)


TURNED = {"keys": ("key",), "values": ("value",), "all": ("query", "key", "value")}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("turned", TURNED.values(), ids=TURNED)
@pytest.mark.parametrize(("rows", "keys", "dim"), [(1, 5, 8), (2, 37, 40), (5, 530, 33), (21, 70, 8)])
def test_what_is_stored_transposed(rows, keys, dim, turned):
    """Less than a vector of keys, a vector that begins among keys that are done, several tiles, more than eight rows."""
    for dtype in DTYPES:
        tensors = draw(rows, keys, heads=1, dim=dim, dtype=dtype, turned=turned)
        assert_the_signs_change_no_bit(tensors)
        if dtype == DTYPES[(rows + len(turned)) % 4] or keys < 10:
            judge(tensors, {}, *WAYS)


@each_variant
@pytest.mark.parametrize("turned", [(), ("key",)], ids=["plain", "turned"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 45), (4, 403), (30, 3), (30, 4), (30, 40)])
def test_the_backward_finds_the_scores_of_the_forward(rows, keys, turned):
    """d(lse)/d(mask) is exp(z - lse), and sums to 1. At 1e4 another order of adding is another 1e-3 of z, and would show."""
    tensors = draw(rows, keys, heads=1, dim=40, turned=turned)
    tensors["key"] = tensors["key"][:, :, :1] + 1e-4 * tensors["key"]  # so that many keys have weight
    mask = torch.zeros(rows, keys, requires_grad=True)
    scale = 1e4 / (tensors["query"].norm(dim=-1).max() * tensors["key"].norm(dim=-1).max()).item()
    lse = attend(tensors, mask=mask, scale=scale).vitals.lse
    (weights,) = torch.autograd.grad(lse.sum(), mask)
    results = by_definition(tensors | {"mask": mask.detach()}, {"scale": scale}, torch.float32)
    (plain,) = torch.autograd.grad(results[1]["lse"].sum(), results[0]["mask"])
    # every weight rounds, its exponent too, and both again in the sum; all share the rounding of ln Σ exp
    rounding = torch.finfo(torch.float32).eps * (2 * math.log(keys) + math.log2(keys))
    assert_within("Σ weights", weights.sum(-1), torch.ones(rows).double(), plain.sum(-1), rounding)


@each_variant
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_thousands_of_heads(rows, count, threads):
    """Workers use their memory again for head after head."""
    threads(count)
    tensors = draw(rows, 3, heads=60, batch=50, dim=4)
    tensors["key"][7, 7] = tensors["value"][3, 3] = math.inf
    output, vitals = attend(tensors)
    exact, plain = (by_definition(tensors, {}, dtype)[1] for dtype in (torch.float64, torch.float32))
    _, finite, problem = by_definition({n: t.nan_to_num(posinf=0.0) for n, t in tensors.items()}, {}, torch.float64)
    found = {"output": output, **{name: getattr(vitals, name) for name in vitals.measured}}
    assert_values(found, exact, plain, sign_mass(problem, finite))


CAUSAL, LOWER, CAPPED = {"causal": True}, {"causal": "lower_right"}, {"softcap": 2.0}
FEW = [(1, {}, (1, 1)), (1, CAUSAL, None), (2, {}, None), (2, LOWER, (30, 1)), (3, CAPPED, None), (3, CAUSAL, None)]
FEW += [(4, {}, (30, 4)), (4, LOWER, None), (5, {}, None)]


@pytest.mark.parametrize(("keys", "options", "mask"), FEW)
def test_many_rows_on_few_keys(keys, options, mask):
    dtype = DTYPES[keys % 4]
    tensors = draw(30, keys, heads=2, groups=1, dim=17, dtype=dtype, turned=("query",) if keys == 2 else ())
    if mask is not None:
        tensors["mask"] = torch.randn(mask).to(dtype)
    judge(tensors, options, *WAYS)
    tensors.pop("mask", None)
    assert_the_signs_change_no_bit(tensors)


@pytest.mark.parametrize("keys", [15, 16, 17, 33, 48, 49])
def test_keys_that_fill_half_a_panel(keys):
    judge(draw(13, keys, heads=1), {"causal": "lower_right"}, *WAYS)
