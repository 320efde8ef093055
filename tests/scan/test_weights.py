"""Weights of chosen rows, keys and offsets are those of the whole matrix, on every model of the zoo."""

import pytest
import torch

import attemper
import zoo
from attemper.watch.attach.measuring import vitals_of
from attemper.watch.call import AttentionCall, CallInfo
from attemper.watch.weights import logits_of_keys, logits_of_offset, weights_of_rows
from close import assert_reordered
from examined import examine, rounding

ROWS = torch.tensor([8, 0, 3])
KEYS = torch.tensor([5, 0])


class Looking:
    """Keeps what the functions give for every call."""

    def __init__(self):
        self.found = []

    def look(self, call, vitals, rows):
        found = {"rows": weights_of_rows(call, vitals, ROWS), "one": weights_of_rows(call, vitals, ROWS, place=1)}
        lse = vitals.lse
        found["keys"] = (logits_of_keys(call, 1, KEYS) - lse[1].unsqueeze(-1)).exp()
        if call.info.queries == call.info.keys:
            found |= {offset: (logits_of_offset(call, offset) - lse).exp() for offset in (-2, -1, 0, 1)}
        return found

    def keep(self, name, call, found):
        self.found.append(found)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("name", zoo.ZOO)
def test_chosen_parts_are_parts_of_the_whole(name):
    looking = Looking()
    matrices = examine(zoo.make(name), looking)
    assert len(looking.found) == len(matrices)
    for matrix, found in zip(matrices, looking.found, strict=True):
        whole, real, limit = matrix.weights, matrix.keep[:, None, :, None], rounding(matrix)
        compared = {
            "rows": (whole[:, :, ROWS] - found["rows"]).where(real[:, :, ROWS], 0),
            "one": (whole[1:2, :, ROWS] - found["one"]).where(real[1:2, :, ROWS], 0),
            "keys": (whole[1][..., KEYS] - found["keys"]).where(real[1], 0),
        }
        for offset in (offset for offset in found if isinstance(offset, int)):
            expected = torch.zeros(whole.shape[:3], dtype=torch.float64)
            length = whole.shape[2]
            for i in range(length):
                if 0 <= i + offset < length:
                    expected[:, :, i] = whole[:, :, i, i + offset]
            compared[offset] = (expected - found[offset]).where(real[..., 0], 0)
        for part, error in compared.items():
            assert error.abs().max() <= limit, f"{matrix.layer} {part}"


CASES = [
    {},
    {"causal": True},
    {"causal": "lower_right"},
    {"window": 4},
    {"causal": True, "window": 3},
    {"softcap": 2.0},
    {"scale": 0.7},
    {"mask": "bool"},
    {"mask": "additive", "causal": True},
    {"mask": "heads"},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_option_of_a_call_is_honoured(options, dtype):
    q, k = torch.randn(2, 6, 9, 8).to(dtype), torch.randn(2, 3, 11, 8).to(dtype)
    shapes = {"bool": (2, 1, 9, 11), "additive": (1, 1, 9, 11), "heads": (1, 6, 1, 11)}
    options = dict(options)
    if "mask" in options:
        drawn = torch.randn(shapes[options["mask"]])
        options["mask"] = drawn.to(dtype) if options["mask"] == "additive" else drawn > -0.5
    call = call_of(q, k, **options)
    vitals = vitals_of(call, attemper.vitals.SIGNS, "reference")
    rows = torch.tensor([8, 0, 4, 4])
    expected = attemper.weights(q, k, **options)[:, :, rows]
    found = weights_of_rows(call, vitals, rows)
    assert found.dtype == torch.float32
    assert found.shape == (2, 6, 4, 11)
    eps = torch.finfo(torch.float32).eps
    assert (found - expected).abs().max() <= 16 * eps
    columns = torch.tensor([10, 2])
    for item in range(2):
        weights = (logits_of_keys(call, item, columns)[:, rows] - vitals.lse[item][:, rows].unsqueeze(-1)).exp()
        assert (weights.nan_to_num(0) - expected[item][..., columns]).abs().max() <= 64 * eps


def test_a_key_outside_of_the_band_never_reaches_a_row():
    q, k = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    k[0, 0, 5] = torch.nan
    call = call_of(q, k, causal=True, mask=torch.zeros(6, 6))
    vitals = vitals_of(call, attemper.vitals.SIGNS, "reference")
    weights = weights_of_rows(call, vitals, torch.arange(6))
    assert weights[0, 0, :5].isfinite().all()
    assert weights[0, 0, 5].isnan().all()


def test_a_row_without_keys_is_zero():
    q = torch.randn(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    call = call_of(q, q, mask=mask)
    weights = weights_of_rows(call, vitals_of(call, attemper.vitals.SIGNS, "reference"), torch.arange(4))
    assert (weights[:, :, 2] == 0).all()
    assert_reordered(weights[:, :, :2].sum(-1), torch.ones(1, 2, 2), weights.shape[-1])


def call_of(query, key, **options):
    """A call as the routes make them."""
    info = CallInfo.of(
        "sdpa",
        "self" if query.shape[-2] == key.shape[-2] else "cross",
        query,
        key,
        scale=options.get("scale"),
        causal=bool(options.get("causal", False)),
        mask=options.get("mask"),
    )
    return AttentionCall(info, (), query, key, **options)
