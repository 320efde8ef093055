"""Find: the rows of parameters that make q and k of one attention call, from its graph. No list of architectures.

A parameter is a head's own along a dimension if every row there serves one head of q, or one of k, and neither the other nor
the values. Of the own parameters those count in which q has degree 1 together (a weight and its bias). If there are none, a
norm is between them and q: then the gain behind it is taken, which may serve all heads. If nothing makes q alone, k may take the
whole factor (a bilinear form), or rows that make q and k of one head may take its square root (tied projections, nGPT).
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
    """A parameter that belongs to heads: its place among the candidates, the dimension, and the head of each row."""

    place: int
    dim: int
    owner: Tensor
    offset: float = 0.0


@dataclass
class Made:
    """The tensors of one call, as (B, H, L, E), and what they use of the candidates."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    gain: Tensor | None  # (B, H, Lq, 1)

    @classmethod
    def of(cls, call: AttentionCall) -> Made | None:
        """None if the heads of q cannot be told apart."""
        facts = call.facts
        query = call.query.mT if call.flipped else call.query
        key = call.key.mT if call.product and not call.flipped else call.key
        if query.numel() % (facts.batch * facts.heads * query.shape[-1]) or facts.heads % facts.kv_heads:
            return None
        # grouped heads of one product are joined into its rows
        query = query.reshape(facts.batch, facts.heads, -1, query.shape[-1])
        if key.numel() % (facts.batch * key.shape[-2] * key.shape[-1]):
            return None
        key = _unrepeated(key.reshape(facts.batch, -1, *key.shape[-2:]))
        if facts.heads % key.shape[1]:
            return None
        gain = None if call.gain is None or not call.gain.requires_grad else call.gain.unsqueeze(-1)
        value = call.value if call.value is not None and call.value.requires_grad else None
        return cls(query, key, value, gain)


def _unrepeated(key: Tensor) -> Tensor:
    """One of each group of equal heads: models repeat keys that several query heads share."""
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
    facts = call.facts
    made = Made.of(call)
    heads = facts.heads if call.some_heads is None else call.module_heads or facts.heads
    none = LayerProjections(layer, facts.kind, heads, facts.kv_heads)
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
    none = LayerProjections(layer, facts.kind, facts.heads, made.key.shape[1])
    why = NO_GRAPH
    for module, candidates in around:
        listed = candidates()
        if listed:
            found = Search(made, listed).found(none, _name(module))
            if found.how is not None:
                return found
            why = found.why if found.why != NO_GRAPH and found.why is not None else why
    return refused(none, FROZEN.format(module=_name(around[0][0])) if _is_frozen(around[0][0]) else why)


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _is_frozen(module: nn.Module) -> bool:
    """Whether weights of a module are not trained."""
    return any(one.dim() > 1 and not one.requires_grad for one in module.parameters())


def refused(layer: LayerProjections, why: str) -> LayerProjections:
    """A layer of which nothing can be scaled."""
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

    def found(self, none: LayerProjections, module: str) -> LayerProjections:
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
            alone = all(self.tensors[one.place].dim() < 2 for one in gains)
            why = SHARED_GAIN if alone else SHARED_ROWS
            return LayerProjections(*named, self._parts("q", gains, None), BY_LAYER, why)
        if not self._is_homogeneous():
            return refused(none, BOUNDED)
        why = DISPROPORTIONATE if self._own(self.of_q, self.of_k) else UNMADE
        return refused(none, why.format(module=module))

    def _is_homogeneous(self) -> bool:
        """Whether q changes when all parameters that it uses are scaled: not so behind a norm."""
        along = Directional(self.made.query, self.tensors)
        total = along.together({place: tensor.detach() for place, tensor in enumerate(self.tensors)})
        return bool(share(total, self.made.query).max() > DEGREE_0)

    def _own(self, mine: list[Used | None], other: list[Used | None]) -> list[Own]:
        """The parameters that belong to heads of one side alone, each along the first dimension where that is so."""
        found = []
        for place, rows in enumerate(mine):
            if rows is None:
                continue
            for dim, owner in enumerate(rows):
                theirs, values = other[place], self.of_v[place]
                both = torch.zeros_like(owner, dtype=torch.bool)
                both = both if theirs is None else both | (theirs[dim] != NOBODY)
                both = both if values is None else both | values[dim]
                if not bool(((owner != NOBODY) & both).any()) and not bool((owner == SEVERAL).any()):
                    found.append(Own(place, dim, owner))
                    break
        return found

    def _of_layer(self) -> list[Own]:
        """The parameters that q uses, and neither k nor the values, whichever heads they serve."""
        found = []
        for place, rows in enumerate(self.of_q):
            if rows is not None and self.of_k[place] is None and self.of_v[place] is None:
                found.append(Own(place, 0, (rows[0] != NOBODY).long() - 1))
        return found

    def _of_keys(self) -> list[Own]:
        """The parameters of k alone, where each query head has a key head and q has no parameters of its own."""
        made = self.made
        if not made.key.requires_grad or made.key.shape[1] != made.query.shape[1]:
            return []
        return self._picked(made.key, self._own(self.of_k, self.of_q))

    def _of_both(self) -> list[Own]:
        """The parameters whose rows make q and k of the same head, and not the values: both have degree 1 in them."""
        made, found = self.made, []
        if not made.key.requires_grad or made.key.shape[1] != made.query.shape[1]:
            return []
        for place, (mine, theirs, values) in enumerate(zip(self.of_q, self.of_k, self.of_v, strict=True)):
            for dim in range(0 if mine is None or theirs is None else len(mine)):
                assert mine is not None
                assert theirs is not None
                owner = mine[dim]
                others = values is not None and bool((values[dim] & (owner != NOBODY)).any())
                if not others and torch.equal(owner, theirs[dim]) and not bool((owner == SEVERAL).any()):
                    found.append(Own(place, dim, owner))
                    break
        picked = self._picked(made.query, found)
        return picked if picked == self._picked(made.key, found) else []

    def _picked(self, output: Tensor, own: list[Own]) -> list[Own]:
        """Those in which the output has degree 1, together; empty if there are none."""
        if not own:
            return []
        along, limit = Directional(output, self.tensors), tolerance(output)
        changes = {one.place: along(one.place, self._values(one)) for one in own}
        scaled = [one for one in own if not self._is_before_norm(along, one, changes[one.place], output)]
        groups = list(dict.fromkeys(self.candidates[one.place].group for one in own))
        tries = [scaled]
        for group in reversed(groups):  # the last is the nearest to the output
            tries.append([one for one in scaled if self.candidates[one.place].group == group])
        tries += [[one] for one in reversed(scaled)]
        for some in tries:
            total = sum((changes[one.place] for one in some), torch.zeros_like(output))
            if some and bool((share(total - output, output) <= limit).all()):
                return self._that_count(some, changes, output, limit)
        for one in reversed(own):  # a gain that is applied as 1 + w
            shifted = one._replace(offset=1.0)
            if bool((share(along(one.place, self._values(shifted)) - output, output) <= limit).all()):
                return [shifted]
        return []

    def _that_count(self, some: list[Own], changes: Mapping[int, Tensor], output: Tensor, limit: float) -> list[Own]:
        """Those without groups that change nothing together: a weight and its bias before a norm, whose gain is among them."""
        groups: dict[str, list[Own]] = {}
        for one in some:
            groups.setdefault(self.candidates[one.place].group, []).append(one)
        for own in groups.values():
            total = sum((changes[one.place] for one in own), torch.zeros_like(output))
            if any(bool(self._values(one).any()) for one in own) and bool((share(total, output) <= limit).all()):
                some = [one for one in some if one not in own]
        return some

    def _values(self, one: Own) -> Tensor:
        """The values of the rows that belong to heads, and 0 elsewhere."""
        tensor = self.tensors[one.place].detach()
        return (tensor + one.offset) * along_rows(one.owner != NOBODY, one.dim, tensor)

    def _is_before_norm(self, along: Directional, one: Own, change: Tensor, output: Tensor) -> bool:
        values = self._values(one)
        if not bool(values.any()):  # a bias that is still 0 goes with the weight of its module
            partners = [
                other
                for other, candidate in zip(self.tensors, self.candidates, strict=True)
                if candidate.group == self.candidates[one.place].group and bool(other.detach().any())
            ]
            return not partners
        generator = torch.Generator("cpu").manual_seed(2)
        random = torch.randn(values.shape, generator=generator, dtype=torch.float32, device="cpu").to(values)
        random = random * (values.norm() / random.norm()) * (values != 0)
        reached = share(along(one.place, random), output)
        return bool((share(change, output) <= DEGREE_0 * reached).all())

    def _with_keys(self, picked: list[Own]) -> tuple[ProjectionPart, ...]:
        """The parts of q, and those of k where a head's keys are its own."""
        made = self.made
        own = self._own(self.of_k, self.of_q)
        if not own or not made.key.requires_grad:
            return self._parts("q", picked, None)
        along, limit = Directional(made.key, self.tensors), tolerance(made.key)
        changes = {one.place: along(one.place, self._values(one)) for one in own}
        scaled = [one for one in own if not self._is_before_norm(along, one, changes[one.place], made.key)]
        groups = list(dict.fromkeys(self.candidates[one.place].group for one in scaled))
        tries = [scaled] + [
            [one for one in scaled if self.candidates[one.place].group == group] for group in reversed(groups)
        ]
        for some in tries:
            total = sum((changes[one.place] for one in some), torch.zeros_like(made.key))
            first = share_by_channel(total - made.key, made.key) <= limit
            none = share_by_channel(total, made.key) <= limit
            if some and bool((first | none).all()) and bool(first.any()):
                some = self._that_count(some, changes, made.key, limit)
                whole = self._whole_rows(picked, first)
                if whole is not None:
                    return self._parts("q", picked, whole) + self._parts("k", some, None)
        return self._parts("q", picked, None)

    def _whole_rows(self, picked: list[Own], split: Tensor) -> list[Tensor] | None:
        """For each parameter of q, the rows that meet channels of k which cannot be scaled; None if a row meets both kinds."""
        made = self.made
        if bool(split.all()):
            return [torch.zeros_like(one.owner, dtype=torch.bool) for one in picked]
        split = split.repeat_interleave(made.query.shape[1] // split.shape[0], 0)[None, :, None, :]
        tensors = [self.tensors[one.place] for one in picked]
        with_k = used(made.query, tensors, split.expand_as(made.query))
        alone = used(made.query, tensors, ~split.expand_as(made.query))
        found = []
        for one, half, rest in zip(picked, with_k, alone, strict=True):
            none = torch.zeros_like(one.owner, dtype=torch.bool)
            first, second = none if half is None else half[one.dim], none if rest is None else rest[one.dim]
            if bool((first & second).any()):
                return None
            found.append(second)
        return found

    def _by_gain(self) -> list[Own]:
        """The learned part of the scale, in attemper's own operation."""
        if self.made.gain is None:
            return []
        rows = owners(self.made.gain, self.tensors)
        own = [
            Own(place, dim, owner)
            for place, dims in enumerate(rows)
            if dims is not None
            for dim, owner in enumerate(dims)
            if not bool((owner == SEVERAL).any())
        ]
        return self._picked(self.made.gain, own)

    def _parts(self, side: str, own: list[Own], whole: list[Tensor] | None) -> tuple[ProjectionPart, ...]:
        """As parts. Without ``whole``, q takes the whole factor everywhere."""
        found = []
        for place, one in enumerate(own):
            rows = torch.ones_like(one.owner, dtype=torch.bool) if whole is None else whole[place]
            name = self.candidates[one.place].name
            found.append(ProjectionPart(name, one.dim, side, one.owner.cpu(), rows.cpu() & (side != "k"), one.offset))
        return tuple(found)


def along_rows(rows: Tensor, dim: int, like: Tensor) -> Tensor:
    """Numbers of rows in the shape that broadcasts over a parameter."""
    shape = [1] * max(1, like.dim())
    shape[dim] = -1
    return rows.view(shape) if like.dim() else rows.view(())
