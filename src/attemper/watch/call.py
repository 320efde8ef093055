"""AttentionCall: one attention call as a route read it, with its info; and Examiner, which looks at calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.jit import ScriptModule

from ..errors import InputError
from ..heads import HeadSummary
from ..vitals import SIGNS, Vitals
from .attach.running import Frame, OpPlace
from .trace.paths import Traced


@dataclass(frozen=True)
class CallInfo:
    """What a layer's attention calls are, apart from their vitals; those of the last call of a step are kept.

    ``scale`` is what the call multiplied the scores by: the argument of SDPA, or the plain numbers between the product and the
    softmax; None if it could not be read. ``declared`` is the scale that the Hugging Face interface was given.
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
    biased: bool = False  # whether numbers may be added to its scores, without which the largest score is not known
    local: bool = False  # whether its heads, or the rows or keys of them, are those of one rank

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
    ) -> CallInfo:
        """The info of a call on (..., H, Lq, E) and (..., G, Lk, E); a scale of None is 1/√E."""
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


Span = tuple[int, int, int, int]
"""The rows of a document, from and up to, and its keys."""


class Documents(NamedTuple):
    """The documents of a packed call: they follow one another in one sequence, and no row sees a key of another document."""

    spans: tuple[Span, ...]  # of those with rows and keys
    tensors: tuple[Tensor, Tensor]  # q and k as the model has them, which get the gradients
    flat: Callable[[Tensor], Tensor]  # brings them, and their gradients, to (1, H, tokens, E)

    def offsets(self, rows: int, keys: int) -> tuple[Tensor, Tensor]:
        """These, as ``measure()`` takes them, on the CPU. Between two of them is one without keys, and one without rows."""
        of_rows, of_keys = [0], [0]
        for first, last, start, stop in (*self.spans, (rows, rows, keys, keys)):
            of_rows += [first, first, last]
            of_keys += [of_keys[-1], start, stop]
        return torch.tensor(of_rows, device="cpu"), torch.tensor(of_keys, device="cpu")


@dataclass
class AttentionCall:
    """One call: what its vitals are computed from, or the vitals themselves, and the modules it runs in.

    Either ``query`` and ``key`` with the options of ``measure()``, or ``logits``, the matrix that the model itself stored;
    then ``query`` and ``key`` are the factors of the product, for gradients and for examiners.
    """

    info: CallInfo
    frames: tuple[Frame, ...]  # the modules around it
    query: Tensor  # (B, H, Lq, E), or a factor (..., Lq, E)
    key: Tensor  # (B, G, Lk, E), or a factor (..., E, Lk)
    logits: Tensor | None = None  # (B, H, Lq, Lk)
    mask: Tensor | None = None
    causal: bool | str = False
    scale: float | Tensor | None = None  # a tensor, (B, H, Lq, 1), from attemper's own operation alone
    window: int | None = None
    softcap: float | None = None
    vitals: Vitals | None = None  # if the kernel that ran has measured them
    rows: Tensor | None = None  # (B, Lq): False leaves a padded query out
    product: bool = False  # whether q and k are the factors of a product
    flipped: bool = False  # whether the product had the keys on its left: (..., Lk, E) and (..., E, Lq)
    sink_columns: tuple[int, int] = (0, 0)  # how many columns of the logits are before and after the keys
    products: tuple[tuple[int, int], ...] = ()  # where there are any: the columns of each product; others are sinks
    heads_known: bool = True  # whether it is known which dimension, or which part of one, is the heads
    some_heads: tuple[int, ...] | None = None  # those of its module that it computes, if others are computed apart
    module_heads: int | None = None  # how many its module has then
    in_order: bool = True  # whether the columns of the logits are in the order of the product's keys
    places: tuple[OpPlace, ...] = ()  # the ops that made its scores, if ops are counted
    counted: bool = False  # weights may be multiplied by values more than once
    traced: Traced | None = None  # what q and k were multiplied by, if an examiner needs it
    as_product: bool = False  # whether the logits are in memory as the product left them
    by_sdpa: bool = False  # whether torch's scaled_dot_product_attention runs it: a scale of None is its own 1/√d_k
    recomputed: bool = False  # whether q and k were computed a second time, from the input of a fused layer
    axes: tuple[int, int | None, int] | None = (
        None  # of a softmax over others: its dimension, that of the keys, of how many
    )
    over: str = "keys"  # what its softmax runs over; "queries", "heads" and "batch" are faults
    softmaxes: int = 1  # how many were applied, one to the result of another
    value: Tensor | None = None  # (…, Lk, Ev), from when the weights meet the values until the call is kept
    gain: Tensor | None = None  # the learned part of `scale`, with its graph, from attemper's own operation alone
    graph: Callable[[], Tensor] | None = None  # the logits again, with their autograd graph
    scores: Tensor | None = None  # (B, H, Lq, Lk): the logits without what was added to visible keys, if anything was
    sink: Tensor | None = None  # (H,): a learned logit beside the keys of each row, that is no column of `logits`
    documents: Documents | None = None  # of a packed call, whose q and k are (1, H, tokens, E)
    document: int | None = None  # which of them this call is; None: all

    def options(self) -> dict[str, Any]:
        """Its options, as ``measure()`` takes them."""
        options = {name: getattr(self, name) for name in ("mask", "causal", "scale", "window", "softcap", "sink")}
        if self.documents is not None and self.document is None:
            options["documents"] = self.documents.offsets(self.query.shape[2], self.key.shape[2])
        return options

    def take_sink(self, sink: Tensor | None) -> None:
        """A sink that the call was given counts as its last key, like one that a model puts beside its scores."""
        if sink is not None:
            self.products, self.sink_columns = ((0, self.info.keys),), (0, 1)
            self.sink, self.info = sink.detach(), replace(self.info, keys=self.info.keys + 1)

    def largest(self, logits: Tensor) -> Tensor:
        """The largest of each row of its logits, or of its scores, (B, H, Lq), without sinks."""
        products = [logits[..., start:stop] for start, stop in self.products if start < stop] or [logits]
        return torch.stack([product.amax(-1) for product in products]).amax(0)

    def doubts(self) -> list[str]:
        """What is not known of it: its heads, or the layer that it belongs to."""
        sentences = []
        if not self.heads_known:
            heads = "one head" if self.info.heads == 1 else f"{self.info.heads} heads"
            sentences.append(f"which part of its scores belongs to which head is not known: measured as {heads}")
        if not self.layer_known:
            sentences.append("a traced graph does not say which module makes a call: all its calls are one layer here")
        return sentences

    @property
    def is_sdpa(self) -> bool:
        """Whether q and k, a mask, causal and a number as scale are all that is needed of it, and nothing is in doubt."""
        more = [value for name, value in self.options().items() if name not in ("mask", "causal", "scale")]
        more += [self.logits, self.vitals, self.documents, self.gain, self.some_heads]
        return all(option is None for option in more) and self.heads_known and self.layer_known

    @property
    def layer_known(self) -> bool:
        """Whether the innermost module around it is the layer, and not a graph of a whole model (fx, export, jit.trace)."""
        return not isinstance(self.frames[-1].module, (GraphModule, ScriptModule))

    def doubt_of_gradients(self) -> str | None:
        """What |dq| and |dk| are, where they are not those of q and k alone."""
        query, key = (self.query, self.key) if self.documents is None else self.documents.tensors
        if query is key or (query.requires_grad and key.requires_grad and query._is_view() and query._base is key):
            return "q and k are one tensor: |dq| and |dk| are both its whole gradient"
        if len(self.products) > 1:
            return f"{len(self.products)} products share one softmax: |dq| and |dk| are those of one of them"
        return None

    def parts(self, rows: Tensor | None) -> list[tuple[AttentionCall, Tensor | None]]:
        """Each document of a packed call as a call of its own, with those of ``rows`` that are its rows; else the call itself."""
        if self.documents is None or self.document is not None:
            return [(self, rows)]
        parts = []
        for number, (first, last, start, stop) in enumerate(self.documents.spans):
            own = replace(
                self,
                info=replace(self.info, batch=1, queries=last - first, keys=stop - start + sum(self.sink_columns)),
                query=self.query[:, :, first:last],
                key=self.key[:, :, start:stop],
                mask=None if self.mask is None else of_document(self.mask, slice(first, last), slice(start, stop)),
                scale=self.scale[:, :, first:last] if isinstance(self.scale, Tensor) else self.scale,
                gain=None if self.gain is None else self.gain[:, :, first:last],
                products=((0, stop - start),) if self.products else (),
                vitals=None,
                rows=None if rows is None else rows[:, first:last],
                value=None,
                document=number,
            )
            parts.append((own, own.rows))
        return parts

    def in_graph(self) -> AttentionCall:
        """The call with q and k of its document cut from the model's own tensors, so that autograd records the cut."""
        if self.documents is None or self.document is None:
            return self
        first, last, start, stop = self.documents.spans[self.document]
        query, key = map(self.documents.flat, self.documents.tensors)
        return replace(self, query=query[:, :, first:last], key=key[:, :, start:stop])


def of_document(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """What a mask, in up to four dimensions, holds for a document."""
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., keys] if mask.dim() and mask.shape[-1] > 1 else mask


class UnfoldedRows(NamedTuple):
    """The signs of a call on a GPU, and which of its rows count, until the step's calls are folded together."""

    addresses: tuple[int, ...]  # of all signs and of `lse_low`
    shape: tuple[int, int, int]  # batch, heads, rows
    memory: tuple[Tensor, ...]  # what they are addresses in
    rows: Tensor | None
    stream: Any = None  # the CUDA stream that computes them
    score_peaks: Tensor | None = None  # (H,): the largest scale · q·k, where numbers are added to the scores

    @classmethod
    def of(cls, vitals: Vitals, rows: Tensor | None, stream: Any) -> UnfoldedRows:
        """All signs of a call, as the kernel wrote them."""
        signs, low = [getattr(vitals, name) for name in SIGNS], vitals._lse_low
        addresses = (*[sign.data_ptr() for sign in signs], 0 if low is None else low.data_ptr())
        batch, heads, count = vitals.lse.shape
        return cls(addresses, (batch, heads, count), (*signs, *([] if low is None else [low])), rows, stream)

    @property
    def device(self) -> torch.device:
        return self.memory[0].device

    @property
    def size(self) -> int:
        """Bytes that it keeps."""
        return sum([tensor.nbytes for tensor in self.memory])

    def wait_on(self, stream: Any) -> None:
        """Let a stream wait until they are computed, and keep their memory until it has read them."""
        if self.stream is None or self.stream is stream or self.stream == stream:
            return
        stream.wait_stream(self.stream)
        for tensor in (*self.memory, *(optional for optional in (self.rows, self.score_peaks) if optional is not None)):
            tensor.record_stream(stream)


Summary = HeadSummary | UnfoldedRows | None
"""What is known of a call's heads: their sums, the rows that will be summed, or nothing."""


class NoAttentionCall(InputError):
    """A watched model was called, and no attention call was found in it."""


class Examiner(Protocol):
    """Looks at each call of a watch more closely: a scan's audit, its sinks, its attention maps.

    ``look`` runs while q, k and the logits of a call exist, without autograd and modes; it should keep nothing of the size n × n.
    What it returns is given to ``keep``, with the layer's name, once the call is certain to be attention. An examiner with an
    attribute ``traces = True`` makes the watch follow what q and k were multiplied by: ``call.traced``. In a scan
    a module that runs several times on one sequence has a name for each call, unless the examiner has ``by_module = True``.
    """

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Any:
        return None

    def keep(self, name: str, call: AttentionCall, result: Any) -> None: ...


Looked = list[tuple[Examiner, AttentionCall, Any]]
"""What each examiner of a watch found in a call, or in each document of a packed one."""
