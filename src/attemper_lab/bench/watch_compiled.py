"""watch_compiled: what watching costs a compiled training step, and whether watching breaks graphs or compiles again.

``python -m attemper_lab.bench.watch_compiled`` runs it alone; each row is printed when it is measured, also if a later one fails.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attemper import instrument, watch
from attemper.extension.calls import dynamo_counters

from ..timing import interleave
from . import BenchRow
from .watch import cost_rows, watched_steps

CANDIDATES = {
    "compiled": "compiled",
    "compiled_unmeasured": "compiled, attemper's kernels",
    "compiled_instrumented": "compiled, instrumented",
    "compiled_watched": "compiled, watched",
}
"""Candidates: name in JSON → name in tables. ``compiled`` is the plain model on torch's SDPA."""
MODES = ("default", "reduce-overhead")
MASKS = ("causal", "transformers")
STEPS, TURNS = 8, 10
"""Steps of one timed call; how often watching is switched on and off to count compilations, for five steps each."""

Note = Callable[[str], None]


def rows(
    build: Callable[[], nn.Module],
    case: dict[str, Any],
    *,
    rounds: int,
    budget: float,
    note: Note,
    modes: tuple[str, ...] = MODES,
    masks: str = "causal",
    unmeasured: bool = False,
) -> list[BenchRow]:
    """Rows for each mode of torch.compile: times, then counts. What fails becomes a row with the error.

    Args:
        build: makes the model, on its device.
        case: model, batch, length, training and device, as the rows have them.
        rounds: how often each candidate is timed.
        budget: seconds for the timing of a mode.
        note: gets a sentence before each part, and each row.
        modes: of ``torch.compile``.
        masks: "causal": no mask is made, and SDPA and attemper are told that the call is causal. "transformers": as
            transformers makes them; while a graph is traced it makes the whole matrix.
        unmeasured: also time attemper's kernels without signs.
    """
    all_rows: list[BenchRow] = []
    ids = torch.randint(0, 1000, (case["batch"], case["length"]), device=case["device"])
    for mode in modes:
        here = {**case, "mode": mode, "masks": masks}
        torch.compiler.reset()
        dynamo_counters().clear()
        for measured in _of_mode(build, ids, here, rounds, budget, note, unmeasured):
            for row in measured:
                note(json.dumps(row))
            all_rows += measured
    return all_rows


def _of_mode(
    build: Callable[[], nn.Module],
    ids: Tensor,
    case: dict[str, Any],
    rounds: int,
    budget: float,
    note: Note,
    unmeasured: bool,
) -> Iterator[list[BenchRow]]:
    """Times, then counts, then a comparison; each that fails is a row."""
    try:
        subject = CompiledSubject(build, ids, case["mode"], case["training"], unmeasured)
    except Exception as error:
        yield [_failed(case, "model", error)]
        return
    parts: dict[str, Callable[[], list[BenchRow]]] = {
        "times": lambda: subject.times(case, rounds, budget, note),
        "counts": lambda: [subject.counts(case)],
        "compared": lambda: [subject.compared(case)],
    }
    for name, part in parts.items():
        try:
            with without_masks() if case["masks"] == "causal" else nullcontext():
                measured = part()
            yield measured
        except Exception as error:
            yield [_failed(case, name, error)]


class CompiledSubject:
    """Two models with the same weights, one plain and one instrumented, and their compiled steps."""

    def __init__(
        self, build: Callable[[], nn.Module], ids: Tensor, mode: str, training: bool, unmeasured: bool
    ) -> None:
        self.ids, self.training = ids, training
        self.plain = build().train(training)
        self.ours = copy.deepcopy(self.plain)
        self.kernels_only = copy.deepcopy(self.plain) if unmeasured else None
        self.layers = instrument(self.ours).layers
        self.steps = {"compiled": self._step(self.plain, mode)}
        if self.kernels_only is not None:
            instrument(self.kernels_only)
            for module in self.kernels_only.modules():
                module.__dict__.pop("attemper_tally", None)
            self.steps["compiled_unmeasured"] = self._step(self.kernels_only, mode)
        self.steps["compiled_instrumented"] = self._step(self.ours, mode)

    def _step(self, model: nn.Module, mode: str) -> Callable[[], None]:
        compiled = torch.compile(loss_of, mode=None if mode == "default" else mode)

        def step() -> None:  # nothing is returned: the next replay of a CUDA graph would overwrite it
            torch.compiler.cudagraph_mark_step_begin()
            if self.training:
                model.zero_grad(set_to_none=True)
                compiled(model, self.ids).backward()
            else:
                with torch.no_grad():
                    compiled(model, self.ids)

        return step

    def times(self, case: dict[str, Any], rounds: int, budget: float, note: Note) -> list[BenchRow]:
        calls: dict[str, Callable[[], object]] = {}
        failed = []
        for name, step in self.steps.items():
            note(f"watch: {case['model']}, {CANDIDATES[name]}, mode {case['mode']}: compiling")
            try:
                step()
                calls[name] = lambda step=step: [step() for _ in range(STEPS)]  # type: ignore[misc]
            except Exception as error:
                failed.append(_failed(case, name, error))
        if "compiled" not in calls:
            return failed
        # open from call to call, as in a training
        with watch(self.ours, keep_steps=STEPS) if "compiled_instrumented" in calls else nullcontext() as watching:
            if watching is not None:
                watching.pause()
                instrumented = self.steps["compiled_instrumented"]
                calls["compiled_watched"] = lambda: watched_steps(watching, instrumented, STEPS)
            times = interleave(calls, rounds=rounds, warmup=3, budget=budget, device=case["device"])
        return failed + cost_rows(times, {**case, "padded": False}, STEPS, "compiled")

    def counts(self, case: dict[str, Any]) -> BenchRow:
        """Graph breaks, and graphs compiled while watching goes on and off; whether every watched step had all rows."""
        step, counters = self.steps["compiled_instrumented"], dynamo_counters()
        step()
        before, seen = counters["stats"]["unique_graphs"], set()
        for _ in range(TURNS):
            with watch(self.ours, every=2) as watching:
                for _ in range(5):
                    step()
                    watching.step()
            seen |= {(row["step"], row["rows"]) for row in watching.record.to_dicts()}
            for _ in range(5):
                step()
        return {
            "candidate": "counts",
            **case,
            "steps": 10 * TURNS,
            "graph_breaks": sum(counters["graph_break"].values()),
            "recompilations": counters["stats"]["unique_graphs"] - before,
            "skipped_cuda_graphs": counters["inductor"]["cudagraph_skips"],
            "rows_are_complete": seen == {(number, float(self.ids.numel())) for number in (0, 2, 4)},
        }

    def compared(self, case: dict[str, Any]) -> BenchRow:
        """The record of a compiled step and that of the same model watched eagerly, on attemper's kernels."""
        step = self.steps["compiled_instrumented"]
        with watch(self.ours) as compiled:
            step()
        self.plain.load_state_dict(self.ours.state_dict())
        with watch(self.plain, replace=True, passes="all") as eager, torch.set_grad_enabled(self.training):
            loss_of(self.plain, self.ids)
        errors = [
            abs(row["entropy"] - other["entropy"]) / other["entropy"]
            for row, other in zip(compiled.record.to_dicts(), eager.record.to_dicts(), strict=True)
        ]
        return {"candidate": "compared", **case, "heads": len(errors), "largest_error_of_entropy": max(errors)}


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@contextmanager
def without_masks() -> Iterator[None]:
    """Let Hugging Face models make no causal mask: their attention is told that it is causal."""
    name, before = "create_causal_mask", {}
    for module in [module for path, module in sys.modules.items() if path.startswith("transformers.models.")]:
        if name in vars(module):
            before[module] = vars(module)[name]
            setattr(module, name, no_mask)
    try:
        yield
    finally:
        for module, function in before.items():
            setattr(module, name, function)


def no_mask(*args: object, **options: object) -> None:
    return None


def _failed(case: dict[str, Any], name: str, error: Exception) -> BenchRow:
    sentence = f"{type(error).__name__}: {error}".replace("\n", " ")
    return {"candidate": name, **case, "failed": sentence[:600]}


def main() -> None:
    from .watch_cuda import SUBJECTS, make

    parser = argparse.ArgumentParser(prog="attemper_lab.bench.watch_compiled", description=__doc__)
    parser.add_argument("--model", default="GPT-2-medium", choices=SUBJECTS)
    parser.add_argument("--mode", default="both", choices=(*MODES, "both"))
    parser.add_argument("--masks", default="causal", choices=MASKS)
    parser.add_argument("--forward", action="store_true", help="a forward pass in place of a training step")
    parser.add_argument("--unmeasured", action="store_true", help="also attemper's kernels without signs")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args()
    family, config, batch, tokens = SUBJECTS[chosen.model]
    if chosen.layers:
        config = {**config, "n_layer" if family == "gpt2" else "num_hidden_layers": chosen.layers}
    case = {
        "model": chosen.model,
        "training": not chosen.forward,
        "batch": chosen.batch or batch,
        "length": chosen.tokens or tokens,
        "device": chosen.device,
    }
    dtype = torch.bfloat16 if chosen.device != "cpu" else torch.float32
    rows(
        lambda: make(family, config, chosen.device).to(dtype),
        case,
        rounds=chosen.rounds,
        budget=60.0,
        note=lambda line: print(line, file=sys.stderr, flush=True),
        modes=MODES if chosen.mode == "both" else (chosen.mode,),
        masks=chosen.masks,
        unmeasured=chosen.unmeasured,
    )


if __name__ == "__main__":
    main()
