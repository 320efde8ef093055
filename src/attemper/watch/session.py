"""watch(): attach to a model, listen on every n-th step, let go on every exit."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError
from ..heads import HeadSummary
from ..kernels import check_name
from ..operation.checks import Signs, check_signs
from ..vitals import Vitals
from .attach.attachment import attachment
from .attach.frames import in_compiled
from .attach.names import named_modules
from .attach.running import running
from .call import Call, Examiner
from .optimizers import with_hooks
from .options import check_model, check_options
from .passes import LEFT_OUT, ONLY_OTHERS, UNFINISHED, Passes
from .record.entry import Entry
from .record.journal import Journal
from .record.ledger import Ledger
from .record.ranks import Ranks, are_many
from .record.record import Record
from .record.store import to_path
from .routes.handwritten.layout import all_heads
from .routes.replace import Replacement, attend_with

FOLLOWS = (
    "it follows torch's scaled_dot_product_attention, nn.MultiheadAttention and nn.TransformerEncoderLayer, the Hugging Face "
    "attention interface, and a product, softmax, product written by hand"
)

KEPT = 100  # steps that are held in memory where a file has all
NO_GRADIENTS = (
    "gradients=True, but in step {step} none reached q and k of {layers}: passes ran under no_grad or inference_mode, layers are "
    "frozen, or no backward ran before the step ended."
)
COMPILED = "the model is compiled: watched steps run eagerly, the others as compiled."


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    optimizer: Optimizer | None = None,
    gradients: bool = False,
    path: str | Path | None = None,
    signs: Signs = "all",
    kernel: str = "auto",
    replace: bool = False,
    start: int = 0,
    passes: str = "training",
    keep: int | None = None,
) -> Watch:
    """Measure every attention call of a model while it runs, without changing it.

    ``with attemper.watch(model) as watch:`` around a forward pass or a training loop; ``watch.record`` then has the vitals per
    step, layer and head. The model's own functions compute its outputs and gradients: in eager mode not a bit of them
    changes. A step ends with ``watch.step()``, or with the step of ``optimizer``. Padded queries are left out: in
    self-attention those whose own key no query sees, in cross-attention those of the self-attention before it.

    Args:
        model: any module; its layers are named as in ``model.named_modules()``, without the wrappers of ``torch.compile`` and
            DistributedDataParallel. In a distributed run, watch the wrapped model, on every rank: rows are added over its own
            process group, head by head. What shows that ranks hold different heads keeps them apart, and is said.
        every: listen on steps 0, every, 2·every, …; in between nothing is attached.
        optimizer: its ``step()`` ends a step of the watch; otherwise call ``watch.step()``. Of one that wraps another, as
            accelerate's do, it is the inner one's: a step that is skipped is none.
        gradients: also measure the root mean square and the median of |dq| and |dk|, when the backward gets there.
        path: a ``.jsonl`` file to append each watched step to, safe against a kill and a full disk; rank 0 writes, or the first
            of the DistributedDataParallel's ranks. ``Record.read(path)`` reads all of it.
        signs: as in ``attention()``.
        kernel: as in ``attention()``.
        replace: let attemper's kernels compute a Hugging Face model's attention, with the vitals from the same pass.
            Outputs are then equal to rounding.
        start: the number of the first step, for a run that is resumed.
        passes: ``"training"``: evaluation does not count into the steps around it. Once a pass ran with gradients, those without
            are left out; so are, in a step with passes in training mode, those in evaluation mode. Where no pass has
            gradients, all count. What ran after the last step counts as one more, unless it was in evaluation mode and the
            steps were not, or ``optimizer`` ended them. ``"all"``: every pass counts.
        keep: how many of the last steps ``record`` holds in memory, 8 bytes for every step, head and sign. None: all of them,
            or with ``path`` the last 100 of those that are in the file.

    Returns:
        a context manager. ``record`` holds the steps that have ended, ``step()`` ends one, ``rows(keep)`` says with a boolean
        ``(B, L)`` which queries are real where no mask shows it.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> with attemper.watch(model) as watch:
        ...     output = model(torch.randn(1, 5, 16))
        >>> watch.record.layers
        ['self_attn']
    """
    check_model(model)
    check_options(every, start, keep, passes, gradients=gradients, replace=replace)
    names = check_signs("watch", signs)
    if not names:
        raise InputError("watch(): `signs` must name at least one sign; got none. Leave it out for all.")
    check_name("watch", kernel)
    journal = Journal(to_path("watch", path)) if path is not None else None
    inner = None if optimizer is None else with_hooks(optimizer)
    return Watch(model, every, inner, gradients, journal, names, kernel, replace, start, passes, keep)


class Watch:
    """A watch over one model; made by :func:`watch`, used in a ``with`` statement."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        optimizer: Optimizer | None,
        gradients: bool,
        journal: Journal | None,
        signs: tuple[str, ...],
        kernel: str,
        replace: bool,
        start: int,
        passes: str,
        keep: int | None,
    ) -> None:
        self.model, self.every, self.optimizer = model, every, optimizer
        self.signs, self.kernel = signs, kernel
        self.modules: tuple[nn.Module, ...] = ()
        self.names: dict[int, str] = {}
        self.given_rows: Tensor | None = None
        self.examiners: list[Examiner] = []  # who looks closer: a scan
        self.where = "watch"  # what the user called, for errors
        self._ledger = Ledger(gradients)
        self._record = Record()
        self._journal = journal
        self._keep = keep
        where = f"attemper.Record.read({str(journal.path)!r}) has all" if journal else "keep= says how many are held"
        self._tail = f"only the last {keep or KEPT} steps are here; {where}."
        self._ranks: Ranks | None = None  # while the watch is open
        self._split = False  # whether a layer ran a part of its heads
        self._without_gradients: set[str] = set()  # layers of which it was noted
        self._step, self._steps_ended, self._passes = start, 0, Passes(passes)
        self._open, self._listening = False, False
        self._depth = 0
        self._unheard = 0  # calls that were seen and not measured
        self._optimizer_hook: Any = None
        self._replacement = None
        if replace:
            attend = attend_with(lambda: self._listening, signs, lambda call: attachment.begin(call)(call.frames))
            self._replacement = Replacement(model, attend)

    @property
    def record(self) -> Record:
        """What was measured up to the last step that ended: the last ``keep`` steps of it, as its ``notes`` say then."""
        return self._record

    @property
    def unmeasured(self) -> int:
        """How many calls were seen that could not be measured; the notes of the record say why."""
        return self._unheard

    def rows(self, keep: Tensor | None) -> None:
        """Say which queries are real in the coming passes, where no mask shows it.

        Args:
            keep: boolean ``(B, L)``, True for a real token; it holds for calls with L queries, until it is given anew.
                None: as masks show it.
        """
        if keep is not None and not (isinstance(keep, Tensor) and keep.dtype == torch.bool and keep.dim() == 2):
            got = f"{keep.dtype} of shape {tuple(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise InputError(f"watch.rows(): `keep` must be a boolean tensor (B, L), True for a real token; got {got}.")
        self.given_rows = keep

    def step(self) -> None:
        """End the step under way, and listen to the next if it is one of every n-th."""
        if not self._open:
            raise InputError(
                "watch.step(): the watch is not open. Call it inside `with attemper.watch(model) as watch:`."
            )
        attachment.forget_ended()
        if self._listening:
            if self._passes.left_out and not self._ledger.lines:
                self._note(ONLY_OTHERS, aloud=True)
            self._close_step(join=True)
        self._step += 1
        self._steps_ended += 1
        due = self._step % self.every == 0
        if due and not self._listening:
            self._listen()
        elif self._listening and not due:
            self._rest()

    def __enter__(self) -> Watch:
        if self._open:
            raise InputError("watch(): this watch is open already. Make another with attemper.watch(model).")
        attachment.forget_ended()
        named = named_modules(self.model)
        self.modules, self.names = tuple(named), {id(module): name for module, name in named.items()}
        self._depth = len(running.frames)
        self._passes.begin()
        self._steps_ended = 0
        self._ranks = Ranks(self.model)
        if self._journal is not None and self._ranks.first:
            self._journal.open(self._say)
        for sentence in self._ranks.sentences:
            self._say(sentence)
        if self._replacement is not None:
            self._replacement.install()
        self._open = True
        if self.optimizer is not None:
            self._optimizer_hook = self.optimizer.register_step_post_hook(lambda *_: self.step())
        if self._step % self.every == 0:
            self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        was_listening = self._listening
        try:
            self._drop_rest(ended_well=kind is None)
            # other ranks may not get here when this one fails; when it does not, they wait for it, rows or no rows
            join = kind is None and self._ranks is not None and self._ranks.group is not None
            if was_listening and (self._ledger.lines or join):
                self._close_step(join)
                self._step += 1  # the end of the block ends it
        finally:
            self._let_go()
        if kind is None:
            self._complain(was_listening)

    def _drop_rest(self, ended_well: bool) -> None:
        """Forget what is left when the block ends, if it is evaluation; after an error it may show what went wrong."""
        rest = self._passes.rest(ended_well and self.optimizer is not None and self._steps_ended > 0)
        if rest:
            self._note(UNFINISHED)
        for name in rest:
            self._ledger.drop(name)

    def _let_go(self) -> None:
        self._open = False
        if self._listening:
            self._rest()
        if len(running.frames) > self._depth:
            # a KeyboardInterrupt passes hooks by
            attachment.unwind(self._depth)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None
        if self._replacement is not None:
            self._replacement.uninstall()
        self.modules, self.names = (), {}
        if self._journal is not None:
            self._journal.close()

    def _listen(self) -> None:
        self._listening = True
        if any(map(_is_compiled, self.modules)):
            self._say(COMPILED)
        attachment.add(self)
        if self._ranks is not None:
            self._ranks.listen()

    def _rest(self) -> None:
        self._listening = False
        attachment.remove(self)
        if self._ranks is not None:
            self._ranks.rest()

    def began(self, module: nn.Module) -> bool:
        """A pass begins; whether it counts."""
        worse = self._passes.take(module, self.names[id(module)])
        if worse is None or worse:
            self._note(LEFT_OUT)
        if worse is None:
            return False
        for name in worse:  # what came before it in this step was evaluation
            self._ledger.drop(name)
        if in_compiled():
            self._say(COMPILED)
        return True

    def examine(self, call: Call, vitals: Vitals, rows: Tensor | None) -> list[Any]:
        return [examiner.look(call, vitals, rows) for examiner in self.examiners]

    def hear(self, name: str, call: Call, summary: HeadSummary | None, seen: list[Any] | None) -> None:
        self._ledger.add(name, call, summary)
        named = all_heads(call.frames) if are_many() else None
        if named is not None and named > call.facts.heads and named % call.facts.heads == 0:
            self._split = True
            self._say(f"{self._title(name)}: {call.facts.heads} of its {named} heads run on this rank.")
        for examiner, one in zip(self.examiners, seen or (), strict=False):
            examiner.keep(name, call, one)

    def unheard(self, name: str, reason: str) -> None:
        self._unheard += 1
        self._say(f"{self._title(name)}: not measured: {reason}.")

    def missed(self, name: str, reason: str) -> None:
        """What may be attention and was not seen, or not fully read: kept in the notes."""
        self._note(f"{self._title(name)}: {reason}.")

    @property
    def wants_gradients(self) -> bool:
        return self._ledger.wants_gradients

    @property
    def wants_traces(self) -> bool:
        return any(getattr(examiner, "traces", False) for examiner in self.examiners)

    def _title(self, name: str) -> str:
        """What a layer is called in a sentence: the model itself by its class, not by that of a wrapper."""
        return name or [type(module).__name__ for module, named in named_modules(self.model).items() if not named][-1]

    def _note(self, sentence: str, aloud: bool = False) -> None:
        if sentence not in self._record.notes:
            self._record.notes.append(sentence)
            if aloud:
                warnings.warn(f"watch(): {sentence}", stacklevel=2)

    def _say(self, sentence: str) -> None:
        self._note(sentence, aloud=True)

    def _close_step(self, join: bool) -> None:
        entries, facts = self._ledger.close(self._step)
        self._passes.end_step()
        whole, alone = None, self._ranks is None or self._ranks.group is None
        if join and self._ranks is not None:
            whole = self._ranks.join(self._step, entries, self._split, self._say)
        if whole is not None or alone:
            self._check_seen()  # where other ranks saw something, an error on this one would end them too
        entries = entries if whole is None else whole
        self._note_gradients(entries)
        self._record._add(entries, facts)
        writes = self._journal is not None and self._ranks is not None and self._ranks.first
        if self._journal is not None and writes:
            self._journal.append(entries, facts, [note for note in self._record.notes if note != self._tail])
            if self._journal.waiting:
                return  # what is not in the file stays in the record
        keep = (
            KEPT if self._keep is None and (writes or (self._journal is not None and whole is not None)) else self._keep
        )
        if keep is not None and self._record._forget(keep):
            self._note(self._tail)

    def _note_gradients(self, entries: list[Entry]) -> None:
        for layer, failure in self._ledger.failures.items():
            self._say(f"{self._title(layer)}: gradients could not be measured: {failure}.")
        layers = [self._title(entry.layer) for entry in entries if entry.gradients is None]
        if layers and self.wants_gradients:
            named = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
            named = "any layer" if len(layers) == len(entries) else named
            if named not in self._without_gradients:  # the first such step stands for all
                self._without_gradients.add(named)
                self._note(NO_GRADIENTS.format(step=entries[0].step, layers=named))

    def _check_seen(self) -> None:
        if self._passes.counted and not self._ledger.calls and not self._unheard:
            raise InputError(f"{self.where}(): saw no attention call in {self._title('')}; {FOLLOWS}.")

    def _complain(self, was_listening: bool) -> None:
        """What went by in silence is said when the block ends well."""
        if was_listening:
            self._check_seen()
        if not self._passes.seen:
            raise InputError(
                f"watch(): {type(self.model).__name__} was not called inside the block. Call model(…), which runs its hooks, "
                "and not model.forward(…)."
            )
        if self.every > 1 and not self._steps_ended and self._passes.counted > 1:
            warnings.warn(
                f"watch(): every={self.every}, but no step ended, so all {self._passes.counted} passes count as one. "
                "Call watch.step() after each step, or give watch() the optimizer.",
                stacklevel=3,
            )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
