"""items: add another item to the batch, and see whether those that were there move."""

from __future__ import annotations

from ..checks.declared import has_experts
from .runner import POOLED
from .subject import CannotRun
from .trial import Answer, Trial, first_moved, judged, named, share

TODO = (
    "If the inputs are (batch, length, width), set batch_first=True: nn.MultiheadAttention and nn.TransformerEncoderLayer take "
    "(length, batch, width) by default. Otherwise look for a softmax, a norm or a reshape over the batch."
)


def items(trial: Trial) -> Answer:
    """Whether items of a batch change one another."""
    subject = trial.subject
    after = trial.run(subject.with_item(), trial.lengths)
    count = subject.items
    after = {name: rows[:count] for name, rows in after.items()}
    if not judged(after, trial.base):
        raise CannotRun("nothing that the model returns has one row per token")
    moved = first_moved(after, trial.base, [*trial.order, POOLED], trial.floor)
    assumed = (
        "; assumed (length, batch, …), as attention runs along the first dimension" if subject.sequence_first else ""
    )
    if moved is None:
        return Answer(f"another item in the batch changed nothing{assumed}")
    experts = has_experts(subject.model)
    if experts is not None:
        return Answer(
            f"another item moved {named(moved.layer)}: assumed meant, as {experts} shares experts among tokens"
        )
    says = (
        f"Items of a batch change one another: with one more item, {named(moved.layer)} of the others moved by "
        f"{share(moved.by)}."
    )
    return trial.fault("batch_leak", moved, says, TODO)
