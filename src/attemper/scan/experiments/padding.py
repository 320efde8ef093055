"""padding: add tokens that a mask hides, on the right and on the left, and see whether real tokens move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...watch.examine import examine
from ..checks.declared import is_published
from ..checks.examiner import AttentionChecks
from .runner import POOLED, LayerRows
from .subject import CannotRun, NamedBatch
from .trial import Answer, Moved, Trial, first_moved, judged, named, share

MORE = 3  # padded tokens
TODO = (
    "Hide padded keys with −inf before the softmax, in every layer: mask[:, None, None, :]. On the left, positions must count "
    "real tokens alone: position_ids = (mask.cumsum(-1) − 1).clamp(min=0)."
)

POOL = "Pool over real tokens alone: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for a mean."


def padding(trial: Trial) -> Answer:
    """Whether padding changes real tokens."""
    subject = trial.subject
    subject.needs_tokens()
    if subject.tokens.startswith("decoder_") and "input_ids" in subject.arguments:
        subject = replace(subject, tokens="input_ids")
    flags = trial.checks.is_causal
    ordered = bool(flags) and all(flags.values()) and "future" not in trial.failed  # then the right cannot matter
    moved, done, pooled = None, ["right"], 0.0
    if not ordered or not bool(subject.real.all()):
        after = _padded(trial, subject, subject.lengthened(MORE), 0)
        moved, pooled = _moved(trial, subject, after), _pooled(trial, subject, after)
    if moved is None and bool(subject.real.all()):
        done.append("left")
        moved = _moved(trial, subject, _padded(trial, subject, subject.lengthened(MORE, left=True), MORE))
        if moved is not None:  # it may not count positions by the mask
            placed = subject.takes("position_ids")
            batch = subject.lengthened(MORE, left=True, placed=True) if placed else None
            moved = None if batch is None else _moved(trial, subject, _padded(trial, subject, batch, MORE))
            done = done if placed else done[:1]
    if moved is None and pooled:
        says = (
            f"Padding changes the output: with {MORE} more tokens on the right that the mask hides, no real token of a layer "
            f"moved, but the model's output did, by {share(pooled)}: what pools the tokens counts padding."
        )
        return trial.fault("padding_leak", Moved("", pooled, 0), says, POOL)
    if moved is None:
        return Answer(f"{MORE} padded tokens on the {' or the '.join(done)} changed no real token")
    if is_published(subject.model) and _hides(trial, subject):
        name = type(subject.model).__name__
        return Answer(
            f"padding moved {named(moved.layer)}, though masks hide it: assumed meant, as {name} is published",
            skipped=True,
        )
    row = int(trial.lengths[subject.length][moved.row])
    says = (
        f"Padding changes real tokens: with {MORE} more tokens on the {done[-1]} that the mask hides, row {row} of "
        f"{named(moved.layer)} moved by {share(moved.by)}."
    )
    return trial.fault("padding_leak", moved, says, TODO)


def _hides(trial: Trial, subject: NamedBatch) -> bool:
    """Whether no attention of the model sees padding on the right; then something else does, a convolution or a mean."""
    batch = subject.lengthened(MORE)
    reading = AttentionChecks(trial.runner.judge)
    reading.begin(batch)
    with examine(trial.runner.judge, [reading], caller="scan"):
        trial.runner(batch, {})
    patterns = [one.pattern for some in reading.layers.values() for one in some if one.pattern is not None]
    return not any(one.padding_seen for one in patterns)


def _padded(trial: Trial, subject: NamedBatch, batch: Any, before: int) -> LayerRows:
    """The rows of a pass with padding, ``before`` tokens of it on the left: those of the tokens that the batch has without it."""
    rows = trial.lengths[subject.length]
    after = trial.run(batch, {**trial.lengths, subject.length + MORE: rows + before})
    if not judged(after, trial.base):
        raise CannotRun("nothing that the model returns has one row per token")
    return after


def _moved(trial: Trial, subject: NamedBatch, after: LayerRows) -> Moved | None:
    real = subject.real[:, trial.lengths[subject.length].to(subject.value.device)]
    return first_moved(after, trial.base, trial.order, trial.floor, real)


def _pooled(trial: Trial, subject: NamedBatch, after: LayerRows) -> float:
    """How far padding on the right moved the pooled output; 0: not at all, or padding is not on the right in this model."""
    if is_published(subject.model) or not bool(subject.real[:, 0].all()):
        return (
            0.0  # a library's classifiers look for the padding id; a batch padded on the left may read the last token
        )
    moved = first_moved(after, trial.base, [POOLED], trial.floor)
    return 0.0 if moved is None else moved.by
