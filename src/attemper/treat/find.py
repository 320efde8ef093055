"""Find: the rows of parameters that make q and k of one attention call, from its graph. No list of architectures.

A parameter belongs to heads along a dimension if each of its rows there serves one head of q (or one of k), but no head of the
other, and no values. Among these the search wants a set, such as a weight and its bias, in which q has degree 1: scaled
together, they scale q. If there is none, a norm lies in between, and the gain behind it is taken, which may serve all heads. If
nothing makes q alone, k may take the whole factor (a bilinear form), or rows that make both q and k of a head its square root
(tied projections, nGPT).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..watch.examine import AttentionCall
from .derivatives import (
    NOBODY,
    SEVERAL,
    Directional,
    Used,
    owners,
    share,
    share_by_channel,
    tolerance,
    used,
)
from .table import BY_LAYER, PER_HEAD, LayerProjections, ProjectionPart

DEGREE_0 = 0.05
"""A parameter whose own direction changes a head this little, relative to a random direction, is before a norm."""

BOUNDED = "q is normalised and has no gain, so that its logits are bounded by construction"
DISPROPORTIONATE = (
    "scaling the parameters of {module} that make q does not scale q by the same factor: something is added to what they make, "
    "or it is squared or clamped. Add a norm with attemper.add_qk_norm(), or lower the learning rate"
)
UNMADE = (
    "no parameter of {module} makes q of a head alone: weights that heads share, or that q shares with k or v, cannot be scaled "
    "for one head. Name them with attemper.Projections.named() if this is wrong"
)
NO_GRAPH = (
    "no gradient leads from q to a parameter: q is computed under no_grad, in a reentrant checkpoint, from quantised weights, or "
    "by an op without a derivative. Name the parameters with attemper.Projections.named()"
)
FROZEN = (
    "weights of {module} are frozen (requires_grad=False), as LoRA leaves them, and those that are trained do not scale q or k "
    "by themselves, so that nothing can be clipped. Merge the adapters, or train these weights too"
)
ZERO = (
    "q is 0 everywhere, as before the first step of weights that begin at 0. Call attemper.projections(model, batch) again after "
    "some steps"
)
SHARED_GAIN = "one gain serves all heads, so that the layer is scaled as a whole"
SHARED_ROWS = "no dimension of its weights divides them by heads, so that the layer is scaled as a whole"


class Candidate(NamedTuple):
    """A parameter of the modules around a call."""

    name: str
    tensor: Tensor
    group: str  # the child of the attention module that holds it: a weight, its bias and its adapters


class Own(NamedTuple):
    """A parameter that belongs to heads: its index among the candidates, the dimension, and the head of each row."""

    candidate: int
    dim: int
    owner: Tensor
    offset: float = 0.0


@dataclass
class Made:
    """q, k and v of one call, as (B, H, L, E), with their graphs."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    gain: Tensor | None  # (B, H, Lq, 1)

    @classmethod
    def of(cls, call: AttentionCall) -> Made | None:
        """None if the heads of q cannot be told apart."""
        info = call.info
        query = call.query.mT if call.flipped else call.query
        key = call.key.mT if call.product and not call.flipped else call.key
        if query.numel() % (info.batch * info.heads * query.shape[-1]) or info.heads % info.kv_heads:
            return None
        # grouped heads of one product are joined into its rows
        query = query.reshape(info.batch, info.heads, -1, query.shape[-1])
        if key.numel() % (info.batch * key.shape[-2] * key.shape[-1]):
            return None
        key = _unrepeated(key.reshape(info.batch, -1, *key.shape[-2:]))
        if info.heads % key.shape[1]:
            return None
        gain = None if call.gain is None or not call.gain.requires_grad else call.gain.unsqueeze(-1)
        value = call.value if call.value is not None and call.value.requires_grad else None
        return cls(query, key, value, gain)


def _unrepeated(key: Tensor) -> Tensor:
    """The key heads without repetition: models repeat keys that several query heads share."""
    heads = key.shape[1]
    for times in range(heads, 1, -1):
        if heads % times == 0:
            groups = key.detach().unflatten(1, (-1, times))
            if bool((groups == groups[:, :, :1]).all()):
                return key.unflatten(1, (-1, times))[:, :, 0]
    return key


def find_layer(
    layer: str, call: AttentionCall, around: Sequence[tuple[nn.Module, Callable[[], list[Candidate]]]]
) -> LayerProjections:
    """The projections of one call. ``around``: each module around it, innermost first, and its parameters."""
    info = call.info
    made = Made.of(call)
    heads = info.heads if call.some_heads is None else call.module_heads or info.heads
    none = LayerProjections(layer, info.kind, heads, info.kv_heads)
    if not call.layer_known:
        return refused(
            none, "a traced graph does not say which layer it is. Find the projections of the model that was traced"
        )
    if call.some_heads is not None:
        return refused(none, "it attends several times in a pass, to some of its heads each time")
    if made is None or not call.heads_known:
        return refused(none, "which part of q belongs to which head is not known")
    if not made.query.requires_grad and not made.key.requires_grad and made.gain is None:
        return refused(none, FROZEN.format(module=_name(around[0][0])) if _is_frozen(around[0][0]) else NO_GRAPH)
    if made.gain is None and not bool(made.query.any()):
        return refused(none, ZERO)
    none = LayerProjections(layer, info.kind, info.heads, made.key.shape[1])
    why = NO_GRAPH
    for module, candidates in around:
        listed = candidates()
        if listed:
            projections = Search(made, listed).run(none, _name(module))
            if projections.how is not None:
                return projections
            why = projections.why if projections.why != NO_GRAPH and projections.why is not None else why
    return refused(none, FROZEN.format(module=_name(around[0][0])) if _is_frozen(around[0][0]) else why)


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _is_frozen(module: nn.Module) -> bool:
    """Whether weights of a module are not trained."""
    return any(parameter.dim() > 1 and not parameter.requires_grad for parameter in module.parameters())


def refused(layer: LayerProjections, why: str) -> LayerProjections:
    """A layer in which nothing can be scaled."""
    return LayerProjections(layer.layer, layer.kind, layer.heads, layer.key_heads, why=why)


class Search:
    """The search among the parameters of one module."""

    def __init__(self, made: Made, candidates: list[Candidate]) -> None:
        self.made, self.candidates = made, candidates
        self.tensors = [candidate.tensor for candidate in candidates]
        nothing: list[Used | None] = [None] * len(candidates)
        self.of_q = owners(made.query, self.tensors) if made.query.requires_grad else nothing
        self.of_k = owners(made.key, self.tensors) if made.key.requires_grad else nothing
        self.of_v = used(made.value, self.tensors) if made.value is not None else nothing

    def run(self, none: LayerProjections, module: str) -> LayerProjections:
        named = (none.layer, none.kind, none.heads, none.key_heads)
        if self.made.query.requires_grad and any(rows is not None for rows in self.of_q):
            own = self._own(self.of_q, self.of_k)
            picked = self._picked(self.made.query, own)
            if picked:
                return LayerProjections(*named, self._with_keys(picked), PER_HEAD)
        for side, picked in (("gain", self._by_gain()), ("k", self._of_keys()), ("both", self._of_both())):
            if picked:
                return LayerProjections(*named, self._parts(side, picked, None), PER_HEAD)
        if all(rows is None for rows in self.of_q):
            return refused(none, NO_GRAPH)
        gains = self._picked(self.made.query, self._of_layer())
        if gains:
            alone = all(self.tensors[own_rows.candidate].dim() < 2 for own_rows in gains)
            why = SHARED_GAIN if alone else SHARED_ROWS
            return LayerProjections(*named, self._parts("q", gains, None), BY_LAYER, why)
        if not self._is_homogeneous():
            return refused(none, BOUNDED)
        why = DISPROPORTIONATE if self._own(self.of_q, self.of_k) else UNMADE
        return refused(none, why.format(module=module))

    def _is_homogeneous(self) -> bool:
        """Whether q changes when all parameters that it uses are scaled: not so behind a norm."""
        along = Directional(self.made.query, self.tensors)
        total = along.together({index: tensor.detach() for index, tensor in enumerate(self.tensors)})
        return bool(share(total, self.made.query).max() > DEGREE_0)

    def _own(self, mine: list[Used | None], other: list[Used | None]) -> list[Own]:
        """The parameters that belong to heads of one side alone, each along the first dimension where that is so."""
        owned = []
        for index, rows in enumerate(mine):
            if rows is None:
                continue
            for dim, owner in enumerate(rows):
                theirs, values = other[index], self.of_v[index]
                both = torch.zeros_like(owner, dtype=torch.bool)
                both = both if theirs is None else both | (theirs[dim] != NOBODY)
                both = both if values is None else both | values[dim]
                if not bool(((owner != NOBODY) & both).any()) and not bool((owner == SEVERAL).any()):
                    owned.append(Own(index, dim, owner))
                    break
        return owned

    def _of_layer(self) -> list[Own]:
        """The parameters that q uses, and neither k nor the values, whichever heads they serve."""
        owned = []
        for index, rows in enumerate(self.of_q):
            if rows is not None and self.of_k[index] is None and self.of_v[index] is None:
                owned.append(Own(index, 0, (rows[0] != NOBODY).long() - 1))
        return owned

    def _of_keys(self) -> list[Own]:
        """The parameters of k alone, where each query head has a key head and q has no parameters of its own."""
        made = self.made
        if not made.key.requires_grad or made.key.shape[1] != made.query.shape[1]:
            return []
        return self._picked(made.key, self._own(self.of_k, self.of_q))

    def _of_both(self) -> list[Own]:
        """The parameters whose rows make q and k of the same head, and not the values: both have degree 1 in them."""
        made, owned = self.made, []
        if not made.key.requires_grad or made.key.shape[1] != made.query.shape[1]:
            return []
        for index, (mine, theirs, values) in enumerate(zip(self.of_q, self.of_k, self.of_v, strict=True)):
            for dim in range(0 if mine is None or theirs is None else len(mine)):
                assert mine is not None
                assert theirs is not None
                owner = mine[dim]
                others = values is not None and bool((values[dim] & (owner != NOBODY)).any())
                if not others and torch.equal(owner, theirs[dim]) and not bool((owner == SEVERAL).any()):
                    owned.append(Own(index, dim, owner))
                    break
        picked = self._picked(made.query, owned)
        return picked if picked == self._picked(made.key, owned) else []

    def _picked(self, output: Tensor, own: list[Own]) -> list[Own]:
        """Those in which the output together has degree 1; empty if there are none."""
        if not own:
            return []
        limit = tolerance(output)
        along, changes, scaled = self._behind_norms(output, own)
        # the last group is the nearest to the output
        for some in (scaled, *reversed(self._by_group(scaled).values()), *([part] for part in reversed(scaled))):
            total = sum((changes[part.candidate] for part in some), torch.zeros_like(output))
            if some and bool((share(total - output, output) <= limit).all()):
                return self._without_effectless(some, changes, output, limit)
        for part in reversed(own):  # a gain that is applied as 1 + w
            shifted = part._replace(offset=1.0)
            if bool((share(along(part.candidate, self._values(shifted)) - output, output) <= limit).all()):
                return [shifted]
        return []

    def _without_effectless(
        self, some: list[Own], changes: Mapping[int, Tensor], output: Tensor, limit: float
    ) -> list[Own]:
        """Without the groups that together change nothing: a weight and its bias before a norm whose gain is also chosen."""
        for own in self._by_group(some).values():
            total = sum((changes[part.candidate] for part in own), torch.zeros_like(output))
            if any(bool(self._values(part).any()) for part in own) and bool((share(total, output) <= limit).all()):
                some = [part for part in some if part not in own]
        return some

    def _behind_norms(self, output: Tensor, own: list[Own]) -> tuple[Directional, dict[int, Tensor], list[Own]]:
        """Derivatives of the output, its change along each part's own values, and the parts that no norm undoes."""
        along = Directional(output, self.tensors)
        changes = {part.candidate: along(part.candidate, self._values(part)) for part in own}
        return along, changes, [p for p in own if not self._is_before_norm(along, p, changes[p.candidate], output)]

    def _by_group(self, parts: list[Own]) -> dict[str, list[Own]]:
        groups: dict[str, list[Own]] = {}
        for part in parts:
            groups.setdefault(self.candidates[part.candidate].group, []).append(part)
        return groups

    def _values(self, part: Own) -> Tensor:
        """The values of the rows that belong to heads, and 0 elsewhere."""
        tensor = self.tensors[part.candidate].detach()
        return (tensor + part.offset) * along_rows(part.owner != NOBODY, part.dim, tensor)

    def _is_before_norm(self, along: Directional, part: Own, change: Tensor, output: Tensor) -> bool:
        values = self._values(part)
        if not bool(values.any()):  # a bias that is still 0 counts with the weight of its module
            partners = [
                other
                for other, candidate in zip(self.tensors, self.candidates, strict=True)
                if candidate.group == self.candidates[part.candidate].group and bool(other.detach().any())
            ]
            return not partners
        generator = torch.Generator("cpu").manual_seed(2)
        random = torch.randn(values.shape, generator=generator, dtype=torch.float32, device="cpu").to(values)
        random = random * (values.norm() / random.norm()) * (values != 0)
        reached = share(along(part.candidate, random), output)
        return bool((share(change, output) <= DEGREE_0 * reached).all())

    def _with_keys(self, picked: list[Own]) -> tuple[ProjectionPart, ...]:
        """The parts of q, and those of k where a head's keys are its own."""
        made = self.made
        own = self._own(self.of_k, self.of_q)
        if not own or not made.key.requires_grad:
            return self._parts("q", picked, None)
        limit = tolerance(made.key)
        _, changes, scaled = self._behind_norms(made.key, own)
        for some in (scaled, *reversed(self._by_group(scaled).values())):
            total = sum((changes[part.candidate] for part in some), torch.zeros_like(made.key))
            first = share_by_channel(total - made.key, made.key) <= limit
            none = share_by_channel(total, made.key) <= limit
            if some and bool((first | none).all()) and bool(first.any()):
                some = self._without_effectless(some, changes, made.key, limit)
                whole = self._whole_rows(picked, first)
                if whole is not None:
                    return self._parts("q", picked, whole) + self._parts("k", some, None)
        return self._parts("q", picked, None)

    def _whole_rows(self, picked: list[Own], split: Tensor) -> list[Tensor] | None:
        """For each parameter of q, its rows whose channels of k cannot be scaled; None if a row has channels of both kinds."""
        made = self.made
        if bool(split.all()):
            return [torch.zeros_like(part.owner, dtype=torch.bool) for part in picked]
        split = split.repeat_interleave(made.query.shape[1] // split.shape[0], 0)[None, :, None, :]
        tensors = [self.tensors[part.candidate] for part in picked]
        with_k = used(made.query, tensors, split.expand_as(made.query))
        alone = used(made.query, tensors, ~split.expand_as(made.query))
        whole = []
        for part, half, rest in zip(picked, with_k, alone, strict=True):
            none = torch.zeros_like(part.owner, dtype=torch.bool)
            first, second = none if half is None else half[part.dim], none if rest is None else rest[part.dim]
            if bool((first & second).any()):
                return None
            whole.append(second)
        return whole

    def _by_gain(self) -> list[Own]:
        """The learned part of the scale, in attemper's own operation."""
        if self.made.gain is None:
            return []
        rows = owners(self.made.gain, self.tensors)
        own = [
            Own(index, dim, owner)
            for index, dims in enumerate(rows)
            if dims is not None
            for dim, owner in enumerate(dims)
            if not bool((owner == SEVERAL).any())
        ]
        return self._picked(self.made.gain, own)

    def _parts(self, side: str, own: list[Own], whole: list[Tensor] | None) -> tuple[ProjectionPart, ...]:
        """The rows as parts of a table. Without ``whole``, q takes the whole factor everywhere."""
        parts = []
        for index, owned_rows in enumerate(own):
            rows = torch.ones_like(owned_rows.owner, dtype=torch.bool) if whole is None else whole[index]
            name = self.candidates[owned_rows.candidate].name
            parts.append(
                ProjectionPart(
                    name, owned_rows.dim, side, owned_rows.owner.cpu(), rows.cpu() & (side != "k"), owned_rows.offset
                )
            )
        return tuple(parts)


def along_rows(rows: Tensor, dim: int, like: Tensor) -> Tensor:
    """Numbers of rows in the shape that broadcasts over a parameter."""
    shape = [1] * max(1, like.dim())
    shape[dim] = -1
    return rows.view(shape) if like.dim() else rows.view(())
