"""A tiny model, its data, and the plain loop that trainers are compared with, to the bit."""

import torch
from torch import nn

from attemper import watch
from attemper.integrations import monitor
from attemper.treat import projections, qk_clip
from watched import Block

WIDTH, LENGTH, ITEMS, RATE = 16, 6, 24, 0.02


class Tiny(nn.Module):
    """As trainers take it: a dict with the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.fails_at, self.calls = None, 0

    def forward(self, x, labels=None):
        if self.training:
            self.calls += 1
            if self.calls == self.fails_at:
                raise FloatingPointError("planted")
        out = self.blocks(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def data():
    made = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(LENGTH, WIDTH, generator=made) * 3,
            "labels": torch.randn(LENGTH, WIDTH, generator=made),
        }
        for _ in range(ITEMS)
    ]


def batches(size=2):
    items = data()
    for start in range(0, len(items), size):
        part = items[start : start + size]
        yield {name: torch.stack([item[name] for item in part]) for name in part[0]}


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def plain(accumulate=1, start=1, epochs=1, steps=None, model=None, **options):
    """The loop that people write; returns the model and its record."""
    model = Tiny().train() if model is None else model
    optimizer = optimizer_of(model)
    with monitor(model, start=start, optimizer=optimizer, **options) as watching:
        done = 0
        for _ in range(epochs):
            for index, batch in enumerate(batches(), 1):
                (model(**batch)["loss"] / accumulate).backward()
                if index % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    watching.step()
                    done += 1
                    if done == steps:
                        return model, watching.record
    return model, watching.record


def same_weights(first, second):
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def clipped_by_hand(tau, accumulate=1, start=1):
    """The same loop with a watch and the clip called by name; returns the model, its record, and the number of clips by step."""
    model, counts = Tiny().train(), {}
    optimizer, found = optimizer_of(model), projections(model, next(batches()))
    with watch(model, start=start) as watching:
        for index, batch in enumerate(batches(), 1):
            (model(**batch)["loss"] / accumulate).backward()
            if index % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                watching.step()
                step = watching.record.steps[-1]
                counts[step] = len(qk_clip(model, watching.record, tau, projections=found))
    return model, watching.record, counts
