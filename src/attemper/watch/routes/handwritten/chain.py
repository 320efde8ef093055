"""The route of hand-written attention: a product q·kᵀ, then scale, mask and bias, a softmax, and a product with values.

A softmax over anything else (a router, a vocabulary) is not attention: only one whose input comes from a product of two
activations, and whose output is multiplied by a third over the same dimension, is counted. Vitals are measured from the
model's own logits when the softmax runs, and kept only if the last product follows. What looks like attention and could
not be followed is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...attach.running import Frame, projects, running, weighed_dimension
from ...attach.storages import Storages, address
from ...call import AttentionCall, CallInfo
from ..exchanged import follow_collective
from ..kind import Sequences, kind_of
from .layout import by_head, ordered, softmax_over
from .matrices import ScoreMatrix, Waiting, WeightMatrix, number, side_by_side
from .op_names import (
    CARRYING,
    COLLECTIVE,
    FLEX,
    FOREIGN,
    KEEPING,
    LINEAR,
    LOG_SOFTMAXES,
    PRODUCTS,
    RESHAPING,
    SAFE,
    SCALINGS,
    SELECTING,
    SOFTMAXES,
    op_name,
)
from .slices import Copy, copy_of, heads_at, heads_beside

UNTRACED = "a softmax is multiplied by values, but its scores could not be traced to queries and keys"
OVER = "its softmax runs over the {over}, not over the keys: its signs do too"
COPYING = {*SCALINGS, "clone", "_to_copy"}
Miss = Callable[[tuple[Frame, ...], str], None]


class Chain:
    """Follows matrices through the ops of one pass, by storage."""

    def __init__(
        self,
        parameters: Storages[bool],
        sequences: Sequences,
        measure: Callable[[AttentionCall], Callable[[tuple[Frame, ...]], None]],
        unmeasured: Miss,
        missed: Miss,
    ) -> None:
        self.parameters, self.sequences = parameters, sequences
        self.measure, self.unmeasured, self.missed = measure, unmeasured, missed
        self.scores: Storages[ScoreMatrix] = Storages()
        self.weights: Storages[WeightMatrix] = Storages()
        self.multiplied: Storages[float | None] = Storages()  # by which number, in the last op
        # products with a parameter: scores of learned keys, if they join others
        self.learned: Storages[bool] = Storages()
        self.copies: Storages[Copy] = Storages()
        self.triangles: Storages[bool] = Storages()  # lower triangles of ones, and masks made of them
        self.across: list[tuple[tuple[Waiting, ...], tuple[Frame, ...]]] = []  # multiplied over another dimension

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Follow the matrices through one op that has just run."""
        name = op_name(func)
        if name in PRODUCTS:
            self._product(name, args, kwargs, out)
        elif name in KEEPING:
            self._step(name, args, out)
        elif name in SOFTMAXES or name in LOG_SOFTMAXES:
            self._softmax(name, args, out)
        elif name in CARRYING or name == LINEAR:
            self.sequences.follow((part for part in args if isinstance(part, Tensor)), _first(out))
        elif name == COLLECTIVE:
            follow_collective(func, args)
        elif name == FLEX:
            self.unmeasured(
                tuple(running.frames), "flex_attention called directly, not through the Hugging Face interface"
            )
        elif name == FOREIGN and (running.current is None or running.current.interfaced is None):
            self.unmeasured(tuple(running.frames), f"a {func} call: {FOREIGN}")

    def end(self) -> None:
        """The pass has ended: a softmax whose weights met values over another dimension alone is attention over the wrong one."""
        for calls, frames in self.across:
            for waiting in calls:
                if not waiting.call.counted:
                    waiting.call.over, waiting.call.axes = waiting.over, waiting.axes
                    waiting(frames)
                    self.missed(frames, OVER.format(over=waiting.over))
        self.across = []

    def carry(self, source: Tensor, made: Tensor, module: nn.Module) -> None:
        """A module whose ops are not followed made one tensor of another; talking heads mix scores or weights by a Linear."""
        scores = self.scores.get(source) if self.scores else None
        weighed = weighed_dimension(module) if scores is not None else None
        if scores is not None and weighed is not None and source.dim() > 1 and not scores.are_across(source, weighed):
            self.scores.drop(made)
            scores = None
        elif weighed is None and next(module.children(), None) is not None:
            scores = None  # those in it were asked
        if scores is not None:
            self.scores.put(made, replace(scores.without_added_values(), scale=None, strided=False, steps=None))
        elif self.weights and (weights := self.weights.get(source)) is not None:
            if address(made) != address(source):
                self.weights.put(made, replace(weights, stride=None))
        else:
            self.sequences.put(made, self.sequences.of(source))

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        left, right = (args[place] for place in PRODUCTS[name])
        if out.is_nested:
            return
        sides = ((left, right, -1), (right, left, -2 if right.dim() > 1 else 0))
        if self.weights and any(self._weigh(*side, out) for side in sides):
            return
        if self.scores and any(self._mix(*side, out) for side in sides):
            return
        # a parameter on the right makes it a linear layer; one on the left is a learned query
        projected = bool(running.frames) and projects(running.frames[-1].module)
        if self.is_parameter(right) or projected:
            if not projected and out.is_floating_point():
                self.learned.put(out, True)
            self.sequences.put(out, self.sequences.of(left))
            return
        if left.dim() < 2 or (name == "mv" and self.is_parameter(left)) or not out.is_floating_point():
            return
        for table in (self.scores, self.weights, self.multiplied, self.copies):
            table.drop_freed()
        biased = name in ("baddbmm", "addmm")
        scale = number(kwargs.get("alpha", 1.0)) if biased else 1.0
        before = self.multiplied.get(left), self.multiplied.get(right)
        root = before[0] if before[0] == before[1] else None
        if self.multiplied.has(left) or self.multiplied.has(right):
            scale = None  # q or k was multiplied before: the whole factor is unknown
        shape = (left.shape[-2], right.shape[-1] if right.dim() > 1 else 1)
        copied = self.copies.get(left)
        scores = ScoreMatrix(left, right, tuple(running.frames), shape, scale, root, copied, masked=biased)
        beta = number(kwargs.get("beta", 1.0)) if biased else 0.0
        if beta != 0 and not (self.scores and self.scores.has(args[0])):
            scores = scores.with_added(args[0], 1, out, beta)
        current = running.current
        if current is not None and current.place is not None:
            scores = scores.made_at(current.place, current.ratio)
            if biased and self.scores and (other := self.scores.get(args[0])) is not None:
                scores = replace(scores, places=(*other.places, *scores.places))
        self.scores.put(out, scores)

    def _weigh(self, tensor: Tensor, other: Tensor, axis: int, out: Tensor) -> bool:
        """A product with weights: with values, or with a parameter that mixes heads."""
        weights = self.weights.get(tensor)
        if weights is None:
            return False
        if weights.summed(tensor, axis):
            self._multiply_values(weights, other, out)
        elif self.is_parameter(other):
            self.weights.put(out, replace(weights, stride=None))
        else:
            if weights.is_across(tensor, axis) and not self.weights.has(other):
                self.across.append((weights.calls, tuple(running.frames)))
            return False
        return True

    def _multiply_values(self, weights: WeightMatrix, other: Tensor, out: Tensor) -> None:
        """Weights are multiplied by values: count the calls that wait for it."""
        frames = tuple(running.frames)
        for waiting in weights.calls:
            waiting.call.value = None if other is out else other
            waiting(frames)
            waiting.call.value = None
        if not weights.calls and not self.is_parameter(other):
            self.missed(frames, UNTRACED)
        if weights.sequence is not None:
            self.sequences.put(out, weights.sequence)

    def _mix(self, tensor: Tensor, other: Tensor, axis: int, out: Tensor) -> bool:
        """A product with scores: a parameter mixes heads; values without a softmax are another form of attention."""
        scores = self.scores.get(tensor)
        if scores is None:
            return False
        if self.is_parameter(other):
            if not scores.are_across(tensor, axis):
                return False  # a linear layer: its input is no longer logits
            self.scores.put(out, replace(scores.without_added_values(), scale=None, strided=False, steps=None))
        elif scores.exponential:
            self.missed(
                tuple(running.frames), f"scores are multiplied by values after {scores.exponential}(), not a softmax"
            )
        else:
            return False
        return True

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, or made of parameters only."""
        return bool(self.parameters.get(tensor))

    def _step(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        result = _first(out)
        parts = args[0] if isinstance(args[0], (tuple, list)) else args
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if name == "copy":
            tensors = tensors[1:]
        if not tensors:
            return
        if (self.scores or self.weights) and self._keep(name, tensors, args, result):
            return
        if self.learned and name in KEEPING and self.learned.has(tensors[0]):
            self.learned.put(result, True)
        if name == "tril" and len(args) == 1:
            self.triangles.put(result, True)
            return
        if all(map(self.is_parameter, tensors)):
            self.parameters.put(result, True)  # such as autocast's copy of a weight, or a normalised weight
            return
        if name in SCALINGS and len(args) > 1 and not (isinstance(args[1], Tensor) and args[1].dim()):
            self.multiplied.put(result, number(args[1]) if name == "mul" else None)
        elif name in ("clone", "_to_copy") and self.multiplied.has(tensors[0]):
            self.multiplied.put(result, self.multiplied.get(tensors[0]))
        elif name == "where" and self.triangles and self.triangles.get(tensors[0]):
            self.triangles.put(result, True)
        if name in COPYING and (copied := copy_of(tensors[0], result, self.copies.get(tensors[0]))) is not None:
            self.copies.put(result, copied)
        self.sequences.follow(tensors, result)

    def _keep(self, name: str, tensors: list[Tensor], args: tuple[Any, ...], result: Tensor) -> bool:
        """Follow weights or scores through one op; whether it was applied to them."""
        return self._keep_weights(name, tensors, result) or self._keep_scores(name, tensors, args, result)

    def _keep_weights(self, name: str, tensors: list[Tensor], result: Tensor) -> bool:
        known = [(tensor, weights) for tensor in tensors if (weights := self.weights.get(tensor)) is not None]
        if not known:
            return False
        tensor, weights = known[0]
        if result.numel() > tensor.numel() and name == "mul":
            if weights.calls:  # values by a product and a sum; a router does the same with its experts
                self._multiply_values(weights, result, result)
        elif result.shape[-1] == tensor.shape[-1] or name in RESHAPING or name in SELECTING:
            # a difference of two softmaxes: both calls wait for the values
            calls = tuple(dict.fromkeys(call for _, each in known for call in each.calls))
            alone = weights.alone and len(known) == 1 and not any(map(self.scores.has, tensors))
            self.weights.put(result, replace(weights.after(name, tensor, result), calls=calls, alone=alone))
        return True

    def _keep_scores(self, name: str, tensors: list[Tensor], args: tuple[Any, ...], result: Tensor) -> bool:
        if name == "cat" and all(tensor.shape[:-1] == result.shape[:-1] for tensor in tensors):
            parts = [(tensor, self.scores.get(tensor)) for tensor in tensors]
            if any(scores is not None for _, scores in parts):
                learned = [self.learned.has(tensor) for tensor in tensors]
                together = side_by_side(parts, learned, result)
                self.scores.put(result, _with_places(together, [scores for _, scores in parts]))
                return True
            return False
        for tensor in tensors:
            scores = self.scores.get(tensor)
            if scores is not None and (
                name in SELECTING or result.shape[-2:].numel() >= tensor.shape[-2:].numel() or tensor.dim() < 2
            ):
                after = scores.after(name, args, tensor, result)
                terms = [each for term in tensors if term is not tensor and (each := self.scores.get(term)) is not None]
                if terms and name in ("add", "sub"):  # a term of the scores, as relative positions are, is no bias
                    after = replace(after, added=sum([each.added for each in terms], scores.added))
                if self.triangles and any(map(self.triangles.get, tensors)):
                    after = replace(after, causal=True)
                if name not in SCALINGS:  # terms of one sum, or entries of one matrix
                    after = _with_places(after, map(self.scores.get, tensors))
                self.scores.put(result, after)
                return True
        return False

    def _softmax(self, name: str, args: tuple[Any, ...], out: Tensor) -> None:
        logits, dim = args[0], args[1]
        if not isinstance(logits, Tensor) or not logits.dim() or self.is_parameter(logits):
            return
        frames = tuple(running.frames)
        if logits.is_nested:
            self.missed(frames, "a softmax of nested tensors, which are not followed")
            return
        scores = self.scores.get(logits)
        if scores is None and self._is_second_softmax(logits, dim, out):
            return
        call = None
        over, other, values_over = "queries", None, None
        if scores is not None and not scores.exponential:
            around = tuple(shared(scores.frames, frames))
            over, keys, values_over = softmax_over(logits, dim, *scores.shape, scores.strides, around)
            call = _call(name, scores, logits, keys, around)
            other = None if values_over is None else (out.shape[values_over], out.stride(values_over))
        calls: tuple[Waiting, ...] = ()
        sequence = None
        if call is not None and scores is not None:
            axes = dim % logits.dim(), values_over, logits.dim()
            calls = (Waiting(call, self.measure(call), (*scores.frames, *frames), over, axes),)
            sequence = self.sequences.known(call.query)
        size, stride = out.shape[dim], out.stride(dim)
        sizes = () if scores is None else _sizes_of_parts(scores, size)
        self.weights.put(out, WeightMatrix(calls, frames, sequence, size, stride, sizes, name in LOG_SOFTMAXES, other))

    def _is_second_softmax(self, weights: Tensor, dim: int, out: Tensor) -> bool:
        """Whether this is the second softmax over the same dimension: its input is what the first one returned."""
        earlier = self.weights.get(weights)
        if earlier is None or not earlier.calls or not earlier.alone or earlier.log:
            return False
        if weights.stride(dim) != earlier.stride and (earlier.stride is not None or weights.shape[dim] != earlier.size):
            return False
        for waiting in earlier.calls:
            waiting.call.softmaxes += 1
        self.weights.put(out, replace(earlier, stride=out.stride(dim)))
        return True


def _with_places(scores: ScoreMatrix, made: Iterable[ScoreMatrix | None]) -> ScoreMatrix:
    """The scores, with the products that made any of these."""
    if not scores.places:
        return scores
    return replace(
        scores, places=tuple(dict.fromkeys(place for matrix in made if matrix is not None for place in matrix.places))
    )


def _sizes_of_parts(scores: ScoreMatrix, size: int) -> tuple[int, ...]:
    """How many columns values may meet at a time: those that are no sinks, or those of one product."""
    return (size - sum(scores.sink_columns), *(stop - start for start, stop in scores.products))


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, (tuple, list)) else out


def shared(first: tuple[Frame, ...], second: tuple[Frame, ...]) -> list[Frame]:
    """The modules around both; at least one, since the outermost contains everything."""
    return [a for a, b in zip(first, second, strict=False) if a is b]


def _call(name: str, scores: ScoreMatrix, logits: Tensor, dim: int, frames: tuple[Frame, ...]) -> AttentionCall | None:
    if not logits.numel() or logits.is_meta or type(logits) is not Tensor:
        return None

    def laid_out(stored: Tensor) -> tuple[Tensor, bool, bool]:
        if stored.dim() == 1:
            return *by_head(stored[None], frames), scores.shape[1] == 1
        matrix, flipped = ordered(stored, dim, *scores.shape, scores.strides, frames)
        return *by_head(matrix, frames), flipped

    stored, logits = logits, scores.hidden(logits, dim)
    alone, alone_known = scores.without_added(logits)
    matrix, known, flipped = laid_out(logits)
    query, key = (scores.key, scores.query) if flipped else (scores.query, scores.key)
    some = None
    named = heads_beside(frames, matrix.shape[1])
    if named is not None and (logits.dim() < 4 or not known):
        # some heads at a time: which of them, their memory shows or nothing does
        copied = None if flipped else scores.copied
        oriented, matrices = query.mT if flipped and query.dim() > 1 else query, matrix.shape[:2].numel()
        some = heads_at(oriented, named, matrices, frames, copied)
        matrix, known = (matrix, False) if some is None else (matrix.reshape(-1, len(some), *matrix.shape[-2:]), True)
    batch, heads, rows, keys = shape = matrix.shape
    groups = key.shape[:-2].numel() // batch  # heads that share keys are joined into the rows of the product
    # SDPA's math backend multiplies q and k by the root of the scale each
    math = name == SAFE and scores.root is not None
    info = CallInfo(
        route="sdpa" if math else "hand-written",
        kind=kind_of(frames, query, key, (rows, keys - sum(scores.sink_columns))),
        dtype=str(query.dtype).removeprefix("torch."),
        batch=batch,
        heads=heads,
        kv_heads=groups if groups and heads % groups == 0 else heads,
        head_dim=scores.query.shape[-1],
        queries=rows,
        keys=keys,
        scale=scores.root**2 if math and scores.root is not None else scores.scale,
        causal=math and scores.causal,
        masked=scores.masked,
        softcap=scores.cap if scores.capped else None,
        biased=not alone_known,
    )
    call = AttentionCall(info, frames, query, key, logits=matrix, graph=lambda: laid_out(stored)[0].reshape(shape))
    if alone is not None:
        call.scores = laid_out(alone)[0].reshape(matrix.shape)
    call.product, call.flipped, call.heads_known = True, flipped, known
    call.sink_columns, call.in_order, call.places = scores.sink_columns, scores.in_order, scores.places
    call.products, call.some_heads, call.module_heads = scores.products, some, named
    call.by_sdpa, call.as_product = math, scores.strided and address(matrix) == address(logits)
    return call
