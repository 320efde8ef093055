"""Finder: looks at the attention calls of a pass while their graphs exist, and finds the projections of each layer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from ..errors import InputError, checked_options
from ..vitals import Vitals
from ..watch.examine import AttentionCall, Examiner, examine, exchanged_before, named_modules, running, without_modes
from .derivatives import Directional, share, tolerance, used
from .effect import ANOTHER, StoredLogits, reason_against
from .find import Candidate, Made, find_layer, refused
from .reuse import Build, build_of, reused
from .table import LayerProjections, Projections, check_model, parameters_of
from .write import check_whole

EXCHANGED = (
    "ranks exchange tensors between its projections and its attention, and a derivative would exchange more. Name the parameters "
    "with attemper.Projections.named()"
)
SERVES_OTHERS = "its keys serve {layer} too"
HIDDEN = -1e4  # a bias this low hides a key
DEPTH = 3  # how many modules around a call are searched
CHECKED = 8  # calls of a layer in a pass, by which its projections are checked

_found: weakref.WeakKeyDictionary[nn.Module, Projections] = weakref.WeakKeyDictionary()


def last_projections(model: nn.Module) -> Projections | None:
    """The last result of a search for a model, or for the model inside it."""
    for module in (model, *_inside(model)):
        known = _found.get(module)
        if known is not None:
            return known
    return None


def _inside(model: nn.Module) -> list[nn.Module]:
    """The models that wrappers hold."""
    return [module for module, name in named_modules(model).items() if name == "" and module is not model]


class Finder(Examiner):
    """An examiner of a watch that finds projections in the first pass it sees: ``watch(model, examiners=[finder])``.

    ``from attemper.treat import Finder``. Use it in a ``with`` statement. It needs a pass with gradients, in training or
    evaluation mode, and changes nothing in it. When the pass ends, ``projections`` holds the result, which ``qk_clip``
    uses for this model.
    """

    def __init__(self, model: nn.Module, cut: bool = False) -> None:
        self.model, self.cut = model, cut  # cut: detach what attention returns, so that no layer depends on another
        self._attended: set[int] = set()  # modules that ran attention, by their ids
        self.projections: Projections | None = None
        self._names = {id(module): name for module, name in named_modules(model).items()}
        self._top = {id(module) for module in (model, *_inside(model))}
        self._layers: dict[tuple[str, str], LayerProjections] = {}
        self._keys: dict[tuple[str, str], list[Tensor]] = {}  # the parameters of each layer's k
        self._calls: dict[tuple[str, str], int] = {}
        self._builds: dict[Build, LayerProjections] = {}  # one layer of each kind that was searched
        self._waiting: list[tuple[str, AttentionCall, tuple[dict[str, Any], StoredLogits | None]]] = []
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Finder:
        self._handle = register_module_forward_hook(self._left)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._waiting, self._keys = None, [], {}

    def finish(self) -> None:
        """End the pass by hand, for a trainer that calls only parts of the model, so that its forward never ends."""
        self._left(self.model, (), None)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Any:
        if self.projections is not None:
            return None
        return {"biased": _is_biased(call)}, StoredLogits.of(call)

    def keep(self, name: str, call: AttentionCall, result: Any) -> None:
        if result is not None:
            call = AttentionCall(**call.__dict__)  # the values are forgotten when the call is counted
            self._waiting.append((name, call, result))

    def _left(self, module: nn.Module, arguments: object, output: object) -> Any:
        """After a module's forward: autograd still records, and sharded parameters are still gathered."""
        waiting, self._waiting = self._waiting, []
        for name, call, (seen, stored) in waiting if torch.is_grad_enabled() else ():  # evaluation is not searched
            place = (name, call.info.kind)
            if place not in self._layers and self.projections is None and exchanged_before(call):
                self._layers[place] = LayerProjections(*place, call.info.heads, call.info.kv_heads, why=EXCHANGED)
            elif self.projections is None:
                with _unwatched(call.query.device.type):
                    self._look_at(name, call.in_graph(), seen, stored)
                    self._attended.add(id(call.frames[-1].module))
        if id(module) in self._top and self._layers:
            self.projections = Projections(self._layers)
            for holder in (self.model, *_inside(self.model)):
                _found[holder] = self.projections
            self._keys = {}
        return _detached(output) if self.cut and id(module) in self._attended else None

    def _look_at(self, name: str, call: AttentionCall, seen: Mapping[str, Any], stored: StoredLogits | None) -> None:
        """Find the projections of a layer at its first call, and check them at the next ones."""
        place = (name, call.info.kind)
        self._calls[place] = self._calls.get(place, 0) + 1
        known = self._layers.get(place)
        try:
            if known is None:
                projections = self._find(name, call, stored)
                self._layers[place] = LayerProjections(**{**projections.__dict__, **seen})
            elif known.how is not None and self._calls[place] <= CHECKED and not self._serves(known, call, stored):
                self._layers[place] = refused(known, ANOTHER)
        except (RuntimeError, NotImplementedError) as error:  # an op without a second derivative, or out of memory
            line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
            why = f"autograd stopped: {line}. Name the parameters with attemper.Projections.named()"
            info = call.info
            self._layers[place] = LayerProjections(name, info.kind, info.heads, info.kv_heads, why=why)

    def _serves(self, projections: LayerProjections, call: AttentionCall, stored: StoredLogits | None) -> bool:
        """Whether projections also hold for a further call of the layer.

        In a training step the graph of that call contains the earlier one, so only this is checked: it uses the rows of q.
        """
        if self.cut:
            return self._reason_against(projections, call, stored) is None
        made, tensors = Made.of(call), {candidate.name: candidate.tensor for candidate in self._around(call)}
        parts = [part for part in projections.parts if part.side != "k" and part.parameter in tensors]
        if made is None or made.query.shape[1] != projections.heads or not parts:
            return False
        if not made.query.requires_grad or parts[0].side == "gain":
            return True
        rows = used(made.query, [tensors[part.parameter] for part in parts])
        return all(
            candidate is not None and bool(candidate[part.dim][(part.owner >= 0).to(candidate[part.dim].device)].any())
            for part, candidate in zip(parts, rows, strict=True)
        )

    def _around(self, call: AttentionCall) -> list[Candidate]:
        return [candidate for frame in call.frames[-DEPTH:] for candidate in self._candidates(frame.module)]

    def _reason_against(
        self, projections: LayerProjections, call: AttentionCall, stored: StoredLogits | None
    ) -> str | None:
        return reason_against(
            projections, call, stored, {candidate.name: candidate.tensor for candidate in self._around(call)}
        )

    def _find(self, name: str, call: AttentionCall, stored: StoredLogits | None) -> LayerProjections:
        modules = [frame.module for frame in reversed(call.frames[-DEPTH:])]
        around = [(module, partial(self._candidates, module)) for module in modules]
        inner = around[0][1]()
        build = build_of(call, name, inner)
        known = self._builds.get(build)
        projections = None if known is None else reused(name, call, inner, known)
        if projections is None or self._reason_against(projections, call, stored) is not None:
            projections = find_layer(name, call, around)
            why = None if projections.how is None else self._reason_against(projections, call, stored)
            projections = projections if why is None else refused(projections, why)
        if projections.how is not None and all(part.parameter.startswith(f"{name}.") for part in projections.parts):
            self._builds[build] = projections
        self._note_keys(projections, call, inner)
        return projections

    def _candidates(self, around: nn.Module) -> list[Candidate]:
        """The parameters inside a module that are whole and have gradients, in order."""
        candidates: dict[int, Candidate] = {}
        top = self._names.get(id(around), "")
        for module in around.modules():
            name = self._names.get(id(module))
            for word, tensor in module._parameters.items():
                if name is None or tensor is None or type(tensor.data) is not Tensor:
                    continue  # a shard belongs to a module that does not run now
                if tensor.requires_grad and tensor.is_floating_point() and tensor.numel():
                    full = f"{name}.{word}" if name else word
                    inside = full.removeprefix(f"{top}.") if top else full
                    group = inside.partition(".")[0] if "." in inside else ""
                    candidates.setdefault(id(tensor), Candidate(full, tensor, group))
        return list(candidates.values())

    def _note_keys(self, projections: LayerProjections, call: AttentionCall, candidates: list[Candidate]) -> None:
        """Note the parameters of this layer's k. If it has none, an earlier layer's make its k too: those are not scaled."""
        place = (projections.layer, projections.kind)
        tensors = {candidate.name: candidate.tensor for candidate in candidates}
        mine = [
            tensors[part.parameter]
            for part in projections.parts
            if part.side in ("k", "both") and part.parameter in tensors
        ]
        if mine:
            self._keys[place] = mine
            return
        made = Made.of(call)
        if made is None or not made.key.requires_grad or any(used(made.key, list(tensors.values()))):
            return
        for other, parameters in list(self._keys.items()):
            if _makes(made.key, parameters):
                self._layers[other] = _without_keys(self._layers[other], SERVES_OTHERS.format(layer=projections.layer))
                del self._keys[other]


@contextmanager
def _unwatched(device: str) -> Iterator[None]:
    """Run with autograd alone: a checkpoint may run modules again in a derivative, which a watch must not count.

    A checkpoint also counts the tensors that autograd saves in it, and must not count those of a derivative.
    """
    current, running.current = running.current, None
    own = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        with without_modes(), torch.enable_grad(), torch.autocast(device, enabled=False), own:
            yield
    finally:
        running.current = current


def _makes(key: Tensor, parameters: list[Tensor]) -> bool:
    """Whether these parameters of another layer make a key; True if FSDP has freed them, because then nothing shows it."""
    if any(tensor.untyped_storage().size() == 0 for tensor in parameters):
        return True
    along = Directional(key, parameters)
    total = along.together({index: tensor.detach() for index, tensor in enumerate(parameters)})
    return bool((share(total - key, key) <= tolerance(key)).all())


def _detached(output: object) -> object:
    """What an attention module returned, without its graph. A later layer may use the same parameters."""
    if isinstance(output, Tensor):
        return output.detach()
    if type(output) in (tuple, list):
        assert isinstance(output, (tuple, list))
        return type(output)(part.detach() if isinstance(part, Tensor) else part for part in output)
    return None


def _without_keys(layer: LayerProjections, why: str) -> LayerProjections:
    parts = tuple(
        type(part)(**{**part.__dict__, "whole": torch.ones_like(part.whole)})
        for part in layer.parts
        if part.side not in ("k", "both")
    )
    how = layer.how if parts else None  # k alone took the factor
    return LayerProjections(**{**layer.__dict__, "parts": parts, "how": how, "why": why})


def _is_biased(call: AttentionCall) -> bool:
    """Whether something is added to the scores of visible keys."""
    if call.logits is None:
        mask = call.mask
        if mask is None or mask.dtype == torch.bool:
            return False
        return mask.requires_grad or bool(((mask != 0) & (mask > HIDDEN)).any())  # a bias may still be 0
    made = Made.of(call)
    if made is None or call.softcap is not None or call.info.softcap is not None or not call.in_order:
        return False
    before, after = call.sink_columns
    logits = call.logits[..., before : call.logits.shape[-1] - after].double()
    key = made.key.repeat_interleave(made.query.shape[1] // made.key.shape[1], 1).double()
    scores = made.query.double() @ key.mT
    if scores.shape != logits.shape:
        return False
    seen = (logits > HIDDEN) & logits.isfinite()
    scores, logits = scores[seen], logits[seen]
    slope = (scores * logits).sum() / scores.square().sum().clamp(min=1e-300)
    return bool((logits - slope * scores).norm() > 10 * tolerance(call.query) * logits.norm())


@checked_options
def projections(model: nn.Module, batch: Any) -> Projections:
    """Find which rows of which parameters make the q and k of each head of a model.

    The model runs once on ``batch``, in evaluation mode, with gradients. For every attention call autograd shows which rows a
    head depends on, and whether scaling them scales its q or k exactly: the derivative along the rows' own values is then the
    head itself (Euler's theorem). No list of architectures is used: fused and interleaved projections, grouped keys, biases,
    norms with gains, and latent attention are all found this way. Nothing is changed, and no ``.grad`` is written.

    Args:
        model: any module that ``watch`` follows. FSDP2 models too: call it on every rank.
        batch: what the model is called with: a tensor, a tuple of arguments, or a dict of named arguments. One sequence of a
            few tokens is enough.

    Returns:
        a :class:`Projections`: a mapping by layer that can be printed. It is also remembered for this model, so that
        :func:`qk_clip` finds it.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> print(attemper.projections(model, torch.randn(1, 5, 16))["self_attn", "self"].of_head(1)[0])
        HeadPart(parameter='self_attn.in_proj_weight', dim=0, rows=(8, 9, 10, 11, 12, 13, 14, 15), side='q')
    """
    check_model("projections", model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # a pass without a backward would disturb its reductions
    check_whole("projections()", model, parameters_of(model))
    finder = Finder(model, cut=True)
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"watch\(\): ")  # no record is kept; what matters is in its notes
        watching = examine(model, [finder], caller="projections")
        with finder, watching:
            call(model, batch, "projections")
    if finder.projections is None:
        raise InputError(
            "projections(): the model ran, but none of its attention calls could be measured. "
            f"The watch says: {' '.join(watching.record.notes) or 'nothing.'} Name the parameters with "
            "attemper.Projections.named()."
        )
    return finder.projections


def call(model: nn.Module, batch: Any, caller: str) -> Any:
    """Call the model with a batch: a tensor, a tuple of arguments, or a dict of named ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return model(*batch)
    raise InputError(
        f"{caller}(): `batch` must be a tensor, a tuple of arguments or a dict of named arguments; got "
        f"{type(batch).__name__}. Pass what you call the model with."
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, with every parameter differentiable, and put both back."""
    training = [module for module in model.modules() if module.training]
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point() and type(p.data) is Tensor]
    model.eval()
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module in training:
            module.training = True
