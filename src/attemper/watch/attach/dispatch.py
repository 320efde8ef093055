"""Dispatch: the dispatch mode of a pass. It gets every op below autograd, runs it unchanged, and passes it to its route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..._torch_private import HigherOrderOperator, TorchDispatchMode, _pop_mode, _push_mode
from ...operation.ops import FORWARD, FORWARD_PACKED
from ..routes import attemper as own
from ..routes import sdpa
from ..routes.exchanged import collective_counts, note_collectives_inside
from ..routes.handwritten.op_names import SOFTMAXES, is_followed, is_torchs, op_name
from ..trace.trace import Trace
from .running import running

if TYPE_CHECKING:
    from .attachment import Attachment

EINSUM = torch.ops.aten.einsum.default
READERS = {**sdpa.readers(), FORWARD: own.read, FORWARD_PACKED: own.read}


class Mode(TorchDispatchMode):
    """Gets every op of a watched forward; runs it unchanged, then passes it to its route.

    It is pushed and popped directly, not by ``with``: that sets flags which all threads share, and leaves them wrong when two
    threads overlap. The flags are for Dynamo, which does not run while a step is measured.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would wrap the call of every op in one of Dynamo's contexts

    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self.attachment = attachment
        self.readers = READERS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is EINSUM:
            # it arrives as one op in inference mode only; the ops that it is made of are followed
            _push_mode(self)
            try:
                return func.decompose(*args, **kwargs)
            finally:
                _pop_mode()
        before = None
        try:
            before = None if is_torchs(func) else collective_counts()
        except Exception as error:
            self.attachment.failed(error)
        out = func(*args, **kwargs)
        try:
            if before is not None:
                note_collectives_inside(func, before)
            self.look(func, types, args, kwargs, out)
        except Exception as error:
            self.attachment.failed(error)
        return out

    def look(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Pass an op that ran to its route."""
        reader, current = self.readers.get(func), running.current
        if current is None:
            return
        if reader is None:
            if is_followed(func):
                if types and op_name(func) in SOFTMAXES:
                    reason = f"a softmax, which may be attention, of {sdpa.wrapped(types[0])}"
                    self.attachment.unmeasured(tuple(running.frames), reason)
                else:
                    current.chain.follow(func, args, kwargs, out)
            return
        frames = tuple(running.frames)
        call = reader(func, args, kwargs, frames)
        if isinstance(call, str):
            self.attachment.unmeasured(frames, f"a {func} call on {call}")
        elif call is not None:
            if current.place is not None:
                call.places = (current.place,)
            self.attachment.begin(call)(call.frames)
            current.answers(call, out)


class TracingMode(Mode):
    """A Mode that also traces what q and k were multiplied by. A class of its own, so that the plain mode pays nothing for it."""

    def __init__(self, attachment: Attachment, trace: Trace) -> None:
        super().__init__(attachment)
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not EINSUM and not isinstance(func, HigherOrderOperator):
            try:
                self.trace.before(func, args)
            except Exception as error:
                self.attachment.failed(error)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def look(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        super().look(func, types, args, kwargs, out)
        if not isinstance(func, HigherOrderOperator):
            self.trace.follow(func, args, kwargs, out)
