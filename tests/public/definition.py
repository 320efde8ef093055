"""Attention and every sign from the whole matrix, by their definitions, in float64: exact, or with every step rounded.

It shares no code with attemper. What rounding may do to a result is measured: the same definition runs a few times with a
random rounding of every product, sum and function, forward and backward, and the largest error of any entry is the yardstick.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIGNS = ("visible", "mean", "variance", "peak", "lse", "entropy", "sum_p2")
DERIVED = {
    "top_weight": ("peak", "lse"),
    "effective_keys": ("entropy", "lse"),
    "evenness": ("entropy", "visible"),
    "jacobian_trace": ("sum_p2",),
}
HIDES = -1e4  # an added number as low as this hides a key from visible, mean and variance
NOTHING = -math.inf
DRAWS = 4


class Rounds(NamedTuple):
    """The relative rounding of every step, and of the weights before they meet the values; exact if both are 0."""

    eps: float = 0.0
    weights: float = 0.0


def noise(like: Tensor) -> Tensor:
    return torch.randint(0, 2, like.shape, dtype=like.dtype).mul_(2).sub_(1)


def rounded_product(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """a @ b, whose terms and partial sums were rounded."""
    exact = a @ b
    if not eps or not exact.numel():
        return exact
    levels = 1 + math.log2(max(1, a.shape[-1]))
    size = (a.square() @ b.square()).sqrt() * levels + exact.abs() * math.sqrt(levels)
    return exact + eps * size * noise(exact)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.eps = eps
        return rounded_product(a, b, eps)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        return rounded_product(g, b.mT, ctx.eps), rounded_product(a.mT, g, ctx.eps), None


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, size: Tensor | float | None) -> Tensor:
        ctx.eps = eps
        return x + eps * (x.abs() if size is None else size) * noise(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g + ctx.eps * g.abs() * noise(g), None, None


class Arithmetic:
    """Products, sums and functions with a rounding."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return _Product.apply(a, b, self.rounds.eps)

    def sum(self, x: Tensor) -> Tensor:
        """Over the last dimension, which stays as 1."""
        return self.product(x, x.new_ones(*x.shape[:-2], x.shape[-1], 1))

    def spread(self, x: Tensor, n: int) -> Tensor:
        """(…, 1) n times; its gradient is a sum."""
        return self.product(x, x.new_ones(*x.shape[:-2], 1, n))

    def near(self, x: Tensor, size: Tensor | float | None = None, eps: float | None = None) -> Tensor:
        eps = self.rounds.eps if eps is None else eps
        return _Rounded.apply(x, eps, size) if eps else x


def band(rows: int, keys: int, causal: bool | str, window: int | None) -> Tensor:
    """Which keys each query may see by its place."""
    place = torch.arange(rows)[:, None] + (keys - rows if causal == "lower_right" else 0)
    behind = place - torch.arange(keys)
    allowed = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        allowed &= behind >= 0
    if window is not None:
        allowed &= (behind < window) & (-behind < window)
    return allowed


def within(documents: list[tuple[list[int], list[int]]], causal: bool | str, window: int | None) -> Tensor:
    """The same where each item of the batch has offsets for queries and keys, and no query sees another document."""
    allowed = []
    for of_rows, of_keys in documents:
        allowed.append(torch.zeros(of_rows[-1], of_keys[-1], dtype=torch.bool))
        for (first, last), (start, stop) in zip(pairwise(of_rows), pairwise(of_keys), strict=True):
            allowed[-1][first:last, start:stop] = band(last - first, stop - start, causal, window)
    return torch.stack(allowed)[:, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    score: str = "dot",
    weight: Tensor | None = None,
    documents: list[tuple[list[int], list[int]]] | None = None,
    sink: Tensor | None = None,
    rounds: Rounds = Rounds(),  # noqa: B008 (a tuple)
) -> dict[str, Tensor]:
    """Output, weights, every sign and every derived one; `counted` and `gap` say which keys count, and by how much one leads."""
    do = Arithmetic(rounds)
    heads, groups = (query.shape[-3], key.shape[-3]) if query.dim() > 2 else (1, 1)
    lead = query.shape[:-3]
    batch, rows, keys = math.prod(lead), query.shape[-2], key.shape[-2]
    q = query.reshape(batch, heads, rows, query.shape[-1])
    k = key.reshape(batch, groups, keys, key.shape[-1]).repeat_interleave(heads // groups, 1)
    full = (*query.shape[:-1], keys)
    z = scores(do, q, k, scale, softcap, score, weight, lead)
    usable = band(rows, keys, causal, window) if documents is None else within(documents, causal, window)
    usable = usable.expand_as(z)
    counted = usable
    if mask is not None:
        own = mask.expand(full).reshape(z.shape)
        if own.dtype == torch.bool:
            usable = counted = usable & own
        else:
            usable, counted = usable & (own != NOTHING), usable & (own > HIDES)
            z = do.near(z + torch.where(own == NOTHING, 0.0, own))
    if sink is not None:  # one more key without a value
        z = torch.cat((z, do.spread(sink.reshape(1, heads, 1, 1).expand(batch, -1, rows, 1), 1)), -1)
        there = torch.ones_like(z[..., :1], dtype=torch.bool)
        usable, counted = (torch.cat((one, there), -1) for one in (usable, counted))
    found = rows_of(do, z, usable, counted, keys)
    found["weights"] = found["weights"][..., :keys]
    if value is not None:
        v = value.reshape(batch, groups, keys, value.shape[-1]).repeat_interleave(heads // groups, 1)
        found["output"] = do.product(do.near(found["weights"], eps=rounds.weights), v)
    return {name: one.reshape(*full[:-1], *one.shape[3:]) for name, one in found.items()}


def scores(
    do: Arithmetic,
    q: Tensor,
    k: Tensor,
    scale: float | Tensor | None,
    softcap: float | None,
    score: str,
    weight: Tensor | None,
    lead: tuple[int, ...],
) -> Tensor:
    keys = k.shape[2]
    if score == "additive":
        assert weight is not None
        w = weight.expand(q.shape[1], q.shape[-1])[None, :, None, None, :]
        terms = do.near(torch.tanh(do.near(q.unsqueeze(-2) + k.unsqueeze(-3)))) * w
        return do.sum(terms).squeeze(-1)
    if score == "cosine":
        q, k = (directions(do, one) for one in (q, k))
    z = do.product(q, k.mT)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    if isinstance(scale, Tensor):
        each = scale[:, None, None] if scale.dim() == 1 else scale
        z = z * do.spread(each.expand(*lead, *q.shape[1:3], 1).reshape(*q.shape[:3], 1), keys)
    else:
        z = z * scale
    if softcap is not None:
        z = do.near(softcap * do.near(torch.tanh(do.near(z / softcap))))
    return do.near(z)


def directions(do: Arithmetic, x: Tensor) -> Tensor:
    """Vectors of length 1; one of zeros has none."""
    squares = do.sum(x * x)
    some = squares > 0
    length = torch.where(some, squares, 1.0).sqrt()
    return torch.where(some, do.near(x * do.spread(do.near(1 / length), x.shape[-1])), 0.0)


def rows_of(do: Arithmetic, z: Tensor, usable: Tensor, counted: Tensor, real: int | None = None) -> dict[str, Tensor]:
    """Weights and signs of logits, of which the first `real` are of keys and may be a peak.

    A row that sees no key has zeros, and -inf where a logarithm of nothing stands.
    """
    keys = z.shape[-1]
    real = keys if real is None else real
    some = usable.any(-1, keepdim=True)
    filled = torch.where(usable, z, NOTHING)
    top = torch.where(some, filled.detach().amax(-1, keepdim=True), 0.0) if keys else z.new_zeros(*z.shape[:-1], 1)
    size = z.detach().abs().masked_fill(~usable, 0.0) + top.abs()
    below = do.near(torch.where(usable, z - do.spread(top, keys), 0.0), size)
    e = do.near(torch.exp(below)) * usable
    total = torch.where(some, do.sum(e), 1.0)
    weights = do.near(e * do.spread(do.near(1 / total), keys))
    log_total = do.near(total.log(), 1 + total.detach().log().abs())
    n = counted.sum(-1, keepdim=True).to(z.dtype)
    share = 1 / n.clamp(min=1)
    clean = torch.where(counted, z, 0.0)
    mean = do.sum(clean) * share
    apart = do.near(torch.where(counted, z - do.spread(mean.detach(), keys), 0.0))  # Σ apart = 0: no gradient
    entropy = log_total - do.near(do.sum(e * below) / total)
    if real:
        own = filled[..., :real]
        peak = own.gather(-1, own.argmax(-1, keepdim=True))
        best = own.detach().topk(min(2, real)).values
        gap = (best[..., 0] - best[..., -1]).nan_to_num(math.inf) if real > 1 else torch.ones_like(top[..., 0])
    else:
        peak, gap = torch.full_like(top, NOTHING), torch.ones_like(top[..., 0])
    found = {
        "weights": weights,
        "mean": mean,
        "variance": do.near(do.sum(apart * apart) * share),
        "peak": torch.where(some, peak, NOTHING),
        "lse": torch.where(some, do.near(top + log_total, 1 + size.amax(-1, keepdim=True) if keys else None), NOTHING),
        "entropy": torch.where(some, entropy, 0.0),
        "sum_p2": do.near(do.sum(e * e) / total.square()),
    }
    found |= {
        "top_weight": torch.where(some, weights[..., :real].amax(-1, keepdim=True) if real else 0.0, 0.0),
        "effective_keys": torch.where(some, found["entropy"].exp(), 0.0),
        "evenness": torch.where(n > 1, found["entropy"] / n.clamp(min=2).log(), math.nan),
        "jacobian_trace": torch.where(some, 1 - found["sum_p2"], 0.0),
    }
    flat = {name: one if name == "weights" else one.squeeze(-1) for name, one in found.items()}
    return flat | {"visible": n.squeeze(-1).to(torch.int32), "gap": gap}
