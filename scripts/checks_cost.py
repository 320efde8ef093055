"""What the checks of a scan cost: its time with and without them, and the memory of --deep, on this machine.

`OMP_NUM_THREADS=1 python scripts/checks_cost.py` prints a line for the embedded model on a short and a long text, and for a
hand-written model; then the passes, the time and the memory of --deep at 2,048 tokens.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper import _memory
from attemper.demo import embedded
from attemper.scan.checks.examiner import AttentionChecks
from attemper.watch.trace.trace import Trace

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

    return _memory.rise(run, "cpu")[0]


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
    ids = torch.arange(2048)[None] % 997
    for fused in (True, False):
        deep = ByHand(fused)
        bytes_before = rise(lambda deep=deep: attemper.scan(deep, ids, pictures=False))
        bytes_deep = rise(lambda deep=deep: attemper.scan(deep, ids, pictures=False, deep=True))
        how = "SDPA" if fused else "by hand"
        print(
            f"{how}, 2,048 tokens: {bytes_before / 2**20:.0f} MiB for a scan, {bytes_deep / 2**20:.0f} MiB with --deep"
        )


if __name__ == "__main__":
    main()
