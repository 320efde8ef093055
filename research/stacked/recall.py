"""recall: the recall task of attemper_lab/training/recall.py, many runs at once.

The function of a model is that of `Recall`, with its products in another order: a query is compared with the tables of
embeddings, and its scores are then read at the places of the sequence. So no tensor has an entry per run, sequence, pair and
dimension. Runs whose numbers of pairs differ are in one stack: places that a sequence does not have are hidden. There are 1,024
keys (256 in lab/training), because 512 pairs need at least as many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from attemper import rule as rule_named
from attemper_lab.engine.experiment import Cell, generator

from .adam import StackedAdam, StackedSGD
from .parameters import StackedParameters
from .repeated import Repeated
from .surrogate import factors, ratios, surrogate_softmax

KEYS, VALUES = 1024, 32
UNSEEN = 256  # sequences of the test, and of the validation
LEARNED = 0.9
DRAWN = 16  # steps whose sequences are drawn together
SLOWER = 2.0  # a run ends when another rate of the same cell and seed has learned in half its steps
SETTLE = 20  # steps that a run has in any case
KEPT = 0.7  # a stack is made smaller when no more than this share of it still trains

DrawnSequences = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # keys and values (…, places), the key asked for and its value (…)


def shapes(d: int, width: int = 0) -> dict[str, tuple[int, ...]]:
    """Of one head of ``d`` in a model of a width, which is ``d`` unless it is given."""
    w = width or d
    return {"key": (KEYS, w), "value": (VALUES, w), "w_q": (w, d), "w_k": (w, d), "w_v": (w, w), "read": (w, VALUES)}


def initial(d: int, pairs: int, seed: int, device: str, dtype: torch.dtype, width: int = 0) -> dict[str, Tensor]:
    """Unit-variance embeddings, queries, keys, values and answers."""
    stream = generator(device, "stacked recall", d, pairs, seed)
    return {
        name: torch.randn(shape, generator=stream, device=device, dtype=dtype)
        * (1.0 if name in ("key", "value") else shape[0] ** -0.5)
        for name, shape in shapes(d, width).items()
    }


def sequences(count: int, pairs: int, places: int, stream: torch.Generator) -> DrawnSequences:
    """Keys without repetition and their values, with zeros after the last pair; the key that is queried, and its value."""
    device = stream.device
    keys = torch.rand(count, KEYS, generator=stream, device=device).argsort(-1)[:, :pairs]
    values = torch.randint(VALUES, (count, pairs), generator=stream, device=device)
    place = torch.randint(pairs, (count, 1), generator=stream, device=device)
    asked, answer = keys.gather(1, place)[:, 0], values.gather(1, place)[:, 0]
    return F.pad(keys, (0, places - pairs)), F.pad(values, (0, places - pairs)), asked, answer


def answers(
    views: Mapping[str, Tensor], inputs: Sequence[Tensor], scale: Tensor, hidden: Tensor, ratio: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys, values (runs, B, places), asked (runs, B); scale (runs,); hidden (runs, 1, places) → the answers' logits (runs, B,
    VALUES), and those of attention (runs, B, places). ``ratio`` (runs,) is that of surrogate.py."""
    keys, values, asked = inputs
    key, value = views["key"], views["value"]
    query = key.gather(1, asked[..., None].expand(-1, -1, key.shape[-1])) @ views["w_q"]
    query = (query * scale[:, None, None]) @ views["w_k"].mT
    of_key, of_value = query @ key.mT, query @ value.mT  # (runs, B, KEYS), (runs, B, VALUES)
    logits = (of_key.gather(2, keys) + of_value.gather(2, values)) / math.sqrt(2)
    masked = logits.masked_fill(hidden, -math.inf)
    weights = masked.softmax(-1) if ratio is None else surrogate_softmax(masked, ratio[:, None, None])
    on_key = torch.zeros_like(of_key).scatter_add(2, keys, weights)
    on_value = torch.zeros_like(of_value).scatter_add(2, values, weights)
    attended = (on_key @ key + on_value @ value) / math.sqrt(2)
    return attended @ views["w_v"] @ views["read"], logits


def scale_of(cell: Cell, d: int) -> float:
    """c/√d, or that of the rule."""
    return float(cell["c"]) / math.sqrt(d) if "c" in cell else float(rule_named(str(cell["rule"])).scale(head_dim=d))


class RecallStack:
    """Runs of one head dim: ``cells`` have ``pairs``, ``lr``, ``seed``, and ``rule`` or ``c``, with the scale c/√d. They may have
    ``jacobian`` and ``rates`` (surrogate.py); ``sgd`` is for all of a stack. Data depend on pairs and seed alone.

    After a step ``losses`` is (runs,), and ``gradient``, (runs, 2), the median and the root mean square over the sequences of the
    batch of the gradient's norm at the input of the softmax.
    """

    def __init__(
        self,
        d: int,
        cells: Sequence[Cell],
        batch: int,
        device: str,
        dtype: torch.dtype = torch.float32,
        width: int = 0,
        sgd: bool = False,
    ) -> None:
        self.device, self.batch, self.cells = device, batch, list(cells)
        self.parameters = StackedParameters(shapes(d, width), len(cells), device, dtype)
        made: dict[tuple[int, int], dict[str, Tensor]] = {}
        for run, cell in enumerate(cells):
            which = int(cell["pairs"]), int(cell["seed"])
            if which not in made:
                made[which] = initial(d, *which, device, dtype, width)
            self.parameters.fill(run, made[which])
        self.streams = {which: generator(device, "stacked recall data", *which) for which in made}
        self.places = max(pairs for pairs, _ in made)
        rates = torch.tensor([[float(cell["lr"])] for cell in cells], device=device, dtype=dtype)
        self.optimizer = (StackedSGD if sgd else StackedAdam)(self.parameters, rates)
        self.scale = torch.tensor([scale_of(cell, d) for cell in cells], device=device, dtype=dtype)
        self.ratio, self.factor = ratios(cells, d, device, dtype), factors(cells, d, device, dtype)
        pairs = torch.tensor([int(cell["pairs"]) for cell in cells], device=device)
        self.hidden = torch.arange(self.places, device=device) >= pairs[:, None, None]
        self.unseen = {
            (part, count): sequences(UNSEEN, count, self.places, generator(device, f"stacked recall {part}", count))
            for part in ("validation", "test")
            for count in {which[0] for which in made}
        }
        self.drawn: list[Tensor] = []
        self.done = 0
        self._prepare()

    def _prepare(self) -> None:
        """The tensors that a step reads, for the runs that are left."""
        order = list(self.streams)
        which = [order.index((int(cell["pairs"]), int(cell["seed"]))) for cell in self.cells]
        self.of_stream = torch.tensor(which, device=self.device)
        size = (len(order), self.batch, self.places)
        self.inputs = tuple(torch.zeros(size[:n], dtype=torch.int64, device=self.device) for n in (3, 3, 2, 2))
        self.losses = self.parameters.flat.new_zeros(len(self.cells))
        self.gradient = self.parameters.flat.new_zeros(len(self.cells), 2)
        self.step = Repeated(self._step, self.device)

    def _step(self) -> None:
        *inputs, answer = (part.index_select(0, self.of_stream) for part in self.inputs)
        logits, attention = answers(self.parameters.views, inputs, self.scale, self.hidden, self.ratio)
        losses = F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="none")
        losses = losses.view(answer.shape).mean(1)
        *found, at_softmax = torch.autograd.grad(losses.sum(), [*self.parameters.views.values(), attention])
        self.losses.copy_(losses.detach())
        sizes = self.batch * torch.linalg.vector_norm(at_softmax, dim=2)  # the loss is a mean over the batch
        self.gradient[:, 0].copy_(sizes.sort(1).values[:, self.batch // 2])
        self.gradient[:, 1].copy_(sizes.square().mean(1).sqrt())
        self.optimizer.update(self.parameters.gathered(found), self._adjust if self.factor is not None else None)

    def _adjust(self, change: Tensor) -> None:
        """The rates of W_Q and W_K."""
        assert self.factor is not None
        for name in ("w_q", "w_k"):
            self.parameters.part(change, name).mul_(self.factor[:, None, None])

    def train(self) -> None:
        """One step of every run."""
        place = self.done % DRAWN
        if place == 0:
            drawn = [
                sequences(DRAWN * self.batch, pairs, self.places, stream) for (pairs, _), stream in self.streams.items()
            ]
            self.drawn = [torch.stack(parts).unflatten(1, (DRAWN, self.batch)) for parts in zip(*drawn, strict=True)]
        for buffer, part in zip(self.inputs, self.drawn, strict=True):
            buffer.copy_(part[:, place])
        self.step()
        self.done += 1

    @torch.no_grad()
    def accuracy(self, part: str) -> list[float]:
        """Each run's accuracy on the unseen sequences of a part."""
        found = [0.0] * len(self.cells)
        for count in {int(cell["pairs"]) for cell in self.cells}:
            runs = [run for run, cell in enumerate(self.cells) if int(cell["pairs"]) == count]
            places = torch.tensor(runs, device=self.device)
            views = {name: view[places] for name, view in self.parameters.views.items()}
            *inputs, answer = (one.expand(len(runs), *one.shape) for one in self.unseen[part, count])
            logits, _ = answers(views, inputs, self.scale[places], self.hidden[places])
            right = (logits.argmax(-1) == answer).double().mean(1)
            for run, value in zip(runs, right.tolist(), strict=True):
                found[run] = value
        return found

    def keep(self, runs: Sequence[int]) -> None:
        """Continue with these runs alone, given by index."""
        places = torch.tensor(list(runs), device=self.device)
        self.parameters.keep(places)
        self.optimizer.keep(places)
        self.scale, self.hidden = self.scale[places], self.hidden[places]
        self.ratio, self.factor = (None if one is None else one[places] for one in (self.ratio, self.factor))
        self.cells = [self.cells[run] for run in runs]
        used = {(int(cell["pairs"]), int(cell["seed"])) for cell in self.cells}
        left = [number for number, which in enumerate(self.streams) if which in used]
        self.drawn = [part[torch.tensor(left, device=self.device)] for part in self.drawn]
        self.streams = {which: stream for which, stream in self.streams.items() if which in used}
        self._prepare()
