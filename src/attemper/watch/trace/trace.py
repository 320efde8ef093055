"""Trace: follows q and k from the output of a projection to the attention call, and collects what multiplies them.

It runs only for an examiner that asks for it (a scan). Copies, splits, caches, repeated heads and added positions do not scale a
tensor; a number multiplies it; a cosine and a sine rotate it; division by its own length is a norm. Anything else ends the trace.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from ..._torch_private import is_functorch_wrapped_tensor
from ..attach.modes import without_autograd_and_modes
from ..attach.running import NORM, QUIET, projects
from ..attach.storages import Storages, address
from ..call import AttentionCall
from ..routes.handwritten.op_names import LINEAR, LOG_SOFTMAXES, PRODUCTS, SOFTMAXES, op_name
from ..routes.sdpa import PLAIN, SDPA
from .cuts import joined_rows, split, turned
from .factors import averaged, few, multiplied, rms
from .hiding import Hiding
from .paths import Factor, FactorPath, Rotation, Traced, joined

if TYPE_CHECKING:
    from ..routes.handwritten.chain import Chain
    from ..routes.handwritten.matrices import Waiting

COPIES = {
    *("clone", "_to_copy", "to", "contiguous", "reshape", "flatten", "_unsafe_view", "view_copy", "repeat", "flip"),
    *("roll", "repeat_interleave", "expand", "index_select", "index", "gather", "stack", "slice_scatter"),
    *("select_scatter", "neg", "masked_fill", "where", "native_dropout", "dropout", "constant_pad_nd", "nan_to_num"),
    *("tril", "triu", "tanh", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    *("max_pool1d", "max_pool2d_with_indices", "max_pool3d_with_indices", "upsample_nearest1d", "upsample_nearest2d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"),
}
"""The numbers stay the same, or are moved, hidden, bounded or averaged."""

WEIGHING = SOFTMAXES | LOG_SOFTMAXES
WRITES = {"copy": 1, "slice_scatter": 1, "index_put": 2}
WRITES |= dict.fromkeys(("index_copy", "scatter", "index_add", "scatter_add"), 3)
"""Op → the place of the argument that it writes into the first: into a cache, or into the rows of several experts."""

AFFINE = {"native_batch_norm", "_native_batch_norm_legit_no_training", "batch_norm", "cudnn_batch_norm"}
"""Fixed numbers per channel: part of the projection before it."""

NORMS = {"native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm", "native_group_norm", "group_norm"}
LENGTHS = {"linalg_vector_norm", "norm", "amax", "sum", "mean", "std", "var", "var_mean", "std_mean"}
SIZES = {"pow", "square", "abs", "rsqrt", "sqrt", "reciprocal", "exp", "log", *COPIES}
"""Ops on the lengths of vectors before a norm divides by them."""


PROJECTIONS = 4  # as many as an attention module has


class Trace:
    """Paths of one pass, by storage."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.paths: Storages[FactorPath] = Storages()
        self.parts: Storages[dict[int, FactorPath]] = Storages()  # by offset: parts that were multiplied in place
        # scores → the paths of their factors
        self.products: Storages[tuple[FactorPath | None, FactorPath | None]] = Storages()
        self.lengths: Storages[bool] = Storages()  # made of the entries' magnitudes: what a norm divides by
        self.outputs: Storages[Traced] = Storages()
        self.waiting: dict[Waiting, Traced] = {}  # softmaxed scores that wait for their values
        self.hiding = Hiding()
        self.projections: deque[Tensor] = deque(maxlen=PROJECTIONS)  # the last outputs of projections
        self.heads: tuple[Traced, Tensor] | None = None  # the last output of an attention, head by head
        self.asked: Tensor | None = None  # the input of the current softmax
        self.last: Traced | None = None

    def path(self, tensor: Tensor) -> FactorPath | None:
        if self.parts and (parts := self.parts.get(tensor)) is not None and int(tensor.storage_offset()) in parts:
            return parts[int(tensor.storage_offset())]
        return self.paths.get(tensor)

    def before(self, func: Any, args: tuple[Any, ...]) -> None:
        """An op is about to run: keep the input of a softmax, and sum the rows of weights before they are multiplied."""
        name = op_name(func)
        self.asked = self.last = None
        if name in WEIGHING and isinstance(args[0], Tensor):
            self.asked = args[0]
        elif name in PRODUCTS and self.waiting:
            left, right = (args[place] for place in PRODUCTS[name])
            for tensor, axis in ((left, -1), (right, -2 if right.dim() > 1 else 0)):
                weights = self.chain.weights.get(tensor)
                if weights is not None and not self.chain.is_parameter(right if tensor is left else left):
                    self._sum_rows(tensor, axis, weights.calls, weights.summed(tensor, axis))

    def read(self, call: AttentionCall) -> Traced:
        """What is known of a call that is being measured."""
        query, key = call.query, call.key
        if not call.product:
            self.last = Traced(self._factor(query), self._factor(key))
            if call.value is not None:
                self._cut(self.last, call.value)
        else:
            left, right = (self.products.get(self.asked) if self.asked is not None else None) or (None, None)
            scores = self._ended(self.asked) if self.asked is not None else None
            self.last = Traced(*((right, left) if call.flipped else (left, right)), scores)
        self._cut(self.last, query.mT if call.flipped else query)
        across = call.product and not call.flipped
        turned_key = turned(key.detach(), self.projections) if across else None
        if turned_key is None:
            self._cut(self.last, key.mT if across else key)
        else:
            self.last.cuts.append(turned_key)
        return self.last

    def _cut(self, traced: Traced, heads: Tensor) -> None:
        cut = split(heads.detach(), self.projections)
        if cut is not None:
            traced.cuts.append(cut)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Follow the paths through one op that has just run, after the chain has."""
        result = out[0] if isinstance(out, (tuple, list)) and out else out
        if not _is_plain(result) or not args:
            return
        name = op_name(func)
        with without_autograd_and_modes(result.device.type):
            if self.last is not None:
                self._answered(name, args, result)
            elif self.chain.weights and self._changed(name, args, result):
                pass
            elif name in PRODUCTS or name == LINEAR:
                self._product(name, args, kwargs, result)
            elif name in ("mul", "div"):
                self._scaled(name, args, result, func)
            elif name in ("add", "sub"):
                self._added(args, result)
            elif name in AFFINE:
                self.paths.put(result, FactorPath())
            elif name in NORMS:
                self.paths.put(result, FactorPath().normed(rms(result)))
            elif name in ("cat", "concat", "concatenate"):
                self._side_by_side(args, kwargs, result)
            elif name in WRITES and len(args) > WRITES[name]:
                self._written(args[0], args[WRITES[name]], result)
            elif name in LENGTHS:
                self._measured(name, args, out, result)
            elif name in SIZES:
                self._copied(name, args, result)
            if self.products and self.products.has(result):
                self._hidden(name, args, result)
        self.asked = self.last = None

    def left(self, module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        """A module has ended: a projection begins a path, and a norm begins a new one."""
        if not _is_plain(output) or not arguments or not isinstance(arguments[0], Tensor):
            return
        cls = type(module)
        self._joined(arguments[0], output.device.type)
        if projects(module) or (cls in QUIET and not NORM.search(cls.__name__)):
            self._projected(arguments[0], output)
        elif _is_norm(module) and output.shape == arguments[0].shape and output is not arguments[0]:
            with without_autograd_and_modes(output.device.type):
                self.paths.put(output, FactorPath().normed(rms(output)))

    def _joined(self, source: Tensor, device: str) -> None:
        """A module was given the output of an attention: keep how its heads were joined."""
        if self.heads is None or not self.outputs or self.outputs.get(source) is not self.heads[0]:
            return
        traced, heads = self.heads
        with without_autograd_and_modes(device):
            traced.merged = traced.merged or joined_rows(source.detach(), heads.detach())

    def _ended(self, tensor: Tensor) -> FactorPath | None:
        path = self.path(tensor)
        return None if path is None else path.rotated()

    def _answered(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        """An attention call was read while this op ran: the result is its weights, which wait for values, or its output."""
        assert self.last is not None
        weights = self.chain.weights.get(result) if name in WEIGHING else None
        if weights is None:
            self.outputs.put(result, self.last)
            self.heads = self.last, result
            if name in SDPA:
                self._met(self.last, args[2])
        for count in weights.calls if weights is not None else ():
            self.waiting[count] = self.last
        if weights is not None and self.asked is not None and name in SOFTMAXES and args[1] in (-1, result.dim() - 1):
            self.last.weak = self.hiding.weak(self.asked, result)

    def _hidden(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        """Scores were made: keep which keys are hidden in them."""
        if name in ("baddbmm", "addmm"):
            self.hiding.add_bias(args[0], result)
            return
        parts = args[0] if isinstance(args[0], (tuple, list)) else args
        scores = next((part for part in parts if isinstance(part, Tensor) and self.products.has(part)), None)
        if scores is not None:
            self.hiding.hide(name, args, scores, result)

    def _changed(self, name: str, args: tuple[Any, ...], result: Tensor) -> bool:
        """Whether an op made weights of weights; what it did to them is kept."""
        if name in PRODUCTS or self.chain.weights.get(result) is None:
            return False
        parts = args[0] if isinstance(args[0], (tuple, list)) else args
        weights = next((part for part in parts if isinstance(part, Tensor) and self.chain.weights.has(part)), None)
        if weights is not None:
            self.hiding.change(name, args, weights, result)
        return weights is not None

    def _sum_rows(self, weights: Tensor, axis: int, counts: tuple[Waiting, ...], own: bool) -> None:
        with without_autograd_and_modes(weights.device.type):
            sums = few(weights.detach().movedim(axis, -1), 512, keep=1).double().sum(-1)
            sums = sums[sums != 0]  # 0: a row without a visible key
        for count in counts:
            traced = self.waiting.get(count)
            if traced is not None and len(sums):
                ends = (float(sums.min()), float(sums.max()))
                traced.sums, traced.across = (ends, None) if own else (traced.sums, ends)
                traced.changes = self.hiding.changes.get(weights) or frozenset()

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        left, right = (args[place] for place in PRODUCTS.get(name, (0, 1)))
        weights = self.chain.weights
        for tensor, values in ((left, right), (right, left)):
            weight = weights.get(tensor) if weights else None
            if weight is not None:
                for count in weight.calls:
                    traced = self.waiting.pop(count, None)
                    if traced is not None:
                        self.outputs.put(result, traced)
                        self.heads = traced, result
                        self._cut(traced, values)
                        self._met(traced, values)
                return
        if name == LINEAR or any(map(self.chain.is_parameter, (left, right))):
            self._projected(left if self.products.has(left) else right, result)
            return
        sides = tuple(self._factor(tensor) for tensor in (left, right))
        self.products.put(result, (sides[0], sides[1]))
        alpha = kwargs.get("alpha", 1.0) if name in ("baddbmm", "addmm") else 1.0
        self.paths.put(result, FactorPath().times(Factor("by the product itself (alpha)", float(alpha))))

    def _factor(self, tensor: Tensor) -> FactorPath | None:
        """The path of a factor of a product; None for a product of other tensors, whose own path began with it."""
        path = self._ended(tensor)
        return path if path is None or path.mixed or not self.products.has(tensor) else None

    def _met(self, traced: Traced, values: object) -> None:
        """What multiplies all values multiplies the output, as if it came after the softmax."""
        path = self._ended(values) if isinstance(values, Tensor) else None
        if path is not None:
            traced.after += [
                factor for factor in path.factors if factor.counts and not factor.varies and not factor.stretches
            ]

    def _projected(self, source: Tensor, result: Tensor) -> None:
        """A path begins; but talking heads mix their scores by a projection too."""
        self.paths.put(result, FactorPath(mixed=self.products.has(source)))
        self.projections.append(result)
        self._keep_product(source, result)

    def _scaled(self, name: str, args: tuple[Any, ...], result: Tensor, func: Any) -> None:
        first, second = args[0], args[1]
        if self._is_length(first) and not (isinstance(second, Tensor) and self.path(second)):
            self.lengths.put(result, True)
            return
        if name == "mul" and isinstance(second, Tensor) and (not isinstance(first, Tensor) or self.path(first) is None):
            first, second = second, first  # a number, or a table of cosines, times q
        path = self.path(first) if isinstance(first, Tensor) else None
        output = self.outputs.get(first) if isinstance(first, Tensor) and self.outputs else None
        if path is None and output is None:
            return
        if self._is_length(second):
            if path is not None:
                self.paths.put(result, path.normed(rms(result)))
            return
        if isinstance(second, Tensor) and self.path(second) is not None:
            if second is first or address(second) == address(first):
                self.lengths.put(result, True)  # x · x, on the way to a norm
            return
        multiplier = multiplied(name, second, isinstance(second, Tensor) and self.chain.is_parameter(second))
        if multiplier is None:
            if path is not None and isinstance(second, Tensor) and second.dtype == torch.bool:
                self.paths.put(result, path)  # a mask
                self._keep_product(first, result)
        elif output is not None:
            if isinstance(multiplier, Factor) and not multiplier.varies and multiplier.counts:
                output.after.append(multiplier)
                self.outputs.put(result, output)
        elif path is not None:
            self._multiply(path, multiplier, first, result, func)

    def _multiply(self, path: FactorPath, by: Factor | Rotation, first: Tensor, result: Tensor, func: Any) -> None:
        """A followed tensor was multiplied by a number, or by a table of cosines or sines."""
        made = path.times(by) if isinstance(by, Factor) else replace(path.rotated(), rotation=by)
        in_place = func._schema.name.endswith("_") and first.untyped_storage().nbytes() > first.nbytes
        if in_place:
            self.parts.put(result, {**(self.parts.get(result) or {}), int(result.storage_offset()): made})
        else:
            self.paths.put(result, made)
        self._keep_product(first, result)

    def _added(self, args: tuple[Any, ...], result: Tensor) -> None:
        tensors = [part for part in args[:2] if isinstance(part, Tensor)]
        if self._is_length(tensors[0]):
            if len(tensors) == 1:
                self.lengths.put(result, True)
            return
        known = [(tensor, path) for tensor in tensors if (path := self.path(tensor)) is not None]
        if not known:
            return
        # scores stay scores when a bias is added, even one from a layer that is followed too
        first, path = next((candidate for candidate in known if self.products.has(candidate[0])), known[0])
        rotations = [other.rotation for _, other in known]
        if len(known) == 2 and rotations[0] is not None and rotations[1] is not None:
            path = FactorPath(path.factors, path.norm, Rotation(rotations[0].square + rotations[1].square, whole=True))
        else:
            path = path.rotated()
        self.paths.put(result, path)
        self._keep_product(first, result)

    def _side_by_side(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        parts = [part for part in args[0] if isinstance(part, Tensor)]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        known = [(part, path) for part in parts if (path := self.path(part)) is not None]
        if not known:
            return
        by_channel = dim in (-1, result.dim() - 1)  # otherwise keys after a cache: this pass has followed the last
        self.paths.put(result, joined([(path, part.shape[-1]) for part, path in known]) if by_channel else known[-1][1])
        self._keep_product(known[0][0], result)

    def _written(self, into: Any, source: Any, result: Tensor) -> None:
        path = self.path(source) if isinstance(source, Tensor) else None
        part_of_it = result.untyped_storage().nbytes() > result.nbytes and self.paths.get(result) is not None
        if path is None and isinstance(into, Tensor) and into is not result:
            path = self.path(into)
        if path is not None and not part_of_it:
            self.paths.put(result, path)

    def _measured(self, name: str, args: tuple[Any, ...], out: Any, result: Tensor) -> None:
        """A reduction of a followed tensor averages or adds up its vectors, or gives their lengths."""
        path = self.path(args[0]) if isinstance(args[0], Tensor) and not self._is_length(args[0]) else None
        tokens = None if path is None else averaged(name, args)
        if path is not None and tokens is not None:
            self.paths.put(result, path.rotated().times(tokens))
            return
        if isinstance(args[0], Tensor) and (self.path(args[0]) is not None or self._is_length(args[0])):
            for part in out if isinstance(out, (tuple, list)) else (out,):
                self.lengths.put(part, True)

    def _copied(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        parts = args[0] if isinstance(args[0], (tuple, list)) else args
        for part in parts:
            if not isinstance(part, Tensor) or part.dtype == torch.bool:
                continue
            if address(part) == address(result):
                return  # a view shares the path of its storage
            if self._is_length(part):
                self.lengths.put(result, True)
                return
            path = self.path(part)
            if path is not None:
                if name in COPIES:
                    self.paths.put(result, path)
                    self._keep_product(part, result)
                else:
                    self.lengths.put(result, True)  # its squares or magnitudes
                return
            if name in COPIES and self.outputs and (output := self.outputs.get(part)) is not None:
                self.outputs.put(result, output)
                return

    def _keep_product(self, tensor: Tensor, result: Tensor) -> None:
        """The result is still scores of the same q and k."""
        if self.products and (product := self.products.get(tensor)) is not None:
            self.products.put(result, product)

    def _is_length(self, value: object) -> bool:
        return isinstance(value, Tensor) and bool(self.lengths) and bool(self.lengths.get(value))


def _is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor with numbers in a storage: not nested, sparse, meta or wrapped."""
    if not isinstance(value, Tensor) or type(value) not in PLAIN or is_functorch_wrapped_tensor(value):
        return False
    return value.layout is torch.strided and not (value.is_nested or value.is_meta)


def _is_norm(module: nn.Module) -> bool:
    """Whether it normalises each vector; a norm over the batch is part of the projection before it."""
    name = type(module).__name__.lower()
    return "norm" in name and "batch" not in name and next(module.children(), None) is None
