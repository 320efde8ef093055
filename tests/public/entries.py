"""Every public function that attends, as a function of q, k and v that returns plain tensors, for torch to transform."""

from collections.abc import Callable

import torch
from torch import Tensor

import attemper

Entry = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
HEADS, GROUPS, ROWS, KEYS, DIM = 4, 2, 6, 9, 8


def inputs(*lead: int, dtype: torch.dtype = torch.float64, rows: int = ROWS, keys: int = KEYS) -> list[Tensor]:
    shapes = (2, HEADS, rows, DIM), (2, GROUPS, keys, DIM), (2, GROUPS, keys, DIM)
    return [torch.randn(*lead, *shape, dtype=dtype) for shape in shapes]


def like(q: Tensor, *numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=q.dtype)


def parts(attended: attemper.Attended) -> tuple[Tensor, ...]:
    vitals = attended.vitals
    names = ("mean", "variance", "peak", "lse", "entropy", "sum_p2", "visible", "top_weight")
    return (attended.output, *(getattr(vitals, name) for name in names))


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return parts(attemper.attention(q, k, v, causal="lower_right", window=5, softcap=9.0))


def masked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """A learned scale, and a mask whose first row sees no key."""
    mask = torch.ones(q.shape[-2], k.shape[-2]).tril(2).bool() & (torch.arange(q.shape[-2])[:, None] > 0)
    return parts(attemper.attention(q, k, v, mask=mask, scale=like(q, 0.2, 0.5, -0.3, 1.0)))


def biased(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    bias = torch.arange(k.shape[-2], dtype=q.dtype) / 2 - 2  # torch.linspace would fix the length in a graph
    return parts(
        attemper.attention(
            q, k, v, mask=bias, signs=("lse", "entropy", "peak", "mean", "variance", "sum_p2", "visible")
        )
    )


def output(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (attemper.attention(q, k, v, causal=True, signs=()).output,)


def measure(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    vitals = attemper.measure(q, k, signs=("entropy", "peak"))
    return vitals.entropy, vitals.peak


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (attemper.sdpa(q, k, v, is_causal=True, scale=0.4, enable_gqa=True),)


def weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (attemper.weights(q, k, causal=True),)


def cosine(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return parts(attemper.cosine_attention(q, k, v, scale=4.0, causal=True))


def additive(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return parts(attemper.additive_attention(q, k, v, like(q, *(0.5,) * DIM)))


def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    shards = [attemper.attention(q, k[..., s, :], v[..., s, :]) for s in (slice(0, 4), slice(4, None))]
    return parts(attemper.merge(shards))


ENTRIES: dict[str, Entry] = {
    one.__name__: one for one in (attention, masked, biased, output, measure, sdpa, weights, cosine, additive, merged)
}


def loss(entry: Entry, *given: Tensor) -> Tensor:
    """A number to which every result of a function contributes."""
    found = [one for one in entry(*given) if one.is_floating_point()]
    return sum(torch.where(one.isfinite(), one, 0.0).sin().sum() * (i + 1) for i, one in enumerate(found))
