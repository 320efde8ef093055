"""Light: the functions that models call for attention are intercepted, so that a pass needs no dispatch mode.

In a full pass they announce their calls, which shows whether the mode sees any others. In a light pass they read their own
arguments, as a route reads those of an op. A softmax is intercepted too: one that no full pass saw may be attention by hand.
Whatever was not expected turns the pass into a full one before the function runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..._torch_private import _get_tracing_state, peek_interpreter_stack
from ...kernels.contract import Problem
from ...operation.listen import listening
from ...operation.ops import FORWARD
from ..call import AttentionCall
from ..routes import attemper as own
from ..routes import sdpa as fused
from ..routes.kind import LearnedSequences
from .running import Frame, Pass, python_frames, running, traits

if TYPE_CHECKING:
    from .attachment import Attachment

SDPA = torch.ops.aten.scaled_dot_product_attention.default
FUSED = tuple(name for name in (fused.MHA, fused.ENCODER) if hasattr(torch, name))
SOFTMAXES = tuple((owner, name) for owner in (torch, Tensor) for name in ("softmax", "log_softmax"))
CALL = nn.Module._call_impl.__code__

UNSEEN = "a softmax ran here that no full pass had seen. If it is attention, this step lacks it"
SILENT = "it ran with fewer attention calls than in the last full pass. What it computed in another way is missing from this step"
FOUND = (
    "a full pass found attention calls that light passes do not see. Up to {passes} passes before it may lack them; "
    "full=True follows every pass"
)

Function = Callable[..., Any]


class Interception:
    """Puts functions in the place of torch's, and back."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.installed: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was in its own namespace, ours

    def install(self) -> None:
        if self.installed:
            return
        self._put(functional, "scaled_dot_product_attention", self._sdpa)
        for name in FUSED:
            self._put(torch, name, self._fast_path)
        for owner, name in SOFTMAXES:
            self._put(owner, name, self._softmax)

    def _put(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        original = getattr(owner, name)
        ours = wraps(original)(make(original))
        self.installed.append((owner, name, vars(owner).get(name), ours))
        setattr(owner, name, ours)

    def uninstall(self) -> None:
        for owner, name, before, ours in reversed(self.installed):
            if vars(owner).get(name) is not ours:
                continue  # someone else has wrapped ours, which does nothing outside of a pass
            if before is None:
                delattr(owner, name)  # Tensor inherits it
            else:
                setattr(owner, name, before)
        self.installed = []

    def begin(self, current: Pass) -> None:
        """A pass begins in this thread: hear of attemper's own operation."""
        listening.listener = self.heard if current.lesson is not None or current.light is not None else None

    def end(self) -> None:
        listening.listener = None

    def _sdpa(self, original: Function) -> Function:
        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
            current = running.current
            if current is None or current.intercepting or (current.lesson is None and not current.is_light):
                return original(*args, **kwargs)
            form = form_of(*args, **kwargs)
            if current.lesson is not None:
                return announced(current, original, args, kwargs, form)
            light = current.light
            assert light is not None
            if form in light.plan.forms and self._expects(current):
                args = lowered(args)
                out = original(*args, **kwargs)
                self._read(current, SDPA, args, kwargs)
                return out
            known = form in light.plan.forms
            self.attachment.convert(current, differs=known or form is None)
            before = light.position
            out = original(*args, **kwargs)
            if not known:
                if light.position == before + 1 and light.last_is_op:
                    light.plan.forms.add(form)
                else:
                    light.differs = True
            return out

        return scaled_dot_product_attention

    def _fast_path(self, original: Function) -> Function:
        op = getattr(torch.ops.aten, original.__name__).default

        def function(*args: Any, **kwargs: Any) -> Any:
            current = running.current
            if current is None or current.intercepting or (current.lesson is None and not current.is_light):
                return original(*args, **kwargs)
            if current.lesson is not None:
                return announced(current, original, args, kwargs, None)
            if not self._expects(current):
                self.attachment.convert(current)
                return original(*args, **kwargs)
            out = original(*args, **kwargs)
            self._read(current, op, args, kwargs)
            return out

        return function

    def _softmax(self, original: Function) -> Function:
        def softmax(*args: Any, **kwargs: Any) -> Any:
            current = running.current
            if current is not None:
                if current.lesson is not None:
                    current.lesson.softmaxes += 1
                elif current.is_light and current.light is not None:
                    current.light.softmaxes += 1
                    if current.light.softmaxes > current.light.plan.softmaxes:
                        self.attachment.convert(current)
                        self.attachment.lost(tuple(running.frames), UNSEEN)
            return original(*args, **kwargs)

        return softmax

    def heard(self, problem: Problem) -> None:
        """A call of attemper's own operation has been computed."""
        current = running.current
        if current is None or current.intercepting or problem.value is None:
            return
        if current.lesson is not None:
            current.lesson.announced += 1
        elif current.is_light:
            if not self._expects(current):
                self.attachment.convert(current)
            self._read(current, FORWARD, problem, {})

    def _expects(self, current: Pass) -> bool:
        """Whether the innermost module is one of which a full pass saw a call here; then the numbers of its sequences are known."""
        light, sequences, module = current.light, current.sequences, running.frames[-1].module
        assert light is not None and isinstance(sequences, LearnedSequences)
        # the interface has compared the module that called it
        expected = light.expected(module) if current.interfaced is not None or innermost(module) else None
        sequences.now = None if expected is None else expected.sequences
        return expected is not None

    def _read(self, current: Pass, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frames = tuple(running.frames)
        current.intercepting = True
        try:
            call = self.attachment.readers[op](op, args, kwargs, frames)
            if isinstance(call, AttentionCall):
                self.attachment.begin(call)(call.frames)
            elif call is not None:
                self.attachment.unmeasured(frames, f"a {op} call on {call}")
        finally:
            current.intercepting = False
            if isinstance(current.sequences, LearnedSequences):
                current.sequences.now = None


def announced(current: Pass, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any], form: object) -> Any:
    """Run a function in a full pass: it has announced the call that the mode sees meanwhile."""
    assert current.lesson is not None
    before = len(current.lesson.calls)
    out = original(*args, **kwargs)
    current.lesson.announce(before, form)
    return out


def form_of(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
    *more: Any,
    **others: Any,
) -> object:
    """What of SDPA's arguments decides which op it becomes; None if they cannot be read as they are."""
    mask = attn_mask
    if fused.unreadable(query, key, mask) is not None or type(value) not in fused.PLAIN or more or others:
        return None
    if peek_interpreter_stack() is not None or _get_tracing_state() is not None:
        return None
    shape = query.shape
    return (
        query.dtype,
        query.device.type,
        query.dim(),
        shape[-1],
        shape[-1] == value.shape[-1],
        shape[-2] == 1,
        shape[-3:-2] == key.shape[-3:-2],
        shape[:-3] == key.shape[:-3],
        dropout_p > 0,
        is_causal,
        None if mask is None else (mask.dtype, mask.requires_grad, mask.dim()),
        enable_gqa,
    )


def lowered(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The positional arguments as autocast gives them to the op."""
    device = args[0].device.type if args else "cpu"
    if not args or not torch.is_autocast_enabled(device):
        return args
    dtype = torch.get_autocast_dtype(device)
    return tuple(lower(arg, dtype) if isinstance(arg, Tensor) else arg for arg in args)


def lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    if tensor.is_leaf and tensor.requires_grad:
        return tensor  # autocast keeps its own copy of a parameter
    return tensor.to(dtype)


def innermost(module: nn.Module) -> bool:
    """Whether a module is the innermost that runs: one that made no call before has no frame of ours."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        if frame.f_code is CALL:
            return frame.f_locals["self"] is module
        frame = frame.f_back
    return True  # it was not called in the usual way


def running_modules(frames: list[Frame], name: Callable[[nn.Module], str]) -> list[Frame]:
    """The frames of all modules that run now, from the outermost of these on: a light pass keeps those around calls only."""
    found: list[Frame] = []
    known = list(frames)
    calls = [frame.f_locals for frame in python_frames(sys._getframe(1)) if frame.f_code is CALL]
    for values in reversed(calls):
        module = values["self"]
        if known and known[0].module is module:
            found.append(known.pop(0))
        elif found and not traits(module).quiet:
            found.append(Frame(module, name(module), values.get("args", ())))
    return frames if known else found
