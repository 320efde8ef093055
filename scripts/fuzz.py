"""Random calls of the native kernel against the definition in float64: shapes, strides, masks, dtypes, variants and threads.

    python scripts/fuzz.py --cases 10000 --seed 0

Every case is drawn from its own number, so a case that fails is run again with `--seed N --cases 1`. Workspaces are filled
with NaN. float64 cases are held to about 1e-9 of the largest entry, the others to what their dtype explains many times over:
this looks for wrong code, and tests/kernels looks for lost digits. Some cases have logits to ±1e4, an inf or NaN somewhere,
dropout (the coins are read off with an identity for values), or keys enough to be split in decode. Every backward runs twice,
and must give the same bits; so must `measure` and `attention`.
"""

import argparse
import math
import random
import sys
import time

import torch

import attemper
from attemper.kernels.cpu import native
from attemper.kernels.reference import define
from attemper.operation.call import prepare

HIDDEN = -16384.0  # the way people write a mask, exact in every dtype
SIGNS = ("mean", "variance", "peak", "lse", "entropy", "sum_p2")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def layout(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with other strides: permuted, sliced, offset, expanded or as they are."""
    kind = rng.choice(["plain", "permuted", "sliced", "offset", "expanded", "backwards"])
    if kind == "permuted":
        order = rng.sample(range(4), 4)
        return tensor.permute(order).contiguous().permute([order.index(d) for d in range(4)])
    if kind == "sliced":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan, dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if kind == "offset":
        flat = torch.full((tensor.numel() + 3,), math.nan, dtype=tensor.dtype)
        flat[3:] = tensor.flatten()
        return flat[3:].view(tensor.shape)
    if kind == "expanded":
        dim = rng.randrange(4)
        return tensor.narrow(dim, 0, 1).expand(tensor.shape) if tensor.shape[dim] else tensor
    if kind == "backwards":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return tensor


def draw(seed: int) -> tuple[list[torch.Tensor], dict, dict]:
    """Query, key and value; the options of the call; how to run it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(list(TOLERANCE))
    groups, repeat = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 4])
    few, some, many, split = rng.randint(1, 9), rng.randint(1, 70), rng.randint(1, 900), rng.randint(1024, 5000)
    shapes = [(some, some), (few, many), (some, many), (many, some), (few, few), (1, many), (1, split), (few, split)]
    rows, keys = rng.choice(shapes)
    dim = rng.choice([1, 3, 8, 17, 32, 64, 65, 128, 130, 300])
    value_dim = rng.choice([1, 4, 16, 31, 32, 64, 100, 257])
    batch, heads, size = rng.choice([1, 1, 2, 3]), groups * repeat, rng.choice([0.2, 1.0, 1.0, 4.0])
    shapes = [(batch, heads, rows, dim), (batch, groups, keys, dim), (batch, groups, keys, value_dim)]
    inputs = [layout(rng, (torch.randn(shape, dtype=torch.float64) * size).to(dtype)) for shape in shapes]
    poison = rng.choice([None] * 36 + [(which, x) for which in (0, 1, 2) for x in (math.nan, math.inf, -math.inf)])
    if poison:
        which, x = poison
        inputs[which] = inputs[which].clone(memory_format=torch.contiguous_format)
        inputs[which].view(-1)[rng.randrange(inputs[which].numel())] = x
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    options: dict = {"causal": rng.choice([False, True, "lower_right"])}
    options["window"] = rng.choice([None, None, rng.randint(1, keys + 3)])
    options["softcap"] = rng.choice([None, None, 2.0])
    if rng.random() < 0.5:
        shape = [n if rng.random() < 0.6 else 1 for n in (batch, heads, rows, keys)]
        noise = torch.randn(shape, dtype=torch.float64)
        if rng.random() < 0.5:
            options["mask"] = layout(rng, noise > rng.choice([-2.0, 0.0, 1.5]))
        else:
            noise[torch.rand(shape) < 0.1] = -math.inf
            noise[torch.rand(shape) < 0.05] = HIDDEN
            kind = rng.choice([dtype, torch.float32])
            options["mask"] = layout(rng, noise.to(kind)).detach().requires_grad_(rng.random() < 0.7)
    if rng.random() < 0.3:
        shape = rng.choice([(), (heads,), (batch, heads, rows, 1), (1, heads, 1, 1)])
        options["scale"] = torch.rand(shape, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    elif rng.random() < 0.15 and not poison:
        options["scale"] = 1e4 / (1 + (longest(inputs[0]) * longest(inputs[1])))
    if rng.random() < 0.2:
        options["documents"] = offsets(rng, batch, rows), offsets(rng, batch, keys)
    if rng.random() < 0.2:
        options["sink"] = (torch.randn(heads) * size).requires_grad_()
    run = {
        "variant": rng.randrange(native.VARIANTS.index(native.variant) + 1),
        "threads": rng.choice([1, 1, 2, 3]),
        "signs": rng.choice(["all", "all", "all", (), rng.sample(SIGNS, 2)]),
        "losses": rng.sample(("output", *SIGNS), rng.randint(1, 4)),
        "dropout": rng.choice([0.0, 0.0, 0.0, 0.4]) if keys < 1000 else 0.0,
        "poison": poison,
    }
    return inputs, options, run


def offsets(rng: random.Random, batch: int, length: int) -> torch.Tensor:
    """Of four documents, some of which may be empty, for each item of a batch."""
    return torch.tensor([[0, *sorted(rng.randint(0, length) for _ in range(3)), length] for _ in range(batch)])


def longest(tensor: torch.Tensor) -> float:
    return tensor.detach().double().norm(dim=-1).max().item()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, with every NaN the same."""
    return torch.equal(a.nan_to_num(nan=7.0, posinf=8e4, neginf=-8e4), b.nan_to_num(nan=7.0, posinf=8e4, neginf=-8e4))


def coins(inputs: list[torch.Tensor], options: dict, dropout: float) -> torch.Tensor:
    """What dropout does to each weight, 0 or 1 / (1 - p), for the random state of now."""
    keys, wide = inputs[1].shape[2], torch.promote_types(inputs[0].dtype, torch.float32)
    query, key = (tensor.detach().to(wide) for tensor in inputs[:2])
    eye = torch.eye(keys, dtype=wide).expand(*key.shape[:2], keys, keys)
    kept = attemper.attention(query, key, eye, **options, dropout=dropout, signs=(), kernel="cpu").output != 0
    return kept.double() / (1 - dropout)


def compare(name: str, actual: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == exact.shape, f"{name}: shape"
    finite = exact.isfinite()
    if name in ("peak", "lse"):  # of a row that holds +inf and NaN both, cpu says inf (docs/design.md §3)
        exact = exact.masked_fill(exact.isnan() & (actual == math.inf), math.inf)
    assert same(actual[~finite].double(), exact[~finite]), f"{name}: infinities"
    finite &= exact.abs() < torch.finfo(actual.dtype).max / 2  # a gradient may be too large for float16
    if finite.any():
        error = (actual.double() - exact)[finite].abs().max().item()
        size = 1 + exact[finite].abs().max().item()
        assert error <= tolerance * size, f"{name}: error {error:.2e} at size {size:.2e}"


def check(seed: int) -> None:
    inputs, options, how = draw(seed)
    native.configure(variant=how["variant"])
    torch.set_num_threads(how["threads"])
    leaves = [*inputs, *(t for t in options.values() if isinstance(t, torch.Tensor) and t.requires_grad)]
    wide_of = {id(t): t.detach().double().requires_grad_() for t in leaves}
    wide = {n: wide_of.get(id(t), t) for n, t in options.items()}
    problem = prepare("fuzz", *(wide_of[id(t)] for t in inputs), **wide).problem
    exact = define(problem)._asdict()
    # a logit's rounding is as large as the logit, and a row may have nothing but keys that a large negative hides
    gain = 1.0 if problem.gain is None else problem.gain.detach().abs().max().item()
    reach = max(longest(t.nan_to_num(posinf=0, neginf=0)) for t in inputs[:2]) ** 2 * max(
        abs(problem.scale) * gain / 8, 1 / 64
    )
    tolerance = TOLERANCE[inputs[0].dtype] * (1 + reach)
    if "mask" in options and bool((options["mask"] == HIDDEN).any()):
        tolerance *= 50
    torch.manual_seed(seed)
    if how["dropout"]:
        value = problem.value.repeat_interleave(problem.query.shape[1] // problem.value.shape[1], dim=1)
        exact["output"] = (exact["weights"] * coins(inputs, options, how["dropout"])) @ value
        torch.manual_seed(seed)
    output, vitals = attemper.attention(*inputs, **options, dropout=how["dropout"], signs=how["signs"], kernel="cpu")
    if vitals.measured:
        alone = attemper.measure(*inputs[:2], **options, signs=how["signs"], kernel="cpu")
        for name in vitals.measured:
            assert same(getattr(alone, name), getattr(vitals, name)), f"{name}: measure() and attention() differ"
    found = {"output": output, **{name: getattr(vitals, name) for name in vitals.measured}}
    for name, sign in found.items():
        if name == "visible":
            assert torch.equal(sign, exact[name]), "visible"
        elif name == "output" and how["poison"] and how["poison"][0] == 2:
            # 0 · NaN: which rows outside of the band, or with a weight of 1e-40, a value reaches is each kernel's own
            assert sign[exact[name].isfinite()].isfinite().all(), "output: a value reaches rows it should not"
        elif name != "variance" or not (how["poison"] and "sink" in options):  # merging loses which logits are -inf
            compare(name, sign, exact[name].detach(), tolerance)
    if how["poison"]:
        return
    losses = [name for name in how["losses"] if name in found and found[name].requires_grad]
    if not losses:
        return
    total, total64 = 0.0, 0.0
    for name in losses:
        cotangent = torch.randn(exact[name].shape, dtype=torch.float64)
        if name == "peak":  # whose arg-max is clear
            top = exact["weights"].detach().topk(min(2, exact["weights"].shape[-1])).values
            cotangent = cotangent * ((top[..., 0] - top[..., -1] > 0.1) | (top.shape[-1] == 1))
        held = exact[name].masked_fill(~exact[name].isfinite(), 0.0)
        total64 = total64 + (held * cotangent).sum()
        ours = found[name].masked_fill(~found[name].isfinite(), 0.0)
        total = total + (ours * cotangent.to(ours.dtype)).sum()
    ours = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    again = torch.autograd.grad(total, leaves, allow_unused=True)
    for a, b in zip(ours, again, strict=True):
        assert a is None or same(a, b), "a second backward gives other bits"
    theirs = torch.autograd.grad(total64, [wide_of[id(t)] for t in leaves], allow_unused=True)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is not None and b is not None:
            # a mask or scale gathers the roundings of many rows, and may be float32 beside float64 inputs
            slack = 4 * tolerance if number < 3 else max(100 * tolerance, 1e-6)
            compare(f"gradient {number} of {'+'.join(losses)}", a, b, slack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    asked = parser.parse_args()
    native.configure(poison=1)
    failures, started = 0, time.monotonic()
    for seed in range(asked.seed, asked.seed + asked.cases):
        try:
            check(seed)
        except AssertionError as error:
            failures += 1
            print(f"case {seed}: {error}", flush=True)
    print(f"{asked.cases} cases, {failures} failures, {time.monotonic() - started:.0f} s, up to {native.variant}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
