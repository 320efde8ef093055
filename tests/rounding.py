"""What rounding alone leaves in a result: each term of a sum rounds, and again at each level of summing; in quadrature.

Plain PyTorch's error can be zero by luck (one key) or small by luck (four numbers); this is the floor under it. The terms of
a gradient are those of dz = p [dP - δ + g_lse - g_H (ln p + H) + 2 g_sum_p2 (p - sum_p2)] + [g_mean + 2 g_var (z - mean)]
/ visible + g_peak; those of a sign are the logits, weighted by the sign's own derivative.
"""

import math

import torch
from torch import Tensor

from attemper.kernels.contract import Problem
from attemper.kernels.reference import logits


def sign_mass(problem: Problem, exact: dict[str, Tensor]) -> dict[str, float]:
    """How far one rounding of every logit moves each sign, in units of epsilon, largest row, in float64."""
    problem = Problem(*(t.detach() if isinstance(t, Tensor) else t for t in problem))
    exact = {name: t.detach() for name, t in exact.items() if isinstance(t, Tensor)}
    z, _, seen = logits(problem)
    z = z.nan_to_num(neginf=0.0)
    z2 = _raw_squared(problem) + z.square()
    p, visible = exact["weights"], exact["visible"].clamp(min=1).unsqueeze(-1)
    log_p = p.clamp(min=1e-300).log()
    slopes = {
        "mean": seen / visible,
        "variance": 2 * (z - exact["mean"].unsqueeze(-1)) * seen / visible,
        "peak": (p == p.amax(-1, keepdim=True)).double(),
        "lse": p,
        "entropy": p * (log_p + exact["entropy"].unsqueeze(-1)),
        "sum_p2": 2 * p * (p - exact["sum_p2"].unsqueeze(-1)),
    }
    mass = {"output": 0.0} | {
        name: (slope.square() * z2).sum(-1).sqrt().max().item() if z.numel() else 0.0 for name, slope in slopes.items()
    }
    levels = _levels(z.shape[-1])
    if z.numel():
        # each logit is rounded again at every level of the mean's sum; squares have one sign, so the roundings of the variance's
        # partial sums are as large as the sums: the whole, once a level
        mass["mean"] = (slopes["mean"].square() * (z2 + levels * z.square())).sum(-1).sqrt().max().item()
        mass["variance"] += exact["variance"].max().item() * math.sqrt(levels)
    mass["entropy"] += math.log(1 + z.shape[-1])  # a difference of terms as large as ln n
    mass["sum_p2"] += 2 * exact["sum_p2"].max().item() * math.sqrt(levels) if z.numel() else 0.0  # (Σe²)/(Σe)²
    if problem.value is not None and z.numel():
        value = problem.value.repeat_interleave(problem.query.shape[1] // problem.key.shape[1], 1)
        mass["output"] = ((p.square() * z2) @ value.square()).sqrt().max().item()
    return mass


def _raw_squared(problem: Problem) -> Tensor:
    """Σ (scale · gain · q_e k_e)² behind every score, (B, H, Lq, Lk)."""
    key = problem.key.repeat_interleave(problem.query.shape[1] // problem.key.shape[1], 1)
    factor = problem.scale if problem.gain is None else problem.scale * problem.gain.unsqueeze(-1)
    return (problem.query * factor).square() @ key.square().mT * _levels(key.shape[-1])


def reference_mass(exact: dict[str, Tensor]) -> float:
    """How far sums of distances from a reference, up to two standard deviations away, move the mean, in units of epsilon.

    They are added tile after tile, at least 32 keys each, in eight sums. The partial sums grow to n / 8 times the distance, so
    the roundings add up, as a random walk, to distance · √tiles / 17 of an epsilon for each key. One more rounds the result.
    """
    keys = exact["weights"].shape[-1]
    return 2 * exact["variance"].max().sqrt().item() * (1 + math.sqrt(keys / 32) / 17)


def _levels(terms: int) -> float:
    """How often a term is rounded while `terms` of them are summed by halves."""
    return 1 + math.log2(max(terms, 1))


def gradient_mass(problem: Problem, exact: dict[str, Tensor], loss: str, cotangent: Tensor) -> dict[str, float]:
    """The largest root-sum-square of terms behind any entry of each gradient of Σ cotangent · loss, in float64."""
    problem = Problem(*(t.detach() if isinstance(t, Tensor) else t for t in problem))
    exact = {name: t.detach() for name, t in exact.items() if isinstance(t, Tensor)}
    z, _, seen = logits(problem)
    z = z.nan_to_num(neginf=0.0)

    repeat = problem.query.shape[1] // problem.key.shape[1]
    key = problem.key.repeat_interleave(repeat, 1)
    raw = problem.query @ key.mT * problem.scale
    gain = torch.ones_like(raw[..., 0]) if problem.gain is None else problem.gain
    # the rounding of a logit and of lse goes through exp into the weight
    lse = exact["lse"].masked_fill(exact["lse"].isneginf(), 0.0).unsqueeze(-1)
    through_exp = 1 + _raw_squared(problem) + z.square() + lse.square()
    dz2 = _dz_terms_squared(loss, cotangent, exact, z, seen, problem) * through_exp  # (B, H, Lq, Lk)
    slope = 1.0
    if problem.softcap is not None:
        slope = 1 - torch.tanh(raw * gain.unsqueeze(-1) / problem.softcap).square()
    ds2 = dz2 * (slope**2 + 1) if problem.softcap is not None else dz2  # 1 - tanh² rounds on the scale of 1
    factor = (problem.scale * gain).abs().unsqueeze(-1)

    def over_group(squares: Tensor) -> Tensor:
        """Keys and values get gradients from every query head that shares them."""
        return squares.unflatten(1, (-1, repeat)).sum(2) if repeat else squares

    mass = {
        "query": (ds2 @ key.square()).sqrt() * factor,
        "key": over_group(ds2.mT @ (problem.query * factor).square()).sqrt(),
        "value": torch.zeros(1),
        "scale": (ds2 * _raw_squared(problem._replace(gain=None))).sum((0, 2, 3)).sqrt(),
        "mask": torch.zeros(1),
    }
    if loss == "output":
        mass["value"] = over_group((exact["weights"].square() * through_exp).mT @ cotangent.square()).sqrt()
    if problem.mask is not None and problem.mask.is_floating_point():
        mass["mask"] = dz2.sum_to_size(problem.mask.shape).sqrt()
    return {name: m.max().item() if m.numel() else 0.0 for name, m in mass.items()}


def _dz_terms_squared(loss: str, g: Tensor, exact: dict, z: Tensor, seen: Tensor, problem: Problem) -> Tensor:
    p = exact["weights"]
    if loss == "output":
        repeat = problem.query.shape[1] // problem.key.shape[1]
        value = problem.value.repeat_interleave(repeat, 1)
        # dP and δ are themselves sums over the value's entries
        dp2 = g.square() @ value.square().mT
        delta2 = (g * exact["output"]).square().sum(-1, keepdim=True)
        return p.square() * (dp2 + delta2) * _levels(value.shape[-1])
    g = g.unsqueeze(-1)

    def row(name: str) -> Tensor:
        return exact[name].masked_fill(~exact[name].isfinite(), 0.0).unsqueeze(-1)

    if loss == "lse":
        return (p * g).square()
    if loss == "entropy":
        return (p * g).square() * (z.square() + row("lse").square() + row("entropy").square()) * (p > 0)
    if loss == "sum_p2":
        return (2 * p * g).square() * (p.square() + row("sum_p2").square())
    if loss == "peak":
        return torch.zeros_like(p).scatter(-1, exact["argmax"].clamp(min=0).unsqueeze(-1), g.square())
    share = (g / row("visible").clamp(min=1)).square() * seen
    if loss == "mean":
        return share
    assert loss == "variance"
    return 4 * share * (z.square() + row("mean").square())
