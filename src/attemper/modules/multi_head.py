"""MultiHeadAttention: torch.nn.MultiheadAttention's arguments, masks and parameters; any scale rule; vitals for those who ask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from .._checks import Signs, check_dropout
from ..attention import attention, measure, weights
from ..errors import InputError
from ..scale import Rule
from ..scale import rule as rule_named
from ..scores.cosine import cosine_attention, direction
from ..vitals import Attended
from .checks import NESTED, check_heads, check_inputs
from .masks import keeping
from .measured import Measured


class MultiHeadAttention(Measured):
    """``torch.nn.MultiheadAttention`` with a choice of scale rule, fewer key/value heads, and vital signs.

    It loads that module's state dict, takes its arguments and masks (a boolean True *hides*), and returns what it returns:
    ``(output, weights)``. The output is computed by attemper's kernels, which store no Lq × Lk; the weights, which do, only when
    ``need_weights`` asks for them (as in torch, it is True when left out). Vitals come in two ways: call with ``signs=`` and get
    ``Attended(output, vitals)``; or build with ``signs=`` and read ``module.vitals`` after each call, wherever that call is made.

    Args:
        d_model: the model's width; each head gets ``d_k = d_model / heads`` of it.
        heads: how many query heads.
        rule: the scale's rule, a name in ``attemper.RULES``. A rule that learns has one parameter, ``gain``, of shape (heads,).
        kv_heads: how many key/value heads (grouped-query attention); as many as ``heads`` when left out.
        layer: the layer's place in the model, counted from 0, for the rule that needs it.
        dropout: probability of dropping a weight, in training.
        bias: whether the projections add one.
        add_bias_kv: append a learned key and value to the sequence.
        add_zero_attn: append a key and value of zeros.
        kdim: the width of ``key``; ``d_model`` when left out.
        vdim: the width of ``value``; ``d_model`` when left out.
        batch_first: tensors are (B, L, d_model), not (L, B, d_model).
        signs: what to measure at every call and keep in ``vitals``, with its graph, until the next.
        kernel: as in :func:`attention`.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> block = attemper.MultiHeadAttention(512, 8, rule="qk_norm", batch_first=True)
        >>> x = torch.randn(2, 10, 512)
        >>> output, vitals = block(x, is_causal=True, signs="all")
        >>> output.shape, vitals.entropy.shape
        (torch.Size([2, 10, 512]), torch.Size([2, 8, 10]))
    """

    # torch's encoder layers read this in eval mode, and would run their own fused attention on our weights: no rule, no vitals
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    gain: nn.Parameter | None

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        rule: str | Rule = "sqrt_dk",
        kv_heads: int | None = None,
        layer: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        signs: Signs = (),
        kernel: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(signs)
        kv_heads = heads if kv_heads is None else kv_heads
        check_heads(d_model, heads, kv_heads)
        self.rule = rule_named(rule)
        self.rule.require("MultiHeadAttention()", {"layer": layer})
        # torch's names, which models that hold a MultiheadAttention read
        self.embed_dim, self.num_heads, self.head_dim = d_model, heads, d_model // heads
        self.kv_heads, self.layer = kv_heads, layer
        self.dropout = check_dropout("MultiHeadAttention", dropout)
        self.kdim, self.vdim = d_model if kdim is None else kdim, d_model if vdim is None else vdim
        self.add_zero_attn, self.batch_first, self.kernel = add_zero_attn, batch_first, kernel

        place: dict[str, Any] = {"device": device, "dtype": dtype}
        width = kv_heads * self.head_dim
        shapes = {
            "in_proj_weight": (3 * d_model, d_model),
            "q_proj_weight": (d_model, d_model),
            "k_proj_weight": (width, self.kdim),
            "v_proj_weight": (width, self.vdim),
        }
        packed = self.kdim == self.vdim == d_model and width == d_model
        for name, shape in shapes.items():
            here = packed == (name == "in_proj_weight")
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **place)) if here else None)
        rows = d_model + 2 * width
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(rows, **place)) if bias else None)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, **place)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, width, **place)) if add_bias_kv else None)
        learns = self.rule.gain is not None
        self.register_parameter("gain", nn.Parameter(torch.empty(heads, **place)) if learns else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as torch's module does, in its order: one seed gives both the same."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if getattr(self, name) is not None:
                nn.init.xavier_uniform_(getattr(self, name))
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)
        if self.gain is not None:
            nn.init.constant_(self.gain, self.rule.gain or 0.0)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> MultiHeadAttention:
        """The same attention, on the same parameter tensors: an optimizer that holds them goes on.

        Args:
            module: what to take the place of.
            options: ``rule``, ``layer``, ``signs``, ``kernel``, as in the constructor.

        Example:
            >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
            >>> layer.self_attn = attemper.MultiHeadAttention.from_torch(layer.self_attn, rule="dk")
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise InputError(
                f"from_torch(): `module` must be a torch.nn.MultiheadAttention; got {type(module).__name__}."
            )
        ours = cls(
            module.embed_dim,
            module.num_heads,
            dropout=module.dropout,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device=module.out_proj.weight.device,
            dtype=module.out_proj.weight.dtype,
            **options,
        )
        ours.out_proj = module.out_proj
        for name, parameter in module.named_parameters(recurse=False):
            ours.register_parameter(name, parameter)
        return ours.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        signs: Signs | None = None,
    ) -> tuple[Tensor, Tensor | None] | Attended:
        """Arguments as ``torch.nn.MultiheadAttention`` takes them, and ``signs``.

        Args:
            query: (Lq, B, d_model), (B, Lq, d_model) with ``batch_first``, or (Lq, d_model).
            key: as ``query``, of width ``kdim``; ``query`` itself when left out.
            value: as ``key``, of width ``vdim``; ``key`` itself when left out.
            key_padding_mask: (B, Lk) or (Lk,): True hides a key; floating point is added to its logits.
            need_weights: return the weights too, which stores Lq × Lk.
            attn_mask: (Lq, Lk) or (B·heads, Lq, Lk): True hides; floating point is added to the logits.
            average_attn_weights: one matrix of weights, the mean over heads, instead of one per head.
            is_causal: each row sees the keys up to its own place; with ``attn_mask``, a promise that this is what it says.
            signs: as in :func:`attention`; if not left out, the result is ``Attended(output, vitals)``.

        Returns:
            ``(output, weights)``, weights None unless asked for, before dropout; or ``Attended(output, vitals)``. Vitals
            are (B, heads, Lq). A row that sees no key has weights and attention zero, where torch may give NaN.
        """
        key = query if key is None else key
        value = key if value is None else value
        check_inputs({"query": self.embed_dim, "key": self.kdim, "value": self.vdim}, query, key, value)
        if query.is_nested:
            if not self.batch_first or key_padding_mask is not None or attn_mask is not None:
                raise InputError(NESTED)
            return self._nested(query, is_causal, signs)
        batched = query.dim() == 3
        turned = batched and not self.batch_first
        alike = query is key is value
        inputs = [t.transpose(0, 1) if turned else t if batched else t[None] for t in (query, key, value)]
        q, k, v = self._project(*([inputs[0]] * 3 if alike else inputs))

        # where torch takes is_causal as all there is to know about the mask, so do we: a band is faster
        promised = is_causal and key_padding_mask is None and not need_weights
        causal = is_causal and (promised or attn_mask is None)
        keys = key.shape[0 if turned else -2]
        mask, causal = keeping(
            None if promised else attn_mask, key_padding_mask, causal, query=q, keys=keys, appended=k.shape[-2] - keys
        )
        options: dict[str, Any] = {"mask": mask, "causal": causal, "scale": self._scale(q, k, mask, causal)}
        heads, vitals = self._attend(q, k, v, signs=self._wanted(signs), **options)
        if not batched:
            vitals = vitals.each(lambda sign: sign[0])
        self._keep(vitals)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))  # the heads, concatenated and projected
        output = output.transpose(0, 1) if turned else output if batched else output[0]
        if signs is not None:
            return Attended(output, vitals)
        if not need_weights:
            return output, None
        matrix = self._weights(q, k, **options).to(output.dtype)  # (B, heads, Lq, Lk)
        matrix = matrix.mean(1) if average_attn_weights else matrix
        return output, matrix if batched else matrix[0]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """(B, L, width) each → (B, heads, L, d_k), the appended keys included."""
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key is value:
            q, k, v = linear(query, packed, bias).chunk(3, -1)  # one product is faster than three
        else:
            apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            matrices = [m for m in apart if m is not None] if packed is None else packed.chunk(3)
            biases = [None] * 3 if bias is None else bias.split([len(m) for m in matrices])
            q, k, v = (linear(x, m, b) for x, m, b in zip((query, key, value), matrices, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        return [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v)]

    def _scale(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> float | Tensor:
        keys = None
        if "keys" in self.rule.needs:
            heads = 1 if mask is None or mask.dim() < 4 else mask.shape[1]
            narrow = [t[:, :1, :, :1].detach().expand(-1, heads, -1, -1) for t in (query, key)]
            keys = measure(*narrow, mask=mask, causal=causal, signs="visible").visible[..., None]  # (B, 1 or H, Lq, 1)
        gain = self.gain if keys is None or self.gain is None else self.gain[:, None, None]
        found: float | Tensor = self.rule.scale(
            head_dim=self.head_dim, heads=self.num_heads, layer=self.layer, keys=keys, gain=gain
        )
        return found

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Attended:
        options |= {"dropout": self.dropout if self.training else 0.0, "kernel": self.kernel}
        if self.rule.unit:
            return cosine_attention(query, key, value, **options)
        return attention(query, key, value, softcap=self.rule.softcap, **options)

    def _weights(self, query: Tensor, key: Tensor, **options: Any) -> Tensor:
        if self.rule.unit:
            query, key = direction(query), direction(key)
        return weights(query, key, softcap=self.rule.softcap, **options)

    def _nested(self, query: Tensor, is_causal: bool, signs: Signs | None) -> tuple[Tensor, Tensor | None] | Attended:
        """Sequences of several lengths in one nested tensor, which nn.TransformerEncoder makes in eval mode."""
        lengths = torch.tensor([len(sequence) for sequence in query.unbind()], device=query.device)
        padded = query.to_padded_tensor(0.0)
        hidden = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]
        found = self.forward(padded, key_padding_mask=hidden, need_weights=False, is_causal=is_causal, signs=signs)
        parts = [sequence[:length] for sequence, length in zip(found[0], lengths.tolist(), strict=True)]
        output = torch.nested.as_nested_tensor(parts)
        return found._replace(output=output) if isinstance(found, Attended) else (output, None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A dict of torch's module has no gain: it stays where it is."""
        gain = f"{prefix}gain"
        if self.gain is not None and gain not in state_dict and f"{prefix}out_proj.weight" in state_dict:
            state_dict[gain] = self.gain.detach()
        super()._load_from_state_dict(state_dict, prefix, *args)
        hint = self._misfit(state_dict, prefix)
        if hint:
            args[-1].append(hint)

    def _misfit(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        packed = f"{prefix}in_proj_weight" in state_dict
        apart = f"{prefix}q_proj_weight" in state_dict
        if packed and self.in_proj_weight is None:
            return (
                f"MultiHeadAttention(): the state dict has `{prefix}in_proj_weight`, one matrix for query, key and value; this "
                f"module has kv_heads={self.kv_heads}, kdim={self.kdim}, vdim={self.vdim} and needs `{prefix}q_proj_weight`, "
                f"`{prefix}k_proj_weight` and `{prefix}v_proj_weight`. Leave kv_heads, kdim and vdim out to load it."
            )
        if apart and self.in_proj_weight is not None:
            shapes = [tuple(state_dict[f"{prefix}{x}_proj_weight"].shape) for x in "qkv"]
            return (
                f"MultiHeadAttention(): the state dict has `{prefix}q_proj_weight`, `{prefix}k_proj_weight` and "
                f"`{prefix}v_proj_weight` of shapes {shapes}; this module has one `{prefix}in_proj_weight`. Give the constructor "
                f"kv_heads={shapes[1][0] // self.head_dim}, kdim={shapes[1][1]}, vdim={shapes[2][1]}."
            )
        return None

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}", f"heads={self.num_heads}", f"rule={self.rule.name!r}"]
        if self.kv_heads != self.num_heads:
            parts.append(f"kv_heads={self.kv_heads}")
        return ", ".join(parts)
