"""Run a model of the zoo under examiners, and compute its full matrices independently."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import attemper
import zoo
from attemper.scan.examiners.items import BatchItems

HIDDEN = -1e4


@dataclass
class Matrix:
    """One call of a model: its name, and everything about its logits in float64."""

    layer: str
    kind: str
    logits: Tensor  # (B, H, Lq, Lk), float64
    keep: Tensor  # (B, Lq): real queries

    @property
    def weights(self) -> Tensor:
        return self.logits.softmax(-1).nan_to_num(0.0)

    @property
    def visible(self) -> Tensor:
        return (self.logits > HIDDEN).sum(-1)

    @property
    def largest(self) -> float:
        return self.logits[self.logits > HIDDEN].abs().max().item()

    def span(self, item: int) -> tuple[int, int]:
        real = self.keep[item].nonzero().flatten().tolist()
        return real[0], real[-1] + 1


def items_of(subject: zoo.Subject) -> BatchItems:
    """[CLS] w1 w2 … [SEP] for every item, without padding."""
    keep = subject.keep if subject.keep is not None else torch.ones(2, zoo.LENGTH, dtype=torch.bool)
    lengths = keep.sum(-1).tolist()
    tokens = tuple(("[CLS]", *(f"w{i}" for i in range(1, n - 1)), "[SEP]") for n in lengths)
    special = tuple(tuple(token[0] == "[" for token in item) for item in tokens)
    return BatchItems(tokens=tokens, special=special)


def examine(subject: zoo.Subject, *examiners: object) -> list[Matrix]:
    """Run the model once under the examiners, and return its full matrices in the order of its calls."""
    with torch.no_grad():
        matrices = subject.full(subject)
        watch = attemper.watch(subject.model, examiners=list(examiners))
        with watch:
            subject.run()
    examined = []
    for entry, logits in zip(watch.record.entries, matrices, strict=True):
        lengths = {zoo.LENGTH: subject.keep, zoo.TARGETS: subject.targets}
        keep = lengths.get(logits.shape[2])
        keep = torch.ones(logits.shape[0], logits.shape[2], dtype=torch.bool) if keep is None else keep
        examined.append(Matrix(entry.layer, entry.kind, logits.double(), keep))
    return examined


def rounding(matrix: Matrix) -> float:
    """What float32 logits of this size may be off by, through exp."""
    return 32 * torch.finfo(torch.float32).eps * (1 + matrix.largest)
