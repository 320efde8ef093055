"""What a monitor costs a training: its share of the example's step at every=10, the memory of 10,000 steps, every head's numbers.

    OMP_NUM_THREADS=1 python scripts/training_cost.py            both, a few minutes; exits 1 if a bound is missed
    OMP_NUM_THREADS=1 python scripts/training_cost.py --quick    fewer steps, no bound

Steps with and without the monitor alternate, in CPU time of this process, so that what else the machine does counts for all. The
monitor does what a callback does: it measures, judges, logs to a function and writes its file.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensorboardX import SummaryWriter

from attemper import watch
from attemper.integrations import as_logger, monitor, summary

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import nanogpt

from watched import Block, resident

SHARE, GROWTH = 0.03, 1 << 20  # of a step; bytes between the 2,000th and the 10,000th step
EVERY = 10


def example() -> tuple[torch.nn.Module, Callable[[], None]]:
    """The model of examples/train_gpt.py, and its step."""
    torch.manual_seed(0)
    model = nanogpt.GPT(heads=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        loss = model(torch.randint(256, (nanogpt.BATCH, nanogpt.LENGTH + 1)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, step


def cost(rounds: int) -> float:
    """How much longer a step takes with a monitor, as a share.

    Medians over three kinds of step, which alternate: without a monitor, with one between two measured steps, and measured.
    """
    model, step = example()
    plain: list[float] = []
    between: list[float] = []
    measured: list[float] = []

    def timed(into: list[float], end: Callable[[], None] = lambda: None) -> None:
        begin = time.process_time()
        step()
        end()
        into.append(time.process_time() - begin)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with monitor(model, every=EVERY, log=lambda metrics, at: None, path=path) as watching:
            for _ in range(EVERY):  # the first pass is followed in full, once in a training
                step()
                watching.step()
            for _ in range(rounds):
                timed(measured, watching.step)
                for _ in range(EVERY - 1):
                    timed(between, watching.step)
                watching.pause()
                for _ in range(EVERY):
                    timed(plain)
                watching.resume()
    usual, beside, full = (statistics.median(found) for found in (plain, between, measured))
    share = ((EVERY - 1) * beside + full) / (EVERY * usual) - 1
    print(
        f"a monitor at every={EVERY} adds {100 * share:.2f} % to the example's step: {1e3 * usual:.2f} ms without it, "
        f"{1e3 * beside:.2f} ms between measured steps, {1e3 * full:.2f} ms measured (medians of CPU time, {rounds} rounds)"
    )
    return share


def growth(steps: int) -> int:
    """Bytes that the process holds more at the end than after a fifth of the steps."""
    model, x, seen = Block(64, 16), torch.randn(1, 4, 64), {}
    with monitor(model, every=1, keep_steps=100, log=lambda metrics, at: None) as watching:
        for number in range(1, steps + 1):
            model(x).sum().backward()
            model.zero_grad()
            watching.step(loss=1.0)
            if number in (steps // 5, steps):
                seen[number] = resident()
    grown = seen[steps] - seen[steps // 5]
    print(f"between step {steps // 5} and {steps} with keep_steps=100, memory grew by {grown / 1024:.0f} KiB")
    return grown


def heads(rounds: int) -> None:
    """The time of making and logging the numbers of 24 layers of 16 heads."""
    model = torch.nn.Sequential(*(Block(64, 16) for _ in range(24)))
    with watch(model) as watching:
        model(torch.randn(1, 4, 64))
    ways: tuple[dict[str, Any], ...] = ({}, {"signs": "entropy", "heads": True}, {"signs": "all", "heads": True})
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        for options in ways:
            made, logged = [], []
            for step in range(rounds):
                begin = time.process_time()
                metrics = summary(watching.record, **options)
                middle = time.process_time()
                as_logger(writer).log(metrics, step)
                made.append(middle - begin)
                logged.append(time.process_time() - middle)
            print(
                f"{len(metrics)} numbers of a step: {1e3 * statistics.median(made):.1f} ms to make them, "
                f"{1e3 * statistics.median(logged):.1f} ms for TensorBoard's writer"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    logging.getLogger("attemper").setLevel(logging.CRITICAL)
    heads(3 if quick else 20)
    share, grown = cost(4 if quick else 40), growth(500 if quick else 10_000)
    return int(not quick and (share > SHARE or grown > GROWTH))


if __name__ == "__main__":
    sys.exit(main())
