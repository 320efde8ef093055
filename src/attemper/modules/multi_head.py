"""MultiHeadAttention: torch.nn.MultiheadAttention's arguments, masks and parameters; any scale rule; vitals for those who ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from .. import kernels
from ..attention import weights
from ..errors import InputError, checked_options
from ..operation.call import Signs, check_dropout
from ..operation.call_hooks import TallyTarget, target_of
from ..operation.run import Execution, attend
from ..scale import Rule
from ..scale import rule as rule_named
from ..scores.cosine import attend_by_angle, direction
from ..vitals import Attended, Vitals
from .checks import NESTED, check_counts, check_heads, check_inputs, check_plain, check_torch_module
from .masks import WHERE, merge_masks, visible_keys
from .state_dict_errors import load_hint
from .vitals_mixin import VitalsMixin


class MultiHeadAttention(VitalsMixin):
    """``torch.nn.MultiheadAttention`` with a choice of scale rule, fewer key/value heads, and vital signs.

    It loads that module's state dict, is called with its arguments and masks (a boolean True *hides*), and returns what that
    returns, ``(output, weights)``. Without ``need_weights`` (as in torch, it is True when left out) nothing stores Lq × Lk.
    Vitals come in two ways: call with ``signs=`` and get ``Attended(output, vitals)``; or build with ``signs=`` and read
    ``module.vitals`` after each call, wherever that call is made.

    A state dict holds a learned gain but not its rule. Build ``nn.TransformerEncoder`` of layers that hold this module with
    ``enable_nested_tensor=False``, or it warns that its fused path, which knows no rules, is not taken.

    Args:
        d_model: the model's width; each head gets ``d_k = d_model / heads`` of it.
        heads: how many query heads.
        rule: the scale's rule, a name in ``attemper.RULES``. A rule that learns has one parameter, ``gain``, of shape (heads,).
        kv_heads: how many key/value heads (grouped-query attention); as many as ``heads`` when left out.
        layer: the layer's index in the model, from 0, for the rule that needs it.
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

    @checked_options
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
        check_counts(WHERE, d_model=d_model, heads=heads, kv_heads=kv_heads, kdim=kdim, vdim=vdim)
        check_counts(WHERE, 0, layer=layer)
        check_heads(d_model, heads, kv_heads)
        kernels.check_name("MultiHeadAttention", kernel)
        self.rule = rule_named(rule)
        self.rule.require(WHERE, {"layer": layer})
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
    @checked_options
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        *,
        rule: str | Rule = "sqrt_dk",
        layer: int | None = None,
        signs: Signs = (),
        kernel: str = "auto",
    ) -> MultiHeadAttention:
        """Replace a torch module, keeping its parameter tensors, so that an optimizer that holds them still trains them.

        Args:
            module: what to take the place of; its hooks stay behind.
            rule: as in the constructor.
            layer: as in the constructor.
            signs: as in the constructor.
            kernel: as in the constructor.

        Example:
            >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
            >>> layer.self_attn = attemper.MultiHeadAttention.from_torch(layer.self_attn, rule="dk")
        """
        check_torch_module(module)
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
            rule=rule,
            layer=layer,
            signs=signs,
            kernel=kernel,
        )
        check_plain(module, {name for name, _ in ours.named_parameters(recurse=False) if name != "gain"})
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
            is_causal: each row sees the keys up to its own place; with ``attn_mask``, a promise that the mask is exactly that.
            signs: as in :func:`attention`; if not left out, the result is ``Attended(output, vitals)``.

        Returns:
            ``(output, weights)``, weights None unless asked for, before dropout; or ``Attended(output, vitals)``. Vitals
            are (B, heads, Lq). A row that sees no key has weights and attention zero, where torch may give NaN.
        """
        key = query if key is None else key
        value = key if value is None else value
        inputs = {"query": query, "key": key, "value": value}
        batch_dim = 0 if self.batch_first else 1
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        check_inputs(WHERE, widths, inputs, batch_dim, order=f" with batch_first={self.batch_first}")
        if query.is_nested:
            if not self.batch_first or key_padding_mask is not None or attn_mask is not None:
                raise InputError(NESTED)
            return self._nested(query, is_causal, signs)
        batched = query.dim() == 3
        sequence_first = batched and not self.batch_first
        alike = query is key is value
        rows = [t.transpose(0, 1) if sequence_first else t if batched else t[None] for t in inputs.values()]
        q, k, v = self._project(*([rows[0]] * 3 if alike else rows))

        # where torch takes is_causal as all there is to know about the mask, so do we: a band is faster
        promised = is_causal and key_padding_mask is None and not need_weights
        keys = rows[1].shape[1]
        mask, causal = merge_masks(
            None if promised else attn_mask,
            key_padding_mask,
            is_causal and (promised or attn_mask is None),
            query=q,
            keys=keys,
            appended=k.shape[-2] - keys,
        )
        options: dict[str, Any] = {"mask": mask, "causal": causal, "scale": self._scale(q, k, mask, causal)}
        wanted, matrix = self._wanted(signs), None
        if need_weights and signs is None:
            matrix = self._weights(q, k, **options).to(q.dtype)  # (B, heads, Lq, Lk)
        # where the query is the key too, the module's name need not show that this is self-attention
        target = target_of(self, "attemper", "self" if query is key else "cross")
        if matrix is not None and not wanted and not self._drops and target is None:
            heads, vitals = matrix @ v.repeat_interleave(self.num_heads // self.kv_heads, 1), Vitals()
        else:
            heads, vitals = self._attend(q, k, v, target, signs=wanted, **options)
        if not batched:
            vitals = vitals.each(lambda sign: sign[0])
        self._keep(vitals)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))  # the heads, concatenated and projected
        output = output.transpose(0, 1) if sequence_first else output if batched else output[0]
        if signs is not None:
            return Attended(output, vitals)
        if matrix is None:
            return output, None
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

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _scale(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> float | Tensor:
        keys: Tensor | None = None
        gain: Tensor | None = self.gain
        if "keys" in self.rule.needs:
            keys = visible_keys(query, key, mask, causal)
            gain = gain if gain is None else gain[:, None, None]
        scale: float | Tensor = self.rule.scale(
            head_dim=self.head_dim, heads=self.num_heads, layer=self.layer, keys=keys, gain=gain
        )
        return scale

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, target: TallyTarget | None, **options: Any
    ) -> Attended:
        options["dropout"] = self.dropout if self._drops else 0.0
        execution = Execution(self.kernel, tally=target)
        if self.rule.unit:
            return attend_by_angle(query, key, value, execution=execution, **options)
        return attend("attention", query, key, value, execution=execution, softcap=self.rule.softcap, **options)

    def _weights(self, query: Tensor, key: Tensor, **options: Any) -> Tensor:
        if self.rule.unit:
            query, key = direction(query), direction(key)
        return weights(query, key, softcap=self.rule.softcap, **options)

    def _nested(self, query: Tensor, is_causal: bool, signs: Signs | None) -> tuple[Tensor, Tensor | None] | Attended:
        """Sequences of several lengths in one nested tensor, which nn.TransformerEncoder makes in eval mode."""
        lengths = torch.tensor([len(sequence) for sequence in query.unbind()], device=query.device)
        padded = query.to_padded_tensor(0.0)
        hidden = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]
        attended = self.forward(padded, key_padding_mask=hidden, need_weights=False, is_causal=is_causal, signs=signs)
        parts = [sequence[:length] for sequence, length in zip(attended[0], lengths.tolist(), strict=True)]
        output = torch.nested.as_nested_tensor(parts)
        return attended._replace(output=output) if isinstance(attended, Attended) else (output, None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A dict of torch's module has no gain: it stays where it starts."""
        gain, like = self._parameters.get("gain"), state_dict.get(f"{prefix}out_proj.weight")
        if gain is not None and like is not None and f"{prefix}gain" not in state_dict:
            start = torch.full_like(gain, self.rule.gain or 0.0, device=like.device) if gain.is_meta else gain.detach()
            state_dict[f"{prefix}gain"] = start
        super()._load_from_state_dict(state_dict, prefix, *args)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in torch; what does not fit gets a sentence below torch's list of keys.

        Args:
            state_dict: of this class or of ``torch.nn.MultiheadAttention``.
            strict: whether keys that do not fit are an error.
            assign: whether to take the dict's tensors themselves.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            hint = load_hint(self, state_dict)
            if hint is None:
                raise
            raise RuntimeError(f"{error}\n\t{hint}") from None

    def extra_repr(self) -> str:
        shown = {
            "rule": repr(self.rule.name),
            "kv_heads": None if self.kv_heads == self.num_heads else self.kv_heads,
            "layer": self.layer,
            "kdim": None if self.kdim == self.embed_dim else self.kdim,
            "vdim": None if self.vdim == self.embed_dim else self.vdim,
            "dropout": self.dropout or None,
            "batch_first": self.batch_first or None,
            "signs": self.signs or None,
            "kernel": None if self.kernel == "auto" else repr(self.kernel),
        }
        parts = [f"{name}={value}" for name, value in shown.items() if value is not None]
        return ", ".join([str(self.embed_dim), f"heads={self.num_heads}", *parts])
