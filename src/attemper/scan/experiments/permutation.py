"""permutation: reverse the tokens, and see whether the outputs are only reversed too: then their order is ignored."""

from __future__ import annotations

from .runner import POOLED
from .subject import CannotRun
from .trial import Answer, Moved, Trial, first_moved, judged

TODO = "Add positions: a learned table, sinusoids, or a rotation of q and k. If the tokens are a set, nothing is wrong."


def permutation(trial: Trial) -> Answer:
    """Whether the order of the tokens matters."""
    subject = trial.subject
    subject.needs_tokens()
    if any(trial.checks.is_causal.values()):
        return Answer("a causal mask orders the tokens", skipped=True)
    trial.after("batch")
    if subject.value.is_floating_point():
        return Answer("assumed to be ordered before: the model takes vectors, not tokens", skipped=True)
    rows = trial.lengths[subject.length]
    if not bool(subject.real.all()) or len(rows) != subject.length:
        raise CannotRun("the batch has padding, or is long")
    after = trial.run(subject.with_tokens(subject.value.flip(1)), trial.lengths)
    after = {name: part.flip(1) if part.shape[1] == len(rows) else part for name, part in after.items()}
    if not judged(after, trial.base):
        raise CannotRun("nothing that the model returns has one row per token")
    after = {"": after[""]} if "" in after else after  # a pooled output has no rows: its layers show it too
    moved = first_moved(after, trial.base, [*trial.order, POOLED], trial.floor)
    if moved is not None:
        return Answer("the order of the tokens changes the output")
    says = (
        "The order of the tokens is ignored: of the reversed text the output is the reversed output, number for number."
    )
    return trial.fault("order_ignored", Moved("", 0.0, 0), says, TODO)
