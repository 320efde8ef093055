"""charlm: on a small language model of Python source, how much does the scale matter, for each initialisation?

Characters of the standard library's own modules, in the order of their names, hashed into every row. Pre-norm blocks.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError
from .experiment import DEVICE, Cell, Expectation, Experiment, Parameter, Row, Rows, generator, heads_divide, pick
from .layers import Scores
from .training import best_lr, fit, runs

VOCABULARY = 128
TEXT = 1_000_000  # characters; the last tenth is held out
UNSEEN = 32
INITS = ("small", "unit")
RULES = ("sqrt_dk", "none", "dk", "qk_norm", "learned", "softcap", "sqrt_dmodel")
NOTHING = 0.05  # nats: what counts as no difference


@functools.cache
def corpus() -> tuple[Tensor, str]:
    """The text as numbers below 128, and the hash that says which text it was."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= TEXT:
            break
    content = b"".join(parts)[:TEXT]
    if len(content) < TEXT // 2:
        raise InputError("run charlm: this Python has no source files of its standard library. Use one that has.")
    numbers = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)
    return numbers, hashlib.sha256(content).hexdigest()[:16]


class Block(nn.Module):
    """Attention and two linear layers, each on a normed copy of its input. Projections are drawn by the initialisation."""

    def __init__(self, width: int, heads: int, scores: Scores, std: float, stream: torch.Generator) -> None:
        super().__init__()
        self.heads, self.scores = heads, scores

        def draw(rows: int, columns: int, spread: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=stream, device=stream.device) * spread)

        self.qkv = draw(width, 3 * width, std)
        self.out = draw(width, width, width**-0.5)
        self.up, self.down = draw(width, 4 * width, width**-0.5), draw(4 * width, width, 0.5 * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (F.layer_norm(x, (width,)) @ self.qkv).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (B, H, L, d)
        attended = self.scores(query, key, value, causal=True)
        x = x + attended.transpose(1, 2).reshape(batch, length, width) @ self.out
        return x + F.gelu(F.layer_norm(x, (width,)) @ self.up) @ self.down


class Model(nn.Module):
    """Embeddings, blocks, read-out."""

    def __init__(self, cell: Cell, score: str, stream: torch.Generator, kappa: float = 1.0) -> None:
        super().__init__()
        width, heads, length = int(cell["d_model"]), int(cell["heads"]), int(cell["length"])
        std = width**-0.5 if cell["init"] == "unit" else 0.02

        def draw(rows: int, columns: int, spread: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=stream, device=stream.device) * spread)

        self.token, self.place = draw(VOCABULARY, width, 1.0), draw(length, width, 0.3)
        scores = [Scores(score, heads, width // heads, layer, kappa) for layer in range(int(cell["layers"]))]
        self.blocks = nn.ModuleList(Block(width, heads, one, std, stream) for one in scores).to(stream.device)
        self.read = draw(width, VOCABULARY, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.token) + self.place
        for block in self.blocks:
            x = block(x)
        return F.layer_norm(x, x.shape[-1:]) @ self.read


def measure(cell: Cell) -> list[Row]:
    return train(cell, str(cell["rule"]))


def train(cell: Cell, score: str, kappa: float = 1.0) -> list[Row]:
    """One run; other experiments ask the same model other questions."""
    text, name = corpus()
    cut = len(text) * 9 // 10
    length, batch, seed = int(cell["length"]), int(cell["batch"]), cell["seed"]
    model = Model(cell, score, generator(cell["device"], "charlm", cell["d_model"], cell["layers"], seed), kappa)
    data = generator("cpu", "charlm data", length, batch, seed)
    held = _windows(text[cut:], UNSEEN, length, generator("cpu", "charlm test", length)).to(str(cell["device"]))

    def loss_on(windows: Tensor) -> Tensor:
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def loss_of(step: int) -> Tensor:
        return loss_on(_windows(text[:cut], batch, length, data).to(str(cell["device"])))

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        return {"held_out": float(loss_on(held))}

    first = model.blocks[0]
    assert isinstance(first, Block)
    rows = fit(model, float(cell["lr"]), int(cell["steps"]), loss_of, evaluate, {"qkv": first.qkv})
    return [{**row, "text_sha256": name} for row in rows]


@functools.cache
def bigram(length: int) -> float:
    """The held-out loss of counting pairs of characters, every pair seen once more than it was: what no attention reaches."""
    text, _ = corpus()
    cut = len(text) * 9 // 10
    counts = torch.ones(VOCABULARY, VOCABULARY, dtype=torch.float64)
    pairs = text[: cut - 1] * VOCABULARY + text[1:cut]
    counts += torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY)
    held = _windows(text[cut:], UNSEEN, length, generator("cpu", "charlm test", length))
    return float(-(counts / counts.sum(1, keepdim=True)).log()[held[:, :-1], held[:, 1:]].mean())


def _windows(text: Tensor, count: int, length: int, stream: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=stream)
    return text[starts + torch.arange(length + 1)]


def summary(rows: Rows) -> list[Row]:
    """Per rule and initialisation, at the rule's own best learning rate: held-out loss over seeds, median and range."""
    found = []
    for init in dict.fromkeys(row["init"] for row in rows):
        for name in dict.fromkeys(row["rule"] for row in rows):
            lr = best_lr(rows, "held_out", False, init=init, rule=name)
            of_seed = list(runs(pick(rows, init=init, rule=name, lr=lr), "seed").values())
            last = [run[-1]["held_out"] for run in of_seed]
            found.append(
                {
                    "init": init,
                    "rule": name,
                    "lr": lr,
                    "seeds": len(last),
                    "held_out": statistics.median(last),
                    "held_out_low": min(last),
                    "held_out_high": max(last),
                    "early_entropy": statistics.median(run[min(2, len(run) - 1)]["entropy"] for run in of_seed),
                    "gap": statistics.median(run[-1]["held_out"] - _recent(run) for run in of_seed),
                    "peak": max(row["peak"] for run in of_seed for row in run),
                }
            )
    return found


def _recent(run: Rows) -> float:
    """The training loss over the last logged steps; one batch alone is noisy."""
    return statistics.fmean(row["loss"] for row in run[-3:])


def differences(rows: Rows) -> list[Row]:
    """Per initialisation and learning rate: how much more held-out loss without a scale than with 1/√d_k, in nats, over seeds.

    ``settled`` says whether all seeds agree on the sign; where they do not, the scale makes no difference that can be seen.
    """
    found = []
    for init in dict.fromkeys(row["init"] for row in rows):
        for lr in sorted({row["lr"] for row in rows}):
            last = {
                name: {seed: run[-1]["held_out"] for (seed,), run in runs(part, "seed").items()}
                for name in ("sqrt_dk", "none")
                if (part := pick(rows, init=init, lr=lr, rule=name))
            }
            if len(last) < 2:
                continue
            apart = [last["none"][seed] - last["sqrt_dk"][seed] for seed in last["none"]]
            found.append(
                {
                    "init": init,
                    "lr": lr,
                    "difference": statistics.median(apart),
                    "difference_low": min(apart),
                    "difference_high": max(apart),
                    "settled": min(apart) > 0 or max(apart) < 0,
                }
            )
    return found


def expect(rows: Rows) -> list[Expectation]:
    found = pick(differences(rows), init="small")
    if not found:
        return []
    least = min(found, key=lambda row: abs(row["difference"]))
    return [
        Expectation(
            f"held-out loss, none less 1/√d_k, projections drawn with std 0.02, lr {least['lr']:g}",
            0.004,
            least["difference"],
            NOTHING,
            "pilot of this project: +0.004 nats at d_k = 32",
            "differences under 0.05 nats mean nothing at this size",
        )
    ]


def finding(rows: Rows) -> str:
    found = differences(rows)
    if not found:
        best = min(summary(rows), key=lambda row: row["held_out"])
        return f"Best held-out loss {best['held_out']:.3f} nats, under rule {best['rule']}"
    most, least = (choose(found, key=lambda row: abs(row["difference"])) for choose in (max, min))
    words = {"small": "std 0.02", "unit": "unit variance"}
    parts = [
        f"{row['difference']:+.3f} nats ({row['difference_low']:+.3f} to {row['difference_high']:+.3f}; {words[row['init']]}, "
        f"lr {row['lr']:g})"
        for row in (most, least)
    ]
    return f"Leaving the scale out costs a small language model at most {parts[0]} and at least {parts[1]}"


TASK = (
    Parameter("steps", (200,), "how many", least=1),
    Parameter("batch", (16,), "windows per step", least=1),
    Parameter("length", (48,), "characters per window", least=2, hint="one character has nothing before it"),
    Parameter("d_model", (64,), "the model's width", least=1),
    Parameter("heads", (2,), "how many heads", least=1),
    Parameter("seed", (0, 1, 2), "which random stream", least=0),
    DEVICE,
)
"""What every experiment on this task shares."""

EXPERIMENT = Experiment(
    name="charlm",
    question="On a small language model of source code, how much does the scale matter?",
    claims=("C9", "C15", "C19"),
    parameters=(
        Parameter("rule", ("sqrt_dk", "none"), "the scale's rule", choices=RULES),
        Parameter("init", INITS, "projections: std 0.02 (small), or unit-variance q and k (unit)", choices=INITS),
        Parameter("lr", (1e-3, 3e-3), "Adam's learning rate", above=0),
        Parameter("layers", (2,), "how many", least=1),
        *TASK,
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="charlm",
    check=heads_divide,
    presets={
        "full": {
            "rule": ("sqrt_dk", "none", "dk", "qk_norm"),
            "lr": (3e-4, 1e-3, 3e-3),
            "steps": (800,),
            "batch": (32,),
            "length": (128,),
            "d_model": (256,),
            "heads": (4,),
            "layers": (4,),
        }
    },
    trains=True,
)
