"""future: change the second half of the tokens, and see whether any row before them moves."""

from __future__ import annotations

from ..checks.declared import is_decoder
from .subject import CannotRun
from .trial import ERRORS, Answer, Trial, first_moved, judged, named, share

TODO = (
    "Hide keys after the query's own with −inf before the softmax, in every layer. If the mask is right, look for what else "
    "mixes positions there: a softmax or a norm over the length, a convolution that sees both sides, heads cut by a reshape."
)


def future(trial: Trial) -> Answer:
    """Whether outputs depend on tokens that come later."""
    subject, checks = trial.subject, trial.checks
    subject.needs_tokens()
    causal = checks.is_causal
    said = is_decoder(subject.model) or ("its attention modules" if checks.say_causal else None)
    length = subject.length
    start = max(length // 2, checks.prefix + 1 if checks.prefix else 0)
    if start >= length or length < 3:
        raise CannotRun(f"a text of {length} tokens is too short")
    tokens = subject.value.clone()
    tokens[:, start:] = subject.other_tokens(tokens[:, start:])
    kept = {**trial.lengths, length: trial.lengths[length][trial.lengths[length] < start]}
    after = trial.run(subject.with_tokens(tokens), kept)
    rows = int((trial.lengths[length] < start).sum())
    before = {
        name: part[:, :rows] if part.shape[1] == len(trial.lengths[length]) else part
        for name, part in trial.base.items()
    }
    if not judged(after, before):
        raise CannotRun("nothing that the model returns has one row per token")
    real = subject.real[:, trial.lengths[length][trial.lengths[length] < start].to(subject.value.device)]
    moved = first_moved(after, before, trial.order, trial.floor, real if real.shape[0] == subject.items else None)
    prefix = f"; the first {checks.prefix} tokens see one another: assumed a prefix LM" if checks.prefix else ""
    if moved is not None and moved.layer == "" and _is_pooled(trial):
        moved = None
    if moved is None:
        return Answer(f"no row before a changed token moved{prefix}")
    if not trial.strict and said is None and not any(causal.values()) and not checks.prefix:
        return Answer("assumed bidirectional: no layer has a causal mask, and nothing declares one", skipped=True)
    if not trial.strict and checks.reads_both_ways:
        return Answer("assumed bidirectional: some layers read from the left, and some from the right", skipped=True)
    why = f"{said} declares a decoder" if said else "its layers have a causal mask"
    if trial.strict:
        why = "it is to be causal"
    row = int(trial.lengths[length][moved.row])
    says = (
        f"A leak of the future: tokens from {start} on were changed, and row {row} of {named(moved.layer)} moved by "
        f"{share(moved.by)}, although {why}. A loss that falls fast may come of it."
    )
    return trial.fault("future_leak", moved, says, TODO)


def _is_pooled(trial: Trial) -> bool:
    """Whether an output (B, L) has one row per item, of as many numbers as there are tokens: one token less leaves L as it is."""
    subject = trial.subject
    if trial.base[""].dim() > 2 or subject.sequence_first:
        return False
    try:
        after = trial.run(subject.shortened(), trial.lengths)
    except ERRORS:
        return False
    return "" in after  # it still has the length of the whole batch
