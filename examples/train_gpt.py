"""A small GPT at a learning rate that is too high: untreated, clipped, floored, with QK-norm; what the watch shows, and when.

python examples/train_gpt.py            3 seeds of 400 steps, some minutes; run.jsonl is kept for `attemper report`
python examples/train_gpt.py --quick    one seed of 8 steps
"""

import contextlib
import logging
import sys
from pathlib import Path

import torch
from nanogpt import GPT, LENGTH, TEXT, batches
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import attemper
from attemper.integrations import monitor

RATE, WARM = 3e-2, 40
SEEDS, STEPS = ((0,), 8) if "--quick" in sys.argv else ((0, 1, 2), 400)
ARMS = ("untreated", "clip 30", "floor 0.3", "QK-norm")
GAPS, HELD = (0.05, 0.1), 20  # nats above the twin, and for how many steps


def train(arm: str, seed: int, path: Path | None) -> tuple[list[float], attemper.Record]:
    """The loss of every step, smoothed, and the record of the watch."""
    torch.manual_seed(seed)
    model, texts = GPT(heads=1), batches(seed, STEPS)
    if arm == "QK-norm":
        attemper.add_qk_norm(model, TEXT[: LENGTH + 1][None])
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM))
    floored = attemper.floor(model, 0.3, 1.0) if arm == "floor 0.3" else contextlib.nullcontext()
    clip, every = (30.0, 1) if arm == "clip 30" else (None, 2)
    losses: list[float] = []
    with floored, monitor(model, every=every, clip=clip, keep_steps=STEPS, path=path) as watching:
        for text in texts:
            loss = model(text)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm.step()
            watching.step(loss=loss)
            losses.append(0.9 * losses[-1] + 0.1 * loss.item() if losses else loss.item())
    return losses, watching.record


def first(record: attemper.Record, above: float) -> int | None:
    return next((row["step"] for row in record.to_dicts() if row["peak"] > above), None)


def leaves(losses: list[float], twin: list[float], gap: float) -> int | None:
    """The step from which on the loss stays above its twin's by so much."""
    gaps = [one - other for one, other in zip(losses, twin, strict=True)]
    return next((step for step in range(len(gaps) - HELD) if min(gaps[step : step + HELD]) > gap), None)


if __name__ == "__main__":
    logging.getLogger("attemper").setLevel(logging.CRITICAL)  # the table tells it
    columns = ("arm", "seed", "end loss", "peak", "peak > 50", *(f"loss {gap} apart" for gap in GAPS))
    table = Table(*columns, box=box.SIMPLE_HEAD)
    leads: dict[float, list[int]] = {gap: [] for gap in GAPS}
    for seed in SEEDS:
        runs = {arm: train(arm, seed, Path("run.jsonl") if (arm, seed) == (ARMS[0], 0) else None) for arm in ARMS}
        for arm, (losses, record) in runs.items():
            steps = [first(record, 50), *(leaves(losses, runs["QK-norm"][0], gap) for gap in GAPS)]
            peak = max(row["peak"] for row in record.filter(steps=record.steps[-1]).to_dicts())
            shown = ("–" if step is None else str(step) for step in steps)
            table.add_row(arm, str(seed), f"{losses[-1]:.2f}", f"{peak:.1f}", *shown)
            for gap, left in zip(GAPS, steps[1:], strict=True):
                if arm == ARMS[0] and left is not None and steps[0] is not None:
                    leads[gap].append(left - steps[0])
    Console(width=80, highlight=False).print(table)
    for gap, found in leads.items():
        told = ", ".join(map(str, found)) or "none"
        print(f"Untreated: steps from a peak above 50 to a loss {gap} above its twin's: {told}")
