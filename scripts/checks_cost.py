"""What the checks of a scan cost: its time with and without them, and the passes, time and memory of --deep, on this machine.

`OMP_NUM_THREADS=1 python scripts/checks_cost.py` prints a line for the embedded model on a short and a long text, and for a
hand-written model; then, for models of four kinds, the processor time of a scan and of --deep in forward passes, and the largest
memory of a forward, a scan and --deep, weights included. `--deep` prints these alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import attemper
from attemper.demo import embedded
from attemper.scan.checks.examiner import AttentionChecks
from attemper.scan.experiments.runner import Runner
from attemper.watch.trace.trace import Trace
from attemper_lab import memory

ROUNDS = 15


class ByHand(nn.Module):
    """Four layers of attention as tutorials write it."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.words, self.fused = nn.Embedding(1000, 256), fused
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(256, 256) for _ in range(4)) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for q, k, v, out in self.layers:
            parts = [part(x).unflatten(-1, (8, 32)).transpose(1, 2) for part in (q, k, v)]
            x = x + out(self.attend(*parts).transpose(1, 2).flatten(2))
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.mT / 32**0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """A scan as it was before: no check reads anything, and nothing is followed for them."""
    with contextlib.ExitStack() as stack:
        for cls, name, result in (
            (AttentionChecks, "look", None),
            (AttentionChecks, "findings", []),
            (AttentionChecks, "results", []),
            (Trace, "_cut", None),
            (Trace, "_joined", None),
            (Trace, "_hidden", None),
            (Trace, "_changed", False),
        ):
            stack.enter_context(mock.patch.object(cls, name, lambda *_, result=result, **__: result))
        yield


def ratio(scan: Callable[[], object]) -> tuple[float, float]:
    """The median time of a scan without the checks, and with them as a multiple of it; rounds alternate."""
    plain, checked = [], []
    scan()
    for _ in range(ROUNDS):
        for times, around in ((plain, without_checks()), (checked, contextlib.nullcontext())):
            with around:
                start = time.perf_counter()
                scan()
                times.append(time.perf_counter() - start)
    pairs = [after / before for before, after in zip(plain, checked, strict=True)]
    return statistics.median(plain), statistics.median(pairs)


def rise(scan: Callable[[], object]) -> int:
    """How many bytes a scan adds at its peak."""

    def run() -> tuple[Tensor, ...]:
        scan()
        return ()

    return memory.rise(run, "cpu")[0]


def main() -> None:
    model, tokenizer = embedded()
    short, long = "The dog chased the ball because it was fast.", "The dog chased the ball because it was fast. " * 40
    ids = torch.arange(512)[None] % 997
    cases: dict[str, Callable[[], object]] = {
        "MiniLM, 12 tokens": lambda: attemper.scan(model, short, tokenizer=tokenizer, pictures=False),
        "MiniLM, 402 tokens": lambda: attemper.scan(model, long, tokenizer=tokenizer, pictures=False),
        "by hand, 512 tokens": lambda: attemper.scan(ByHand(), ids, pictures=False),
    }
    for name, scan in cases.items():
        seconds, times = ratio(scan)
        print(f"{name}: {1000 * seconds:.0f} ms without checks, {100 * (times - 1):+.1f} % with them")
    deep()


def models() -> dict[str, tuple[nn.Module, Any]]:
    """Models of four kinds, each with its batch."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
    sizes |= {"vocab_size": 1000, "max_position_embeddings": 4096}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=4))
    padded = {"input_ids": torch.arange(404).view(2, 202) % 997, "attention_mask": torch.ones(2, 202, dtype=torch.long)}
    found: dict[str, tuple[nn.Module, Any]] = {
        "MiniLM, 2 × 202 tokens": (embedded()[0], padded),
        "Llama of 4 layers, 2 × 202 tokens": (llama, padded),
        "SDPA, 1 × 2,048 tokens": (ByHand(fused=True), torch.arange(2048)[None] % 997),
        "by hand, 1 × 1,024 tokens": (ByHand(), torch.arange(1024)[None] % 997),
    }
    return {name: (model.eval(), batch) for name, (model, batch) in found.items()}


def runs(model: nn.Module, batch: Any) -> list[Callable[[], object]]:
    """A forward, a scan and --deep."""
    scan = functools.partial(attemper.scan, model, batch, pictures=False)
    return [functools.partial(without_gradients, model, batch), scan, functools.partial(scan, deep=True)]


def deep() -> None:
    """The passes, time and memory of --deep."""
    # every block that is freed goes back at once: what malloc keeps for later is not memory that a scan needs
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), __file__, "--memory"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    most = json.loads(done.stdout.splitlines()[-1])
    for name, (model, batch) in models().items():
        with mock.patch.object(Runner, "take", autospec=True, side_effect=Runner.take) as passes:
            one, plain, all_of_it = map(spent, runs(model, batch))
        count = passes.call_count // TIMES
        print(
            f"{name}: a scan takes {plain / one:.1f} forwards, --deep {all_of_it / one:.1f} ({count} passes of its own); "
            f"{', '.join(f'{part / 2**20:.0f}' for part in most[name])} MiB for a forward, a scan and --deep",
            flush=True,
        )


def largest() -> dict[str, list[int]]:
    """The largest memory of a forward, a scan and --deep, weights included, each after one that is not counted."""
    found = {}
    for name, (model, batch) in models().items():
        held = sum(part.numel() * part.element_size() for part in (*model.parameters(), *model.buffers()))
        runs(model, batch)[-1]()  # what is imported then is not counted
        found[name] = [held + rise(run) for run in runs(model, batch)]
    return found


TIMES = 3


def spent(run: Callable[[], object]) -> float:
    """The median processor time of a call."""
    times = []
    for _ in range(TIMES):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def without_gradients(model: nn.Module, batch: Any) -> object:
    with torch.no_grad():
        return model(**batch) if isinstance(batch, dict) else model(batch)


if __name__ == "__main__":
    if "--memory" in sys.argv:
        print(json.dumps(largest()))
    else:
        deep() if "--deep" in sys.argv else main()
