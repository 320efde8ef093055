"""Rows folded into heads by the native library, against the definition in heads.py, in float64."""

import pytest
import torch

import attemper
from attemper import kernels
from attemper.heads import COLUMNS
from attemper.operation import tally
from attemper.vitals import SIGNS
from attemper.watch.attach import measuring

pytestmark = pytest.mark.skipif(
    kernels.cpu_is_missing() is not None, reason="needs the native kernel; `attemper env` says why it is not there"
)

EPSILON = torch.finfo(torch.float32).eps


def fold():
    return kernels.load("cpu").summary


def folded(vitals, keep=None):
    return tally.folded(vitals, keep)


def measured(batch, heads, rows, keys=37, sharp=1.0, **options):
    query, key = torch.randn(batch, heads, rows, 20) * sharp, torch.randn(batch, heads, keys, 20)
    return attemper.measure(query, key, kernel="cpu", **options)


def judge(vitals, keep=None):
    """Within 2 × (the error of torch's operations in float32 + rounding), where float64 decides."""
    assert fold().serves(vitals)
    found, plain = folded(vitals, keep), vitals.by_head(keep)
    exact = vitals.each(lambda sign: sign.double() if sign.is_floating_point() else sign)
    truth = exact.by_head(keep)
    assert found.columns == plain.columns == truth.columns == (*COLUMNS, "peak")
    assert found.sums.dtype == found.peaks.dtype == torch.float64
    assert torch.equal(found.peaks.nan_to_num(nan=7.0), truth.peaks.nan_to_num(nan=7.0))
    for index, name in enumerate(COLUMNS):
        ours, torchs, right = (summary.sums[:, index] for summary in (found, plain, truth))
        assert torch.equal(ours.isnan(), right.isnan()), name
        if name.endswith("rows") or name in ("visible", "saturated"):
            assert torch.equal(ours, right), name
            continue
        whole = right.isfinite()
        assert torch.equal(ours[~whole & ~right.isnan()], right[~whole & ~right.isnan()]), name
        each = getattr(exact, name).nan_to_num(0.0, 0.0, 0.0)
        # each term has its own rounding, and a sum in float64 adds none worth naming
        rounding = EPSILON * each.square().sum().sqrt()
        error, plain_error = ((sums - right)[whole].abs().max() if whole.any() else 0 for sums in (ours, torchs))
        assert error <= 2 * (plain_error + rounding), (name, error, plain_error, rounding)


KEEPS = {
    "all": lambda batch, heads, rows: None,
    "per sequence": lambda batch, heads, rows: torch.rand(batch, 1, rows) > 0.4,
    "one for all": lambda batch, heads, rows: torch.rand(1, 1, rows) > 0.4,
    "per head": lambda batch, heads, rows: torch.rand(batch, heads, rows) > 0.4,
    "strided": lambda batch, heads, rows: (torch.rand(rows, 2 * batch) > 0.4).mT[::2, None],
    "none": lambda batch, heads, rows: torch.zeros(batch, 1, rows, dtype=torch.bool),
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 111])
def test_sums_and_peaks(rows, keep, poisoned):
    judge(measured(3, 5, rows), keep(3, 5, rows))


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 3, "causal": True}, {"scale": 30.0}, {"scale": 1e4}])
def test_few_keys_and_sharp_rows(options):
    judge(measured(2, 3, 37, **options))


def test_rows_without_keys_and_rows_at_the_bounds():
    mask = torch.rand(2, 1, 37, 37) > 0.9
    mask[:, :, 3] = False
    mask[:, :, 5:8] = True
    judge(measured(2, 3, 37, mask=mask))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_diverges_shows_and_its_neighbour_does_not(bad):
    query, key = torch.rand(1, 3, 19, 8), torch.rand(1, 3, 23, 8)
    query[0, 1, 4] = bad
    vitals = attemper.measure(query, key, kernel="reference")
    judge(vitals)
    summary = folded(vitals)
    assert summary.lse.isfinite().tolist() == [True, False, True]


def test_no_rows():
    vitals = measured(2, 3, 0)
    summary = folded(vitals)
    assert summary.sums.count_nonzero() == 0
    assert summary.peaks.tolist() == [-torch.inf] * 3


def test_what_is_not_served_is_folded_by_torch():
    whole = measured(1, 2, 6)
    some = attemper.measure(torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), signs=("mean", "sum_p2"))
    wide = whole.each(lambda sign: sign.double() if sign.is_floating_point() else sign)
    other = whole.each(lambda sign: sign.mT.contiguous().mT)
    flat = whole.each(lambda sign: sign[0])
    for vitals in (some, wide, other, flat):
        assert not fold().serves(vitals)
        assert torch.equal(measuring.by_head(vitals, None).sums, vitals.by_head().sums)


def test_a_watch_folds_natively(monkeypatch):
    calls = []
    native = fold().by_head
    monkeypatch.setattr(fold(), "by_head", lambda *args: calls.append(1) or native(*args))
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    with torch.no_grad(), attemper.watch(layer) as watch:
        layer(torch.randn(2, 5, 16))
    assert calls == [1]
    assert {row["rows"] for row in watch.record.to_dicts()} == {10.0}
    assert set(SIGNS) <= set(watch.record.to_dicts()[0])
