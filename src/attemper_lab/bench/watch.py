"""watch: what watching costs a forward pass of a MiniLM-sized encoder; also the way without attemper: eager, with all weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from attemper import watch
from attemper.errors import InputError
from attemper.extension.calls import Watch
from attemper.extension.files import load

from ..timing import Times, interleave
from . import BenchRow

CANDIDATES = {
    "unwatched": "unwatched",
    "off_cycle": "watched, off-cycle",
    "watched": "watched, every call",
    "replaced": "watched, replace=True",
    "eager_attentions": "eager, output_attentions",
}
"""Candidates: name in JSON → name in tables."""

MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
NEVER = 10**9


class Subject:
    """Two encoders with the same random weights, one on SDPA and one eager, and a batch of tokens."""

    def __init__(self, batch: int, length: int, padded: bool) -> None:
        transformers = load("bench: watch", "transformers", "hf")
        generator = torch.Generator().manual_seed(0)
        config = transformers.BertConfig(**MINILM, max_position_embeddings=length)
        self.model = transformers.BertModel(config).eval()
        self.eager = transformers.BertModel(copy.deepcopy(config)).eval()
        self.eager.load_state_dict(self.model.state_dict())
        self.eager.set_attn_implementation("eager")
        tokens = torch.randint(0, config.vocab_size, (batch, length), generator=generator, device="cpu")
        self.inputs = {"input_ids": tokens}
        if padded:
            # every sequence but the first is a quarter padding
            keep = torch.ones(batch, length, dtype=torch.int64, device="cpu")
            keep[1:, 3 * length // 4 :] = 0
            self.inputs["attention_mask"] = keep

    def calls(self) -> dict[str, Callable[[], object]]:
        """One call of each candidate. The time of a watched one includes attaching and detaching."""
        resting = watch(self.model, every=NEVER, start=1)
        resting.__enter__()

        def off_cycle() -> object:
            output = _run(self.model, self.inputs)
            resting.step()
            return output

        return {
            "unwatched": lambda: _run(self.model, self.inputs),
            "off_cycle": off_cycle,
            "watched": lambda: self._watched(replace=False),
            "replaced": lambda: self._watched(replace=True),
            "eager_attentions": lambda: _run(self.eager, self.inputs, output_attentions=True),
        }

    def _watched(self, replace: bool) -> object:
        with watch(self.model, replace=replace) as watching:
            output = _run(self.model, self.inputs)
        return output, watching.record


def rows(
    cases: tuple[tuple[int, int, bool], ...],
    *,
    rounds: int,
    budget: float,
    note: Callable[[str], None],
    host: bool = False,
) -> list[BenchRow]:
    """Time every candidate on every case (batch, length, padded) on the CPU; cost is the time over the unwatched.

    ``host`` as in :func:`interleave`.
    """
    measured = []
    for batch, length, padded in cases:
        note(f"watch: MiniLM-sized encoder, {batch} × {length} tokens{', padded' if padded else ''}, on cpu")
        calls = Subject(batch, length, padded).calls()
        times = interleave(calls, rounds=rounds, budget=budget, host=host)
        measured += cost_rows(times, {"batch": batch, "length": length, "padded": padded, "device": "cpu"})
    return measured


def watched_steps(watching: Watch, step: Callable[[], object], steps: int) -> object:
    """Run `steps` steps under a watch that is open but paused, pause it again, and return what the last step returned."""
    watching.resume()
    for _ in range(steps):
        output = step()
        watching.step()
    watching.pause()
    return output


@contextmanager
def open_calls(
    model: nn.Module, step: Callable[[nn.Module], object], steps: int, *, replace: bool = True
) -> Iterator[dict[str, Callable[[], object]]]:
    """Candidates that each run `steps` steps. A watch stays open from call to call, as in training, and is paused in between."""
    with ExitStack() as watches:

        def under(model: nn.Module, **options: Any) -> Callable[[], object]:
            watching = watch(model, keep_steps=steps, **options)
            watching.__enter__()
            watches.callback(_close, watching)
            watching.pause()
            return lambda: watched_steps(watching, lambda: step(model), steps)

        calls = {
            "unwatched": lambda: [step(model) for _ in range(steps)][-1],
            "off_cycle": under(model, every=NEVER, start=1),
            "watched": under(model),
        }
        if replace:
            calls["replaced"] = under(copy.deepcopy(model), replace=True)  # a pause leaves attemper's kernels in place
        yield calls


def _close(watching: Watch) -> None:
    with suppress(InputError):  # one that is off-cycle in every step says that it measured nothing
        watching.__exit__(None, None, None)


def cost_rows(times: Times, case: dict[str, Any], steps: int = 1, than: str = "unwatched") -> list[BenchRow]:
    """One row for each timed candidate, whose calls have `steps` steps; cost is its time over that of `than`."""
    measured = []
    for name in times.seconds:
        milliseconds = {part: 1e3 * value / steps for part, value in times.spread(name).to_dict(digits=7).items()}
        cost = times.speed(than, name).to_dict()
        measured.append({"candidate": name, **case, "rounds": times.rounds, "ms": milliseconds, "cost": cost})
    return measured


@torch.no_grad()
def _run(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> object:
    return model(**inputs, **options)
