"""Call: one attention call as a route saw it, and its facts; and how to stand beside the model that makes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .._torch_private import _len_torch_dispatch_stack, _pop_mode, _push_mode, _set_grad_enabled
from ..vitals import Vitals
from .attach.running import Frame, Place
from .trace.paths import Traced


@dataclass(frozen=True)
class Facts:
    """What is known of a layer's attention calls beside their numbers; the last call of a step speaks for it.

    ``scale`` is what the call multiplied the scores by, where that could be read: the argument of SDPA, or the plain
    numbers between the product and the softmax; None: unknown. ``declared`` is what the Hugging Face interface was told.
    """

    route: str  # "sdpa", "fused", "hand-written", "interface", "attemper" or "replaced"
    kind: str  # "self" or "cross"
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    scale: float | None
    causal: bool
    masked: bool
    dropout: float = 0.0
    softcap: float | None = None
    window: int | None = None
    declared: float | None = None
    implementation: str | None = None  # of the Hugging Face interface

    @classmethod
    def of(
        cls,
        route: str,
        kind: str,
        query: Tensor,
        key: Tensor,
        *,
        scale: float | None,
        causal: bool,
        mask: object,
        **rest: Any,
    ) -> Facts:
        """Of a call on (..., H, Lq, E) and (..., G, Lk, E), where no scale is 1/√E."""
        batch, (heads, rows, head_dim) = query.shape[:-3].numel(), query.shape[-3:]
        return cls(
            route=route,
            kind=kind,
            dtype=str(query.dtype).removeprefix("torch."),
            batch=batch,
            heads=heads,
            kv_heads=key.shape[-3],
            head_dim=head_dim,
            queries=rows,
            keys=key.shape[-2],
            scale=float(head_dim**-0.5 if scale is None else scale),
            causal=causal,
            masked=mask is not None,
            **rest,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Call:
    """One call: what the vitals are computed from, or the vitals themselves, and whose it is.

    Either ``query`` and ``key`` with the options of ``measure()``, or ``logits``, the matrix that the model itself stored;
    then ``query`` and ``key`` are the factors as the product had them, for gradients and for whoever compares.
    """

    facts: Facts
    frames: tuple[Frame, ...]  # the modules around it
    query: Tensor  # (B, H, Lq, E), or a factor (..., Lq, E)
    key: Tensor  # (B, G, Lk, E), or a factor (..., E, Lk)
    logits: Tensor | None = None  # (B, H, Lq, Lk)
    mask: Tensor | None = None
    causal: bool | str = False
    scale: float | Tensor | None = None  # a tensor, (B, H, Lq, 1), from attemper's own operation alone
    window: int | None = None
    softcap: float | None = None
    vitals: Vitals | None = None  # where the kernel that ran has measured them
    rows: Tensor | None = None  # (B, Lq): False leaves a padded query out
    product: bool = False  # whether q and k are the factors of a product
    flipped: bool = False  # whether the product had the keys on its left: (..., Lk, E) and (..., E, Lq)
    beside: tuple[int, int] = (0, 0)  # columns of the logits, before and after, that are no keys: sinks
    heads_known: bool = True  # whether something said which dimension, or which part of one, is the heads
    in_order: bool = True  # whether the logits' columns are the keys as the product had them
    places: tuple[Place, ...] = ()  # the ops that made its scores, where somebody counts ops
    counted: bool = False  # weights may meet values more than once
    traced: Traced | None = None  # what q and k were multiplied by, where an examiner asked
    as_product: bool = False  # whether the logits lie in memory as the product left them

    def one_tensor(self) -> bool:
        """Whether a gradient of q is that of k too."""
        query, key = self.query, self.key
        return query is key or (query.requires_grad and key.requires_grad and query._is_view() and query._base is key)


class Examiner(Protocol):
    """Looks closer at calls than a watch does: a scan's audit, its sinks, its pictures.

    ``look`` runs while q, k and the logits of a call are there, beside the model (no graph, no mode); it should keep nothing
    of the size of n × n. What it returns comes back in ``keep``, with the layer's name, once the call is certain to be attention.
    """

    def look(self, call: Call, vitals: Vitals, rows: Tensor | None) -> Any: ...
    def keep(self, name: str, call: Call, seen: Any) -> None: ...


@contextmanager
def without_modes() -> Iterator[None]:
    """What runs in here is not the model's: no mode sees it, ours or another's."""
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


class without_autograd_and_modes:  # noqa: N801 - it is used as a function
    """Run a block without autograd, autocast and modes. Not a generator: every call that is measured enters one of these."""

    __slots__ = ("autocast", "graph", "modes")

    def __init__(self, device: str) -> None:
        lowered = device != "meta" and torch.is_autocast_enabled(device)
        self.autocast = torch.autocast(device, enabled=False) if lowered else None

    def __enter__(self) -> None:
        self.graph = torch.is_grad_enabled()
        _set_grad_enabled(False)
        self.modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
        if self.autocast is not None:
            self.autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.autocast is not None:
            self.autocast.__exit__(*error)
        for mode in reversed(self.modes):
            _push_mode(mode)
        _set_grad_enabled(self.graph)
