"""What the gradient of a row's logits needs besides the tile, in one launch: nine numbers for each row (`LSE` … `TOTAL`).

δ = g · output is taken of the output as it was before rounding, so that the gradients of half-precision inputs are exact.
Two of the numbers are also written as columns that are appended to the query and to g (`append`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import HIDDEN_BIAS, Problem, Results, Upstream, is_by_token
from .arguments import cdiv, complete, is_added, is_there, padded
from .launch import Launch, Plans, run
from .store import vector_index

G_OUTPUT: tl.constexpr = tl.constexpr(1)  # which gradients arrived
G_LSE: tl.constexpr = tl.constexpr(2)
G_ENTROPY: tl.constexpr = tl.constexpr(4)
G_P2: tl.constexpr = tl.constexpr(8)
G_MEAN: tl.constexpr = tl.constexpr(16)
G_VARIANCE: tl.constexpr = tl.constexpr(32)
G_PEAK: tl.constexpr = tl.constexpr(64)
G_MOMENTS: tl.constexpr = tl.constexpr(48)

LSE: tl.constexpr = tl.constexpr(0)  # the places of a row's numbers
REST: tl.constexpr = tl.constexpr(1)  # exp(-lse_low)
CONSTANT: tl.constexpr = tl.constexpr(2)
ENTROPY: tl.constexpr = tl.constexpr(3)
P2: tl.constexpr = tl.constexpr(4)
LEVEL: tl.constexpr = tl.constexpr(5)
SLOPE: tl.constexpr = tl.constexpr(6)
PEAK: tl.constexpr = tl.constexpr(7)
TOTAL: tl.constexpr = tl.constexpr(8)  # Σ dz
N_TERMS = 9
WIDTH: tl.constexpr = tl.constexpr(16)  # columns appended to the query and to g: the fewest that a product takes


@triton.jit
def unrounded(b_short, b_low):
    """The output before rounding, as `vitals.unrounded` defines it."""
    b_wide = b_short.to(tl.float32)
    b_whole = (b_wide.to(tl.int32, bitcast=True) + b_low.to(tl.int32)).to(tl.float32, bitcast=True)
    if b_short.dtype == tl.float16:
        b_whole = tl.where(
            tl.abs(b_wide) < 6.103515625e-05, b_wide + b_low.to(tl.float32) * 9.094947017729282e-13, b_whole
        )
    return b_whole


@triton.jit
def append(p, b, o_row, m):
    """Write a number of each row as three of bfloat16, whose sum has all its digits; they are multiplied by 1 and added up."""
    o_c = tl.arange(0, WIDTH)
    b_first = b.to(p.dtype.element_ty)
    b_left = tl.where(tl.abs(b) < float("inf"), b - b_first.to(tl.float32), 0.0)
    b_second = b_left.to(p.dtype.element_ty)
    b_third = (b_left - b_second.to(tl.float32)).to(p.dtype.element_ty)
    b_later = tl.where(o_c[None, :] == 1, b_second[:, None], tl.where(o_c[None, :] == 2, b_third[:, None], 0.0))
    b_all = tl.where(o_c[None, :] == 0, b_first[:, None], b_later)
    tl.store(p + o_row[:, None] * (2 * WIDTH) + o_c[None, :], b_all, mask=m[:, None])


@triton.jit(do_not_specialize=["scale", "heads", "rows", "n_rows"])
def row_terms_kernel(
    p_terms, p_appended, p_output, p_low, p_lse_low, p_visible, p_mean, p_lse, p_entropy, p_sum_p2,
    p_g, p_g_mean, p_g_variance, p_g_peak, p_g_lse, p_g_entropy, p_g_sum_p2,
    step_ob, step_oh, step_om, scale, heads, rows, n_rows,
    EV: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, ARRIVED: tl.constexpr, WHOLE: tl.constexpr,
    BY_TOKEN: tl.constexpr, APPENDED: tl.constexpr,
):  # fmt: skip
    n_rows = n_rows.to(tl.int64)  # nine times as many may not fit 32 bits
    o_row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m = o_row < n_rows
    b_lse = tl.load(p_lse + o_row, mask=m, other=0.0)
    b_low = tl.load(p_lse_low + o_row, mask=m, other=0.0)
    b_rest = tl.exp(-b_low)
    b_over = tl.where(b_lse == float("-inf"), float("inf"), b_lse)  # no keys: exp(z - inf) = 0
    tl.store(p_terms + o_row, b_over, mask=m)
    tl.store(p_terms + REST * n_rows + o_row, b_rest, mask=m)
    b_constant = tl.zeros([BM], tl.float32)
    b_total = tl.zeros([BM], tl.float32)
    if G_OUTPUT & ARRIVED:
        o_v = tl.arange(0, BEV)
        m_v = m[:, None] & (o_v[None, :] < EV)
        i_head, i_row = o_row // rows, o_row % rows
        o_g = i_head // heads * step_ob + i_head % heads * step_oh + i_row * step_om
        b_g = tl.load(p_g + o_g[:, None] + o_v[None, :], mask=m_v, other=0.0).to(tl.float32)
        o_out = vector_index(i_head // heads, i_head % heads, i_row, heads, rows, BY_TOKEN)[:, None] * EV + o_v[None, :]
        b_out = tl.load(p_output + o_out, mask=m_v, other=0.0)
        if WHOLE:
            b_out = unrounded(b_out, tl.load(p_low + o_out, mask=m_v, other=0))
        b_constant -= tl.sum(b_g * b_out.to(tl.float32), 1)
    if G_LSE & ARRIVED:
        b_total += tl.load(p_g_lse + o_row, mask=m, other=0.0)
        b_constant += b_total
    if G_ENTROPY & ARRIVED:
        b_g_entropy = tl.load(p_g_entropy + o_row, mask=m, other=0.0)
        b_constant -= b_g_entropy * (tl.load(p_entropy + o_row, mask=m, other=0.0) - b_low)
        tl.store(p_terms + ENTROPY * n_rows + o_row, b_g_entropy * b_rest, mask=m)
    if G_P2 & ARRIVED:
        b_g_sum_p2 = 2.0 * tl.load(p_g_sum_p2 + o_row, mask=m, other=0.0)
        b_constant -= b_g_sum_p2 * tl.load(p_sum_p2 + o_row, mask=m, other=0.0)
        tl.store(p_terms + P2 * n_rows + o_row, b_g_sum_p2 * b_rest * b_rest, mask=m)
    b_constant *= b_rest
    tl.store(p_terms + CONSTANT * n_rows + o_row, b_constant, mask=m)
    if APPENDED:
        append(p_appended, -b_over / scale, o_row, m)
        append(p_appended + WIDTH, b_constant, o_row, m)
    if G_MOMENTS & ARRIVED:
        b_visible = tl.load(p_visible + o_row, mask=m, other=1)
        b_some = tl.maximum(b_visible, 1).to(tl.float32)
        b_level = tl.zeros([BM], tl.float32)
        b_slope = tl.zeros([BM], tl.float32)
        if G_MEAN & ARRIVED:
            b_g_mean = tl.load(p_g_mean + o_row, mask=m, other=0.0)
            b_total += tl.where(b_visible > 0, b_g_mean, 0.0)  # a row may have weights, and no key that counts
            b_level += tl.div_rn(b_g_mean, b_some)
        if G_VARIANCE & ARRIVED:
            b_slope += tl.div_rn(2.0 * tl.load(p_g_variance + o_row, mask=m, other=0.0), b_some)
            b_level -= b_slope * tl.load(p_mean + o_row, mask=m, other=0.0)
        tl.store(p_terms + LEVEL * n_rows + o_row, b_level, mask=m)
        tl.store(p_terms + SLOPE * n_rows + o_row, b_slope, mask=m)
    if G_PEAK & ARRIVED:
        b_g_peak = tl.load(p_g_peak + o_row, mask=m, other=0.0)
        b_total += b_g_peak
        tl.store(p_terms + PEAK * n_rows + o_row, b_g_peak, mask=m)
    tl.store(p_terms + TOTAL * n_rows + o_row, tl.where(b_lse == float("-inf"), 0.0, b_total), mask=m)


def row_terms(
    saved: Results, upstream: Upstream, arrived: int, plans: Plans | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Nine numbers for each row, (9, B, H, Lq), from gradients of which that of the output has unit stride; and columns.

    These are appended to the query (-lse / scale) and to g (the constant), (B H Lq, 2, WIDTH); without a scale there are none.
    """
    lse, output = saved.lse, saved.output
    batch, heads, rows = lse.shape
    n_rows = lse.numel()
    terms = lse.new_empty_strided((N_TERMS, batch, heads, rows), (n_rows, heads * rows, rows, 1))
    g = lse if upstream.output is None else upstream.output
    columns = terms if scale is None else lse.new_empty((n_rows, 2, WIDTH.value), dtype=g.dtype)
    arriving = [lse if grad is None else grad.contiguous() for grad in upstream[1:]]
    by_token = output is not None and output.dim() == 4 and is_by_token(output)

    def tensors(saved: Results) -> tuple[Tensor, ...]:
        whole = (
            saved.output,
            saved.output_low,
            saved.lse_low,
            saved.visible,
            saved.mean,
            lse,
            saved.entropy,
            saved.sum_p2,
        )
        return (terms, columns, *whole, g, *arriving)

    def launch() -> Launch:
        value_dim = output.shape[-1] if output is not None and output.dim() == 4 else 1
        constants = {"EV": value_dim, "BEV": padded(value_dim), "BM": 32, "APPENDED": scale is not None}
        constants |= {"ARRIVED": arrived, "WHOLE": is_there(saved.output_low), "BY_TOKEN": by_token}
        whole = tensors(complete(saved, lse if output is None else output))
        args = (*whole, *g.stride()[:3], scale or 1.0, heads, rows, n_rows)
        return Launch(row_terms_kernel, (cdiv(n_rows, 32), 1), args, constants, {"num_warps": 4})

    run(plans, ("terms", by_token), tensors(saved), launch)
    return terms, columns


def lift(problem: Problem, g_output: Tensor | None, arrived: int, terms: Tensor) -> Tensor | None:
    """For float16: two powers of 2, on the device, by which dz and dz times scale are multiplied before they are rounded.

    So small ones keep their digits. None of them is larger than this bound, by the formula of backward.py with p |ln p| < 1.
    """
    query, key, value, mask, gain = problem[:5]
    if query.dtype != torch.float16:
        return None
    most = terms.new_zeros(())
    if g_output is not None and value is not None:
        most += 2 * _longest(g_output) * _longest(value) / max(1 - problem.dropout, 1e-30)  # |g · v| + |g · output|
    shared = G_LSE.value | G_ENTROPY.value | G_P2.value
    adding = (
        (CONSTANT, shared),
        (ENTROPY, G_ENTROPY.value),
        (P2, G_P2.value),
        (LEVEL, G_MOMENTS.value),
        (PEAK, G_PEAK.value),
    )
    for place, bits in adding:
        if arrived & bits:
            most += terms[place.value].abs().amax()
    gains = 1.0 if gain is None else gain.abs().amax()
    if arrived & G_VARIANCE.value:
        largest = abs(problem.scale) * gains * _longest(query) * _longest(key)
        if mask is not None and is_added(mask):
            # a key behind a lower bias does not count, and an infinite logit adds nothing
            least, highest = mask.clamp(HIDDEN_BIAS, torch.finfo(mask.dtype).max).aminmax()
            largest += torch.maximum(least.abs(), highest.abs()).float()
        most += terms[SLOPE.value].abs().amax() * largest
    bounds = torch.stack([most, most if gain is None else most * gains * abs(problem.scale)])
    lifts = torch.exp2((15 - bounds.log2()).floor().clamp(-24, 24))
    return torch.where(bounds.isfinite(), lifts, 1.0)


def _longest(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32).amax()
