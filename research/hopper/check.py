"""On a Hopper GPU: are forward and backward right, do their bits repeat, and how fast are they beside cuDNN and `triton`?

PYTHONPATH=src python -m research.hopper.check right             random calls until 8 minutes are over, then 100 repetitions
PYTHONPATH=src python -m research.hopper.check speed -o FILE     rounds of all candidates, each in another order
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.testing import do_bench

import attemper
from attemper import kernels
from attemper.kernels import reference
from attemper.kernels.contract import (
    ALL_SIGNS,
    BIT,
    OUTPUT_LOW_BIT,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    bare_results,
    empty_results,
    empty_vectors,
)
from attemper.kernels.triton import row_terms as portable

from .backward import keys_kernel, rows_kernel
from .forward import forward_kernel
from .launch import backward_arguments, forward_arguments, problem_of, refusal
from .terms import packed

CORE = BIT["visible"] | BIT["peak"] | BIT["entropy"] | BIT["sum_p2"]
SIGNS = ("mean", "variance", "peak", "lse", "entropy", "sum_p2")
SMOOTH = ("mean", "variance", "lse", "entropy", "sum_p2")
"""Signs whose gradients are compared here; that of the peak goes to the arg-max, which `triton` looks for."""


def tiles(tensor: Tensor, rows: int, dim: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, dim], layout)


def forward(problem: Problem, bits: int, exact: bool = True, results: Results | None = None) -> Results:
    results = empty_results(problem, bits, as_query=True) if results is None else results
    many = torch.cuda.get_device_properties(problem.query.device).multi_processor_count
    count, args, constants = forward_arguments(problem, results, bits, many, tiles, exact)
    forward_kernel[(count,)](*args, **constants, num_warps=4)
    return results


def row_tiles(terms: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return TensorDescriptor(terms, list(terms.shape), list(terms.stride()), [1, 1, rows], layout)


class Backward:
    """A backward in its steps, so that each can be timed: numbers of rows, then two kernels."""

    def __init__(self, problem: Problem, saved: Results, upstream: Upstream) -> None:
        assert upstream.output is not None
        assert problem.value is not None
        self.problem, self.saved, self.upstream, self.g = problem, saved, upstream, upstream.output
        bits = (portable.G_OUTPUT, portable.G_MEAN, portable.G_VARIANCE, portable.G_PEAK, portable.G_LSE,
                portable.G_ENTROPY, portable.G_P2)  # fmt: skip
        self.arrived = sum(bit.value for bit, grad in zip(bits, upstream, strict=True) if grad is not None)
        self.gradients = empty_vectors(problem.query), empty_vectors(problem.key), empty_vectors(problem.value)

    def row_terms(self) -> None:
        terms, _ = portable.row_terms(self.saved, self.upstream, self.arrived, None, None)
        self.lift = portable.lift(self.problem, self.g, self.arrived, terms)
        self.terms = packed(terms, None, self.arrived, self.problem.scale)

    def kernels(self) -> tuple[Tensor, Tensor, Tensor]:
        over_keys, over_rows = backward_arguments(
            self.problem, self.g, self.terms, self.gradients, self.arrived, self.lift, tiles, row_tiles
        )
        rows_kernel[(over_keys[0],)](*over_keys[1], **over_keys[2], num_warps=4)
        keys_kernel[(over_rows[0],)](*over_rows[1], **over_rows[2], num_warps=4)
        return self.gradients

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        self.row_terms()
        return self.kernels()


def drawn(seed: int) -> Problem:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, keys = draw.choice([draw.randint(1, 700), draw.randint(1, 2600)]), draw.randint(1, 2600)
    heads = draw.choice([1, 2, 4, 8])
    groups = draw.choice([g for g in (1, 2, 4, 8) if heads % g == 0])
    dim, dtype = draw.choice([64, 128, 96, 40]), draw.choice([torch.bfloat16, torch.float16])

    def tensor(heads: int, rows: int) -> Tensor:
        if draw.random() < 0.5:
            return torch.randn(2, rows, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)
        return torch.randn(2, heads, rows, dim, device="cuda", dtype=dtype)

    query, key, value = tensor(heads, rows), tensor(groups, keys), tensor(groups, keys)
    query *= draw.choice([1, 1, 3, 10, 30, 100])
    right = draw.choice([None, 0, keys - rows])
    return problem_of(query, key, None if draw.random() < 0.3 else value, right)


def right(cases: int, minutes: float) -> int:
    until = time.monotonic() + 60 * minutes
    worst: dict[str, float] = {}
    wrong = seen = 0
    for seed in range(cases):
        if time.monotonic() > until:
            break
        problem = drawn(seed)
        assert refusal(problem) is None
        faults = forward_faults(problem, worst)
        if problem.value is not None:
            faults += backward_faults(problem, worst, seed % 2 == 1)
        seen, wrong = seen + 1, wrong + bool(faults)
        if faults:
            shapes = f"{tuple(problem.query.shape)} {tuple(problem.key.shape)} {problem.query.dtype}"
            print(f"seed {seed} {shapes} right {problem.right}: {'; '.join(faults)}", flush=True)
    shown = {name: round(x, 2) for name, x in worst.items()}
    print(f"{seen} cases, {wrong} wrong; error ÷ that of triton, worst: {shown}", flush=True)
    return wrong + repetitions()


def compare(name: str, own: Tensor, their: Tensor, true: Tensor, worst: dict[str, float], floor: float) -> list[str]:
    """Errors against float64, divided by those of `triton` on the same call; `floor` is one rounding, of the largest number."""
    there = true.isfinite()
    if not there.any():
        return []
    error, other = ((x.double() - true)[there].abs().max().item() for x in (own, their))
    least = true[there].abs().max().item() * floor + 1e-7
    worst[name] = max(worst.get(name, 0.0), error / (other + least))
    return [] if error <= 3 * (other + least) else [f"{name}: {error:.1e}, triton {other:.1e}"]


def causal_of(problem: Problem) -> Any:
    return False if problem.right is None else True if problem.right == 0 else "lower_right"


def forward_faults(problem: Problem, worst: dict[str, float]) -> list[str]:
    bits = ALL_SIGNS | (OUTPUT_LOW_BIT if problem.value is not None else 0)
    first, again, plain = forward(problem, bits), forward(problem, bits), forward(problem, 0)
    query, key, value = problem[:3]
    wide = problem._replace(query=query.double(), key=key.double())
    exact = reference.define(wide if value is None else wide._replace(value=value.double()))
    if value is None:
        theirs: Any = attemper.measure(query, key, causal=causal_of(problem), kernel="triton")
        pairs = [(name, getattr(theirs, name)) for name in SIGNS]
    else:
        attended = attemper.attention(query, key, value, causal=causal_of(problem), kernel="triton")
        pairs = [(name, getattr(attended.vitals, name)) for name in SIGNS] + [("output", attended.output)]
    faults = [name for name, one, two in zip(Results._fields, first, again, strict=True) if not torch.equal(one, two)]
    if value is not None and not torch.equal(first.output, plain.output):
        faults.append("the output depends on the signs")
    if not torch.equal(first.visible, exact.visible):
        faults.append("visible")
    for name, their in pairs:
        faults += compare(name, getattr(first, name), their, getattr(exact, name), worst, 1e-6)
    return faults


def backward_faults(problem: Problem, worst: dict[str, float], signs: bool) -> list[str]:
    """Gradients of the output, or of it and of signs, on what our own forward saved."""
    query, key, value = problem[:3]
    assert value is not None
    saved = forward(problem, ALL_SIGNS | OUTPUT_LOW_BIT)
    g = torch.randn_like(saved.output)
    arriving = {name: torch.randn_like(saved.lse) for name in SMOOTH} if signs else {}
    upstream = Upstream(g, *[arriving.get(name) for name in Upstream._fields[1:]])
    found = [grad.clone() for grad in Backward(problem, saved, upstream).run()]
    again = Backward(problem, saved, upstream).run()

    def by_autograd(leaves: list[Tensor], output: Tensor, of_signs: Any) -> tuple[Tensor, ...]:
        loss = (output * g.to(output.dtype)).sum(dtype=torch.float64)
        for name, grad in arriving.items():
            sign = getattr(of_signs, name)
            loss = loss + (sign.masked_fill(~sign.isfinite(), 0.0) * grad.to(sign.dtype)).sum(dtype=torch.float64)
        return torch.autograd.grad(loss, leaves)

    wide = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    exact = reference.define(problem._replace(query=wide[0], key=wide[1], value=wide[2]))
    assert exact.output is not None
    true = by_autograd(wide, exact.output, exact)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    attended: Any = attemper.attention(*leaves, causal=causal_of(problem), kernel="triton")
    theirs = by_autograd(leaves, attended.output, attended.vitals)
    faults, epsilon = [], torch.finfo(query.dtype).eps
    for name, own, other, their, one in zip(("dq", "dk", "dv"), found, again, theirs, true, strict=True):
        faults += [] if torch.equal(own, other) else [f"{name} does not repeat"]
        faults += compare(f"{name} of signs" if signs else name, own, their, one, worst, epsilon)
    alone = exact.visible == 1
    if not signs and found[0][alone].any():
        faults.append("a row that sees one key has a gradient")
    return faults


def repetitions() -> int:
    wrong = 0
    query, key, value = (torch.randn(2, 8, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for times in (1, 30):
        problem = problem_of(query * times, key, value, 0)
        first = forward(problem, ALL_SIGNS | OUTPUT_LOW_BIT)
        same = all(
            torch.equal(a, b)
            for _ in range(100)
            for a, b in zip(first, forward(problem, ALL_SIGNS | OUTPUT_LOW_BIT), strict=True)
        )
        g, of_signs = torch.randn_like(value), [torch.randn_like(first.lse) for _ in SMOOTH]
        for name, signs in (("", {}), (" of all signs", dict(zip(SMOOTH, of_signs, strict=True)))):
            back = Backward(problem, first, Upstream(g, *[signs.get(sign) for sign in Upstream._fields[1:]]))
            grads = [grad.clone() for grad in back.run()]
            equal = all(torch.equal(a, b) for _ in range(100) for a, b in zip(grads, back.run(), strict=True))
            print(f"logits × {times}: 100 backwards{name} are {'equal' if equal else 'NOT EQUAL'}")
            wrong += not equal
        print(f"logits × {times}: 100 forwards are {'equal' if same else 'NOT EQUAL'}")
        wrong += not same
    return wrong


def ours(problem: Problem, bits: int, exact: bool = True) -> Callable[[], Any]:
    """A call that writes into memory it keeps: what is timed is the kernel."""
    value = problem.value
    used = bare_results(problem.query, None if value is None else value.shape[3], bits, saved=True)
    none = empty_results(problem._replace(query=problem.query[:, :, :0]), bits)
    return partial(
        forward, problem, bits, exact, Results(*[b if a is None else a for a, b in zip(used, none, strict=True)])
    )


def candidates(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    problem = problem_of(query, key, value, 0 if causal else None)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    return {
        "cudnn": partial(cudnn, query, key, value, None, True, 0.0, causal, False),
        "plain": ours(problem, 0),
        "core": ours(problem, CORE),
        "all": ours(problem, ALL_SIGNS),
        "plain, exact sum": ours(problem, 0, False),
        "core, exact sum": ours(problem, CORE, False),
        "training": ours(problem, CORE | OUTPUT_LOW_BIT),
        "signs alone": ours(problem._replace(value=None), ALL_SIGNS),
        "all, every tile again": ours(problem._replace(query=query * 100), ALL_SIGNS),
        "triton, all": partial(attemper.attention, query, key, value, causal=causal, kernel="triton"),
    }


def backwards(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    problem, g = problem_of(query, key, value, 0 if causal else None), torch.randn_like(value)
    theirs = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal, False)
    output, lse, cum_q, cum_k, max_q, max_k, seed, offset = theirs[:8]
    saved = forward(problem, ALL_SIGNS | OUTPUT_LOW_BIT)
    of_output = Upstream(g, *[None] * (len(Upstream._fields) - 1))
    smooth = {name: torch.randn_like(saved.lse) for name in SMOOTH}
    plain = Backward(problem, saved, of_output)
    of_signs = Backward(problem, saved, Upstream(g, *[smooth.get(name) for name in Upstream._fields[1:]]))
    plain.row_terms()
    return {
        "cudnn": partial(
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward, g, query, key, value, output, lse, seed, offset,
            None, cum_q, cum_k, max_q, max_k, 0.0, causal,
        ),
        "backward": plain.run,
        "backward, its kernels": plain.kernels,
        "backward of signs": of_signs.run,
        "triton, backward": partial(
            kernels.load("triton").backward, problem, saved, of_output, NeedsGrad(True, True, True, False, False)
        ),
    }  # fmt: skip


def speed(rounds: int, where: Path | None) -> int:
    cells = [(16384 // n, 2048 // d, n, d) for d in (128, 64) for n in (1024, 4096, 16384)]
    rows = []
    for what, (batch, heads, n, d), causal in itertools.product((candidates, backwards), cells, (False, True)):
        query, key, value = (torch.randn(batch, heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        runs = what(query, key, value, causal)
        times: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(do_bench(runs[name], warmup=8, rep=40, return_mode="median"))
        ratios = {}
        for name in names:
            ratios[name] = statistics.median(
                theirs / own for own, theirs in zip(times[name], times["cudnn"], strict=True)
            )
        cell = {"B": batch, "H": heads, "n": n, "d": d, "causal": causal, "of": what.__name__}
        rows.append(cell | {"ms": times, "speed": ratios})
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"d {d} n {n} {'causal' if causal else 'full'}: {shown}", flush=True)
        if where is not None:
            where.write_text(
                json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows})
            )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("right", "speed"))
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", type=Path)
    given = parser.parse_args()
    return right(given.cases, given.minutes) if given.what == "right" else speed(given.rounds, given.o)


if __name__ == "__main__":
    sys.exit(main())
