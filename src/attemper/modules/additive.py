"""AdditiveAttention: Bahdanau's attention with its projections, `wᵀ tanh(W_q q + W_k k)`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import InputError, checked_options
from ..operation.call import Signs
from ..scores import additive_attention
from ..vitals import Attended
from .checks import check_counts, check_inputs, check_mask
from .vitals_mixin import VitalsMixin

WHERE = "AdditiveAttention()"


class AdditiveAttention(VitalsMixin):
    """Scores a query and a key by a small network instead of their product: ``weight · tanh(W_q q + W_k k)``.

    A logit is at most the sum of ``|weight|``, whatever q and k are. It costs Lq·Lk·hidden tanh's but stores no Lq × Lk.

    Args:
        d_model: the width of the queries.
        hidden: the width of the network; ``d_model`` when left out.
        key_dim: the width of the keys; ``d_model`` when left out. Values may have any.
        bias: whether W_k adds one.
        signs: what to measure at every call and keep in ``vitals``, with its graph, until the next.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> score = attemper.AdditiveAttention(32, hidden=16)
        >>> decoder, encoder = torch.randn(4, 1, 32), torch.randn(4, 9, 32)
        >>> score(decoder, encoder).shape
        torch.Size([4, 1, 32])
        >>> output, vitals = score(decoder, encoder, signs="all")
        >>> bool((vitals.peak <= score.weight.abs().sum()).all())
        True
    """

    @checked_options
    def __init__(
        self,
        d_model: int,
        hidden: int | None = None,
        *,
        key_dim: int | None = None,
        bias: bool = True,
        signs: Signs = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(signs)
        hidden = d_model if hidden is None else hidden
        key_dim = d_model if key_dim is None else key_dim
        check_counts(WHERE, d_model=d_model, hidden=hidden, key_dim=key_dim)
        self.q_proj = nn.Linear(d_model, hidden, bias=False, device=device, dtype=dtype)
        self.k_proj = nn.Linear(key_dim, hidden, bias=bias, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W_q and W_k as nn.Linear does, and the weight as a row of one."""
        self.q_proj.reset_parameters()
        self.k_proj.reset_parameters()
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool | str = False,
        signs: Signs | None = None,
    ) -> Tensor | Attended:
        """Attend from ``query`` to ``key``.

        Args:
            query: (B, Lq, d_model) or (Lq, d_model).
            key: (B, Lk, key_dim).
            value: (B, Lk, any); ``key`` itself when left out.
            mask: broadcastable to (B, Lq, Lk), True = keep, or added to the logits. For a padding mask ``keep[:, None, :]``.
            causal: as in :func:`attention`.
            signs: as in :func:`attention`; if not left out, the result is ``Attended(output, vitals)``.

        Returns:
            the output (B, Lq, any), or ``Attended(output, vitals)`` with vitals (B, 1, Lq): it is one head.
        """
        inputs = {"query": query, "key": key, "value": key if value is None else value}
        widths = {"query": self.q_proj.in_features, "key": self.k_proj.in_features, "value": None}
        check_inputs(WHERE, widths, inputs, batch_dim=0)
        if mask is not None:
            mask = _checked(mask, query, key)
        q, k = self.q_proj(query), self.k_proj(key)
        # one head: without its dimension the batch would be taken for heads
        q, k, v = (t.unsqueeze(-3) for t in (q, k, inputs["value"]))
        wanted = self._wanted(signs)
        head, vitals = additive_attention(q, k, v, self.weight, mask=mask, causal=causal, signs=wanted)
        self._keep(vitals)
        output = head.squeeze(-3)
        return output if signs is None else Attended(output, vitals)

    def extra_repr(self) -> str:
        return f"hidden={self.weight.shape[0]}" + (f", signs={self.signs}" if self.signs else "")


def _checked(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask with a dimension for the head where it has one for the batch."""
    check_mask(WHERE, "mask", mask, "keep")
    full = (*query.shape[:-1], key.shape[-2])
    padded = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
    if len(padded) > len(full) or any(size not in (1, wanted) for size, wanted in zip(padded, full, strict=True)):
        raise InputError(
            f"{WHERE}: `mask` must broadcast to {full}, (B, Lq, Lk); got {tuple(mask.shape)}. "
            "For a (B, Lk) padding mask pass mask[:, None, :]."
        )
    return mask.unsqueeze(-3) if mask.dim() == 3 else mask
