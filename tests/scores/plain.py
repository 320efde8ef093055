"""The two scores, their softmax and every vital sign in plain PyTorch, whole matrices in memory; and what rounding leaves.

This page is the definition that tests/scores compares with. It shares no line with the package.
"""

import math

import torch
from torch import Tensor

from rounding import _dz_terms_squared, _levels, gradient_mass, sign_mass


def per_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Key or value heads repeated, one for each query head."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def additive_logits(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Σ_e w_e tanh(q_e + k_e), (B, H, Lq, Lk)."""
    t = torch.tanh(query.unsqueeze(3) + per_head(key, query).unsqueeze(2))  # (B, H, Lq, Lk, E)
    return (t * weight.expand(query.shape[1], -1)[:, None, None]).sum(-1)


def cosine_logits(query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """scale · q·k / (|q| |k|)"""
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (query, per_head(key, query)))
    return q @ k.mT * scale.reshape(-1, 1, 1)


def kept(rows: int, keys: int, causal: bool | str = False, window: int | None = None) -> Tensor:
    """True where a query may see a key."""
    i = torch.arange(rows).unsqueeze(-1) + (keys - rows if causal == "lower_right" else 0)
    j = torch.arange(keys)
    keep = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        keep &= j <= i
    if window is not None:
        keep &= (i - j < window) & (j - i < window)
    return keep


def attend(z: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor) -> dict[str, Tensor]:
    """Softmax over what may be seen, the weighted sum, and the signs of each row. `value` is one per query head."""
    seen = keep = keep.expand(z.shape)
    if mask is not None and mask.dtype == torch.bool:
        seen = keep = keep & mask
    elif mask is not None:
        z = z + mask
        seen, keep = keep & (mask > -1e4), keep & (mask > -math.inf)
    empty = ~keep.any(-1, keepdim=True)
    shut = z.masked_fill(~keep, -math.inf).masked_fill(empty, 0.0)
    p = shut.softmax(-1).masked_fill(empty, 0.0)
    lse = shut.logsumexp(-1)
    log_p = (shut - lse.unsqueeze(-1)).masked_fill(~keep, 0.0)
    count = seen.sum(-1)
    mean = z.masked_fill(~seen, 0.0).sum(-1) / count.clamp(min=1)
    away = (z - mean.unsqueeze(-1)).masked_fill(~seen, 0.0)
    peak, argmax = shut.max(-1)
    return {
        "output": p @ value,
        "weights": p,
        "argmax": argmax,
        "visible": count.to(torch.int32),
        "mean": mean,
        "variance": away.square().sum(-1) / count.clamp(min=1),
        "peak": peak.masked_fill(empty.squeeze(-1), -math.inf),
        "lse": lse.masked_fill(empty.squeeze(-1), -math.inf),
        "entropy": -(p * log_p).sum(-1),
        "sum_p2": p.square().sum(-1),
        "logits": z.detach().nan_to_num(neginf=0.0),
        "seen": seen,
    }


class AdditiveRounding:
    """One epsilon of each term behind a sign or a gradient, in quadrature, as tests/rounding.py has it for the product."""

    def __init__(self, problem, exact: dict[str, Tensor], weight: Tensor) -> None:
        self.problem, self.exact = problem, {n: t.detach() for n, t in exact.items()}
        query, key = problem.query.detach(), problem.key.detach()
        self.w2 = weight.detach().expand(query.shape[1], -1)[:, None, None].square()  # (H, 1, 1, E)
        s = query.unsqueeze(3) + per_head(key, query).unsqueeze(2)
        self.t2 = s.tanh().square()
        self.slope2 = (1 - self.t2).square()
        z = self.exact["logits"]
        # q + k rounds and goes through the slope of tanh; tanh rounds; each product is summed
        inner = (self.w2 * (self.t2 * _levels(s.shape[-1]) + self.slope2 * s.square())).sum(-1)
        self.z2 = inner + z.square()

    def signs(self) -> dict[str, float]:
        exact, z = self.exact, self.exact["logits"]
        p, seen, visible = exact["weights"], exact["seen"], exact["visible"].clamp(min=1).unsqueeze(-1)
        slopes = {
            "mean": seen / visible,
            "variance": 2 * (z - exact["mean"].unsqueeze(-1)) * seen / visible,
            "peak": (p == p.amax(-1, keepdim=True)).double(),
            "lse": p,
            "entropy": p * (p.clamp(min=1e-300).log() + exact["entropy"].unsqueeze(-1)),
            "sum_p2": 2 * p * (p - exact["sum_p2"].unsqueeze(-1)),
        }
        mass = {name: (slope.square() * self.z2).sum(-1).sqrt().max().item() for name, slope in slopes.items()}
        mass["entropy"] += math.log(1 + z.shape[-1])
        mass["sum_p2"] += 2 * exact["sum_p2"].max().item() * math.sqrt(_levels(z.shape[-1]))
        value = per_head(self.problem.value.detach(), self.problem.query)
        mass["output"] = ((p.square() * self.z2) @ value.square()).sqrt().max().item()
        return mass

    def gradients(self, loss: str, cotangent: Tensor) -> dict[str, float]:
        exact, problem = self.exact, self.problem
        lse = exact["lse"].masked_fill(exact["lse"].isneginf(), 0.0).unsqueeze(-1)
        through_exp = 1 + self.z2 + lse.square()
        plain = problem._replace(value=problem.value.detach())
        dz2 = _dz_terms_squared(loss, cotangent, exact, exact["logits"], exact["seen"], plain) * through_exp
        # 1 - tanh² rounds on the scale of 1
        each = dz2.unsqueeze(-1) * self.w2 * (self.slope2 + 1)  # (B, H, Lq, Lk, E)
        repeat = problem.query.shape[1] // problem.key.shape[1]
        mass = {
            "query": each.sum(3),
            "key": each.sum(2).unflatten(1, (-1, repeat)).sum(2),
            # a sum over all rows and keys, each term rounded again at every level of it
            "weight": (dz2.unsqueeze(-1) * (self.t2 + self.slope2)).sum((0, 2, 3)) * _levels(dz2[:, 0].numel()),
            "value": torch.zeros(1),
            "mask": torch.zeros(1),
        }
        if mass["weight"].shape[0] and problem.query.shape[1]:
            mass["weight"] = mass["weight"].sum(0)  # a weight may be shared by all heads
        if loss == "output":
            mass["value"] = (exact["weights"].square() * through_exp).mT @ cotangent.square()
        if problem.mask is not None and problem.mask.is_floating_point():
            mass["mask"] = dz2.sum_to_size(problem.mask.shape)
        return {name: m.sqrt().max().item() for name, m in mass.items()}


class CosineRounding:
    """The product's own, on directions; a direction rounds when it is divided, and its gradient is divided by the length."""

    def __init__(self, problem, exact: dict[str, Tensor]) -> None:
        self.lengths = {n: getattr(problem, n).detach().norm(dim=-1, keepdim=True) for n in ("query", "key")}
        directions = {n: getattr(problem, n).detach() / self.lengths[n] for n in self.lengths}
        self.problem, self.exact = problem._replace(**directions), exact

    def signs(self) -> dict[str, float]:
        return sign_mass(self.problem, self.exact)

    def gradients(self, loss: str, cotangent: Tensor) -> dict[str, float]:
        mass = gradient_mass(self.problem, self.exact, loss, cotangent)
        # the part along the vector is taken out of it, which rounds once more
        return mass | {name: 2 * mass[name] / length.min().item() for name, length in self.lengths.items()}
