"""Nothing to attend to, and dropout: what a formula does not say is said by the documentation."""

import math

import pytest
import torch

import attemper
from public.definition import SIGNS, attend
from serving import ON_CPU

EMPTY = {
    "no queries": (0, 5, 4, 3),
    "no keys": (5, 0, 4, 3),
    "neither": (0, 0, 4, 3),
    "no width": (5, 6, 0, 3),
    "values of no width": (5, 6, 4, 0),
    "no width at all": (5, 6, 0, 0),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("lead", [(2, 4), (0, 4), (4,), (), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("kernel", ["auto", *ON_CPU])
def test_sizes_of_zero(kernel, sizes, lead):
    """Zeros, -inf and no error; gradients that are there, finite, and of the right shape."""
    rows, keys, dim, value_dim = sizes
    for dtype in DTYPES:
        shapes = (*lead, rows, dim), (*lead, keys, dim), (*lead, keys, value_dim)
        q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
        scale = None if dim else 0.5
        output, vitals = attemper.attention(q, k, v, scale=scale, kernel=kernel)
        exact = attend(q.double(), k.double(), v.double(), scale=scale)
        assert output.shape == (*lead, rows, value_dim)
        assert output.dtype == dtype
        for name in SIGNS:
            found = getattr(vitals, name)
            assert found.shape == (*lead, rows), name
            if not dim or not keys:  # logits are zeros: nothing is rounded but a logarithm and a quotient
                assert torch.equal(found.isfinite(), exact[name].isfinite()), name
                away = (found.double() - exact[name]).abs().nan_to_num(0)
                assert (away <= 4 * torch.finfo(torch.float32).eps * (1 + exact[name].abs())).all(), name
        if not keys:
            assert not output.any()
            assert (vitals.visible == 0).all()
            assert (vitals.lse == -math.inf).all()
            assert (vitals.peak == -math.inf).all()
            for name in ("mean", "variance", "entropy", "sum_p2", "top_weight", "effective_keys", "jacobian_trace"):
                assert not getattr(vitals, name).any(), name
            assert vitals.evenness.isnan().all()
        total = output.sum() + sum(getattr(vitals, name).nan_to_num(neginf=0).sum() for name in SIGNS)
        for one, shape in zip(torch.autograd.grad(total, (q, k, v), allow_unused=True), shapes, strict=True):
            assert one is None or (one.shape == shape and one.isfinite().all())
        assert attemper.sdpa(q, k, v, scale=scale).shape == output.shape if len(lead) else True
        assert attemper.weights(q, k, scale=scale).shape == (*lead, rows, keys)
        assert attemper.measure(q, k, scale=scale, kernel=kernel).entropy.shape == (*lead, rows)


@pytest.mark.parametrize(
    "around", [lambda run: run, torch.vmap, torch.func.functionalize], ids=["plain", "vmap", "functionalize"]
)
@pytest.mark.parametrize("lead", [(2, 3, 4, 0), (2, 0, 4, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_sink_that_no_row_sees_has_no_gradient(kernel, lead, around):
    """Whatever transforms the call; and one that rows see has the gradient of the definition."""
    items, batch, heads, rows = lead
    q, k, v = (torch.randn(items, batch, heads, n, 8, dtype=torch.float64) for n in (rows, 6, 6))
    sink = torch.randn(heads, dtype=torch.float64, requires_grad=True)

    def run(q, k, v):
        output, vitals = attemper.attention(q, k, v, sink=sink, kernel=kernel)
        return output.sum((-1, -2, -3)), vitals.entropy.sum((-1, -2))

    found = around(run)(q, k, v) if around is torch.vmap else [around(run)(*item) for item in zip(q, k, v, strict=True)]
    total = sum(one.sum() for part in found for one in part)
    (gradient,) = torch.autograd.grad(total, sink)
    exact = [attend(*item, sink=sink) for item in zip(q, k, v, strict=True)]
    (expected,) = torch.autograd.grad(sum(one["output"].sum() + one["entropy"].sum() for one in exact), sink)
    assert (gradient - expected).abs().max() <= 1e3 * torch.finfo(torch.float64).eps
    assert gradient.any() == bool(batch and rows)


def dropped(kernel: str, p: float, dtype: torch.dtype = torch.float32, **options):
    q = torch.zeros(2, 2, 64, 8, dtype=dtype)
    k, v = torch.zeros(2, 2, 256, 8, dtype=dtype), torch.eye(256, dtype=dtype).expand(2, 2, 256, 256)
    return attemper.attention(q, k, v, dropout=p, kernel=kernel, **options)


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_scales_the_rest(kernel, p):
    """Values that are the unit vectors show each weight: 0, or 1 / (1 - p) times it."""
    torch.manual_seed(0)
    output, vitals = dropped(kernel, p)
    kept = output != 0
    whole = torch.full_like(output, 1 / 256 / (1 - p))
    assert ((output[kept] - whole[kept]).abs() <= 4 * torch.finfo(torch.float32).eps * whole[kept]).all()
    count, deviation = kept.numel(), math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.sum().item() / count - (1 - p)) < 5 * deviation
    for rows in (kept.float().mean((0, 1, 3)), kept.float().mean((0, 1, 2)), kept.float().mean((2, 3)).flatten()):
        # no row, key or head has a share of its own
        assert ((rows - (1 - p)).abs() < 6 * math.sqrt(p * (1 - p) * rows.numel() / count)).all()
    for name, one in (
        attemper.attention(torch.zeros(2, 2, 64, 8), *[torch.zeros(2, 2, 256, 8)] * 2, kernel=kernel)
        .vitals.to_dict()
        .items()
    ):
        assert torch.equal(one, vitals.to_dict()[name]), f"{name} must precede dropout"


@pytest.mark.parametrize("kernel", ON_CPU)
def test_dropout_follows_the_seed_and_its_backward_drops_the_same(kernel):
    torch.manual_seed(3)
    first = dropped(kernel, 0.4).output
    second = dropped(kernel, 0.4).output
    torch.manual_seed(3)
    assert torch.equal(dropped(kernel, 0.4).output, first)
    torch.manual_seed(3)
    assert torch.equal(dropped(kernel, 0.4, signs=()).output, first)
    assert not torch.equal(first, second)
    q, k = torch.randn(1, 2, 20, 4, dtype=torch.float64), torch.randn(1, 2, 30, 4, dtype=torch.float64)
    v = torch.randn(1, 2, 30, 30, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(5)
    shown = attemper.attention(
        q, k, torch.eye(30, dtype=torch.float64).expand(1, 2, 30, 30), dropout=0.4, kernel=kernel
    ).output
    torch.manual_seed(5)
    output = attemper.attention(q, k, v, dropout=0.4, kernel=kernel).output
    cotangent = torch.randn_like(output)
    (found,) = torch.autograd.grad(output, v, cotangent)
    exact = shown.mT @ cotangent
    assert (found - exact).abs().max() <= 64 * torch.finfo(torch.float64).eps * exact.abs().max()
    # nothing is drawn without dropout
    state = torch.get_rng_state()
    attemper.attention(q, k, v, kernel=kernel)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_gradients_through_dropout_are_those_of_the_weights_that_were_kept(kernel):
    """By differences of the same call: one seed drops the same weights."""
    given = [torch.randn(1, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def run(q, k, v):
        torch.manual_seed(9)
        return attemper.attention(q, k, v, dropout=0.5, causal=True, kernel=kernel).output

    assert torch.autograd.gradcheck(run, given)


def test_sdpa_drops_where_it_is_asked_to():
    q, k = torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 64, 4)
    v = torch.eye(64).expand(1, 1, 64, 64)
    assert (attemper.sdpa(q, k, v, dropout_p=0.5) == 0).any()
    assert not (attemper.sdpa(q, k, v) == 0).any()
    assert not attemper.sdpa(q, k, v, dropout_p=1.0).any()


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_named_kernel_runs_and_says_so(kernel):
    q = torch.randn(1, 2, 5, 8)
    assert f"{kernel}" in str(attemper.kernels.why(q, q, q, kernel=kernel))
    auto = attemper.attention(q, q, q)
    taken = next(
        line.split()[0]
        for line in str(attemper.kernels.why(q, q, q)).splitlines()
        if " taken" in line and "not taken" not in line
    )
    assert torch.equal(attemper.attention(q, q, q, kernel=taken).output, auto.output)


@pytest.mark.parametrize("kernel", ["auto", *ON_CPU])
def test_whole_numbers_and_flat_masks_are_what_they_stand_for(kernel):
    q, k = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 3, 7, 8)
    for mask in (torch.randn(5, 7), torch.randn(3, 5, 7), torch.randn(7), torch.randn(())):
        mask.requires_grad_()
        whole = mask.expand(1, 1, 5, 7) if mask.dim() < 3 else mask[None]
        found = attemper.attention(q, k, k, mask=mask, scale=1, softcap=50, dropout=0, kernel=kernel)
        expected = attemper.attention(q, k, k, mask=whole, scale=1.0, softcap=50.0, dropout=0.0, kernel=kernel)
        for name, one in found.vitals.to_dict().items():
            assert torch.equal(one, expected.vitals.to_dict()[name]), name
        assert torch.equal(found.output, expected.output)
        for one, other in zip(
            *(torch.autograd.grad(each.output.square().sum(), (q, mask)) for each in (found, expected)), strict=True
        ):
            assert one.shape == other.shape
            assert (one - other).abs().max() <= 64 * torch.finfo(torch.float32).eps * (1 + other.abs().max())
    for wrong in ({"dropout": False}, {"softcap": True}, {"scale": 10**400}):
        with pytest.raises(attemper.errors.InputError):
            attemper.attention(q, k, k, kernel=kernel, **wrong)
