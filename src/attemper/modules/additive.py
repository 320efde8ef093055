"""AdditiveAttention: Bahdanau's attention with its projections, `wᵀ tanh(W_q q + W_k k)`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._checks import Signs
from ..errors import InputError
from ..scores import additive_attention
from ..vitals import Attended
from .measured import Measured


class AdditiveAttention(Measured):
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
        for name, size in (("d_model", d_model), ("hidden", hidden), ("key_dim", key_dim)):
            if not isinstance(size, int) or size < 1:
                raise InputError(f"AdditiveAttention(): `{name}` must be a whole number, at least 1; got {size!r}.")
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
        value = key if value is None else value
        if mask is not None and mask.dim() > 2:
            mask = mask.unsqueeze(-3)
        q, k = self.q_proj(query), self.k_proj(key)
        # one head: without its dimension the batch would be taken for heads
        q, k, v = (t.unsqueeze(-3) for t in (q, k, value))
        wanted = self._wanted(signs)
        head, vitals = additive_attention(q, k, v, self.weight, mask=mask, causal=causal, signs=wanted)
        self._keep(vitals)
        output = head.squeeze(-3)
        return output if signs is None else Attended(output, vitals)
