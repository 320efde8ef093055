"""Random calls of every kernel against a second definition, written here from the formulas; it shares no code with the package.

    python scripts/fuzz_independent.py --cases 5000 --seed 0
    python scripts/fuzz_independent.py --cases 2000 --device cuda --jobs 14

`scripts/fuzz.py` compares with `kernels/reference.py`; a mistake there, or in the checks before it, would pass. Here attention is
a loop over heads, bands are made entry by entry, and PyTorch differentiates. In float64 it is exact; in float32 it
shows how much error is usual. For half precision torch's math backend does, where it knows the call; for other gradients, the
definition with weights and the gradient of the scores rounded, as a product of half-precision tensors needs them. A value fails
when its error exceeds FACTOR times the usual one (1.5 in half precision) plus what rounding every term of its sums explains.
Among the masks are biases (ALiBi, relative positions, columns like sinks, keys hidden by numbers), and masks of other classes:
CausalBias, parameters, a class that overrides nothing, and one that answers for torch, which must be refused.
Each case is drawn from its number: `--seed N --cases 1` runs one again. On a GPU the choices that a kernel is compiled for,
layouts among them, are the same for ALIKE cases in a row, which differ in lengths, numbers, windows and masks.
"""

import argparse
import math
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

import attemper
from attemper.errors import InputError

FACTOR, HALF_FACTOR = 3.0, 1.5
SIGNS = ("visible", "mean", "variance", "peak", "lse", "entropy", "sum_p2")
HIDES = -1e4
ALIKE = 50


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, mask: Tensor | None, sink: Tensor | None, case: dict
) -> dict[str, Tensor]:
    """Output and signs, head by head, in the dtype of q."""
    batch, heads, rows, _ = q.shape
    keys, share = k.shape[2], heads // k.shape[1]
    found: dict[str, list[Tensor]] = {name: [] for name in ("output", *SIGNS, "gap", "p", "p of sink", "z", "counted")}
    for b in range(batch):
        for h in range(heads):
            z = (q[b, h] @ k[b, h // share].T) * scale.expand(batch, heads, rows, 1)[b, h]
            rounds = case.get("rounds")
            if rounds:
                z.register_hook(lambda g, rounds=rounds: g.to(rounds).to(g.dtype))
            if case["softcap"]:
                z = case["softcap"] * torch.tanh(z / case["softcap"])
            usable = inside(rows, keys, case)[min(b, len(case["documents"]) - 1)]
            counted = usable
            if mask is not None:
                own = mask.expand(batch, heads, rows, keys)[b, h]
                if own.dtype == torch.bool:
                    usable = counted = usable & own
                else:
                    z, counted = z + own.to(z.dtype), usable & (own > HIDES)
                    usable = usable & (own != -math.inf)
            for name, value in one_head(
                z, v[b, h // share], usable, counted & usable, rounds, None if sink is None else sink[h]
            ).items():
                found[name].append(value)
    return {name: torch.stack(parts).reshape(batch, heads, *parts[0].shape) for name, parts in found.items()}


def inside(rows: int, keys: int, case: dict) -> Tensor:
    """Which keys the documents and the band leave to each row, (items, Lq, Lk)."""
    found = torch.zeros(len(case["documents"]), rows, keys, dtype=torch.bool)
    for own, (of_rows, of_keys) in zip(found, case["documents"], strict=True):
        for (first, last), (start, stop) in zip(pairwise(of_rows), pairwise(of_keys), strict=True):
            own[first:last, start:stop] = band(last - first, stop - start, case["causal"], case["window"])
    return found


def band(rows: int, keys: int, causal: bool | str, window: int | None) -> Tensor:
    allowed = torch.zeros(rows, keys, dtype=torch.bool)
    for i in range(rows):
        place = i + (keys - rows if causal == "lower_right" else 0)
        first = 0 if window is None else max(0, place - window + 1)
        last = keys - 1
        if causal:
            last = place
        elif window is not None:
            last = place + window - 1
        if last >= first:
            allowed[i, first : min(last, keys - 1) + 1] = True
    return allowed


def one_head(
    z: Tensor, v: Tensor, usable: Tensor, counted: Tensor, rounds: torch.dtype | None, sink: Tensor | None
) -> dict[str, Tensor]:
    keys, any_key = z.shape[-1], usable.any(-1)
    if sink is not None:  # a key with the value 0, which every row sees
        z, v = torch.cat((z, sink.expand(len(z), 1)), -1), torch.cat((v, torch.zeros_like(v[:1])))
        usable, counted = (torch.nn.functional.pad(one, (0, 1), value=True) for one in (usable, counted))
    some = usable.any(-1, keepdim=True)
    filled = torch.where(usable, z, torch.full_like(z, -math.inf))
    filled = torch.where(some, filled, torch.zeros_like(z))
    top = filled.detach().amax(-1, keepdim=True) if z.shape[-1] else z.new_zeros(len(z), 1)
    e = torch.exp(filled - top) * usable
    total = torch.where(some, e.sum(-1, keepdim=True), torch.ones_like(top))
    p = e / total
    log_p = torch.where(usable, filled - top, torch.zeros_like(z)) - total.log()
    n = counted.sum(-1)
    clean = torch.where(counted, z, torch.zeros_like(z))
    mean = clean.sum(-1) / n.clamp(min=1)
    spread = torch.where(counted, z - mean.unsqueeze(-1), torch.zeros_like(z)).square().sum(-1) / n.clamp(min=1)
    nothing = torch.full_like(mean, -math.inf)
    of_keys = filled[:, :keys]  # a sink is no peak
    best = of_keys.topk(min(2, keys)).values if keys else top
    return {
        "output": (p + (p.to(rounds).to(p) - p).detach() if rounds else p) @ v,
        "visible": n.to(torch.int32),
        "mean": mean,
        "variance": spread,
        "peak": torch.where(any_key, of_keys.gather(-1, of_keys.argmax(-1, keepdim=True))[:, 0], nothing),
        "lse": torch.where(some[:, 0], (top + total.log())[:, 0], nothing),
        "entropy": -(p * torch.where(p > 0, log_p, torch.zeros_like(p))).sum(-1),
        "sum_p2": p.square().sum(-1),
        "gap": (best[:, 0] - best[:, -1]).detach() if best.shape[-1] > 1 else torch.ones_like(mean),
        "p": p.detach()[:, :keys],
        "p of sink": p.detach()[:, keys:].sum(-1),
        "z": torch.where(usable, z, torch.zeros_like(z)).detach()[:, :keys],
        "counted": counted[:, :keys],
    }


def draw(seed: int, device: str) -> dict:
    torch.manual_seed(seed)
    rng = random.Random(f"anew {seed}")
    kind = random.Random(f"kind {seed if device == 'cpu' else seed // ALIKE}")  # what a kernel is compiled for
    wide = [torch.float64] if device == "cpu" else []
    dtype = kind.choice([*wide, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16])
    rows, keys = rng.choice(
        [(5, 5), (33, 33), (1, 70), (8, 300), (9, 300), (70, 20), (130, 130), (3, 1100), (17, 600), (200, 260), (40, 1)]
    )
    rows, keys = max(1, rows - rng.randrange(4)), max(1, keys - rng.randrange(9))
    if device == "cuda":  # a kernel is compiled for strides that are multiples of 16, and for others
        rows, keys = (-(-n // 16) * 16 for n in (rows, keys)) if kind.random() < 0.3 else (rows | 1, keys | 1)
    groups, repeat, batch = kind.choice([1, 2]), kind.choice([1, 1, 3]), kind.choice([1, 2])
    dim, value_dim = kind.choice([1, 5, 16, 32, 60, 64, 128]), kind.choice([1, 7, 16, 32, 64, 96])
    heads = groups * repeat
    common = rng.choice(
        [0.0, 0.0, 3.0]
    )  # what all keys and values share: it cancels in exact gradients, and in rounded ones does not
    size = rng.choice([0.3, 1.0, 1.0, 3.0])
    q = torch.randn(batch, heads, rows, dim, dtype=torch.float64) * size
    k = torch.randn(batch, groups, keys, dim, dtype=torch.float64) * size + common * torch.randn(
        dim, dtype=torch.float64
    )
    v = torch.randn(batch, groups, keys, value_dim, dtype=torch.float64) + common * torch.randn(
        value_dim, dtype=torch.float64
    )
    windowed, scaled, masked = kind.random() < 0.33, kind.random() < 0.35, kind.choice([None, None, "hides", "adds"])
    case = {
        "seed": seed,
        "device": device,
        "tensors": [laid_out(kind, t.to(dtype)) for t in (q, k, v)],
        "causal": kind.choice([False, False, True, "lower_right"]),
        "window": rng.randint(1, keys + 2) if windowed else None,
        "softcap": kind.choice([None, None, None, 3.0, 30.0]),
        "scale": None,
        "mask": None,
        "kernel": "triton" if device == "cuda" else rng.choice(["cpu", "cpu", "blockwise"]),
        "variant": rng.random(),
        "threads": rng.choice([1, 2, 3]),
        "losses": kind.sample(("output", "output", *SIGNS[1:]), kind.randint(1, 3)),
        "signs": kind.choice(["all", "all", ("entropy", "peak"), ()]),
    }
    if scaled:
        shape = kind.choice([(), (heads,), (batch, heads, rows, 1)])
        case["scale"] = torch.rand(shape, dtype=torch.promote_types(dtype, torch.float32)) / math.sqrt(dim) + 0.05
    if masked:
        shape = [n if kind.random() < 0.6 else 1 for n in (batch, heads, rows, keys)]
        noise = torch.randn(shape, dtype=torch.float64)
        if masked == "hides":
            case["mask"] = noise > rng.choice([-1.0, 1.0])
        else:
            noise[torch.rand(shape) < 0.15] = rng.choice([-math.inf, -1e9 if dtype != torch.float16 else -6e4, -2e4])
            case["mask"] = noise.to(dtype)
    return packed(dressed(case, random.Random(f"given {seed}"), (batch, heads, rows, keys)), (batch, heads, rows, keys))


def packed(case: dict, full: tuple[int, int, int, int]) -> dict:
    """Some cases with documents, the same for every item or others, and some with sinks."""
    (batch, heads, rows, keys), rng = full, random.Random(f"packed {case['seed']}")
    items = rng.choice([1, batch])

    inner = rng.choice([1, 2, 5])

    def offsets(length: int) -> list[int]:
        return [0, *sorted(rng.randint(0, length) for _ in range(inner)), length]

    alone = case.get("given") is not None or rng.random() < 0.75
    case["documents"] = [([0, rows], [0, keys])] if alone else [(offsets(rows), offsets(keys)) for _ in range(items)]
    case["packed"] = not alone
    case["sink"] = torch.randn(heads) * rng.choice([0.5, 3.0]) if rng.random() < 0.2 else None
    return case


def dressed(case: dict, rng: random.Random, full: tuple[int, int, int, int]) -> dict:
    """Every third case with a bias that models add, or a mask of another class; `given` is what attention() gets for it."""
    asked = rng.choice([*[None] * 6, "alibi", "relative", "columns"])
    (_, heads, rows, keys), dtype = full, case["tensors"][0].dtype
    if asked is not None and case["mask"] is None:
        case["mask"] = bias_of(asked, rng, heads, rows, keys).to(dtype)
    if case["mask"] is None:
        if rng.random() < 0.2 and not (
            case["causal"] == "lower_right" and rows == keys
        ):  # torch: then top left, the same
            make = {False: None, True: causal_upper_left, "lower_right": causal_lower_right}[case["causal"]]
            case["given"] = None if make is None else make(rows, keys)
    elif rng.random() < 0.3:
        case["as"] = rng.choice([torch.nn.Parameter, Inherits, Refused])
    return case


def bias_of(kind: str, rng: random.Random, heads: int, rows: int, keys: int) -> Tensor:
    """A bias by distance or by position, one by head and distance, or one of a few columns; some keys are hidden by a number."""
    i, j = torch.arange(rows, dtype=torch.float64)[:, None], torch.arange(keys, dtype=torch.float64)
    slope = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64).reshape(1, -1, 1, 1)
    if kind == "alibi":
        bias = slope * (j - i if rng.random() < 0.5 else j.expand(rows, keys))
    elif kind == "relative":
        table = torch.randn(1, heads, 32, dtype=torch.float64)
        bias = table[..., (j - i).long().clamp(-16, 15) + 16]
    else:
        bias = torch.zeros(1, 1, 1, keys, dtype=torch.float64)
        bias[..., : rng.choice([1, 4])] = rng.choice([2.0, 12.0, -3.0])
    bias = bias.clone()
    hidden = rng.choice([None, -1e4, -3e4, -math.inf, torch.finfo(torch.float16).min])
    if hidden is not None:
        bias[..., torch.rand(bias.shape[-1]) < 0.2] = hidden
    return bias


class Inherits(torch.Tensor):
    """A class that overrides nothing."""


class Refused(torch.Tensor):
    """A class that answers for torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def laid_out(kinds: random.Random, tensor: Tensor) -> Tensor:
    """The same numbers in layouts that models use: (B, L, H, E) transposed, (B, H, E, L) turned, a slice of a cache."""
    kind = kinds.choice(["plain", "plain", "heads last", "turned", "cache"])
    if kind == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "turned":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    if kind == "cache":
        batch, heads, length, dim = tensor.shape
        cache = torch.full((batch, heads, length + 32, dim), math.nan, dtype=tensor.dtype)
        cache[:, :, 2 : 2 + length] = tensor
        return cache[:, :, 2 : 2 + length]
    return tensor


def on_device(tensor: Tensor, device: str) -> Tensor:
    """A copy with the same strides, in memory that holds NaN everywhere else."""
    if device == "cpu":
        return tensor
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    fill = False if tensor.dtype == torch.bool else math.nan
    memory = torch.full((size,), fill, dtype=tensor.dtype, device=device)
    return memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def leaves_of(case: dict, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a case that have gradients, as they are or in another dtype."""
    named = dict(zip("qkv", case["tensors"], strict=True)) | {name: case[name] for name in ("scale", "mask", "sink")}
    held = {n: t for n, t in named.items() if t is not None and t.is_floating_point()}
    return {n: (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_() for n, t in held.items()}


def defined(case: dict, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    leaves = leaves_of(case, dtype)
    scale = leaves.get("scale", torch.tensor(1 / math.sqrt(leaves["q"].shape[-1]), dtype=dtype))
    if scale.dim() == 1:
        scale = scale.reshape(1, -1, 1, 1)
    mask = leaves.get("mask", case["mask"])
    return leaves, attend(leaves["q"], leaves["k"], leaves["v"], scale, mask, leaves.get("sink"), case)


def measured(case: dict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    device = case["device"]
    leaves = leaves_of(case, None)
    if device == "cpu":
        from attemper.kernels.cpu import native

        # as many draws on every machine
        native.configure(variant=int(case["variant"] * (native.VARIANTS.index(native.variant) + 1)))
        torch.set_num_threads(case["threads"])
    else:
        leaves = {name: on_device(leaf.detach(), device).requires_grad_() for name, leaf in leaves.items()}
    options = {name: case[name] for name in ("causal", "window", "softcap", "kernel", "signs")}
    mask = None if case["mask"] is None else leaves.get("mask", on_device(case["mask"], device))
    like = case.get("as")
    if like is torch.nn.Parameter:
        mask = like(mask.detach(), requires_grad=mask.is_floating_point())
        leaves |= {"mask": mask} if mask.is_floating_point() else {}
    elif like is not None:
        mask = mask.as_subclass(like)
    if like is Refused:
        if not refuses(lambda: attemper.attention(*(leaves[n] for n in "qkv"), mask=mask)):
            raise RuntimeError(f"case {case['seed']}: a mask of a class that answers for torch was read")
        mask = leaves.get("mask", on_device(case["mask"], device))
    if case["packed"]:
        options["documents"] = tuple(torch.tensor(each, device=device) for each in zip(*case["documents"], strict=True))
    if case["sink"] is not None:
        options["sink"] = leaves["sink"]
    if case.get("given") is not None:
        mask, options["causal"] = case["given"], False
    output, vitals = attemper.attention(*(leaves[n] for n in "qkv"), mask=mask, scale=leaves.get("scale"), **options)
    return leaves, {"output": output} | {name: getattr(vitals, name) for name in vitals.measured}


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except InputError as error:
        return "must hold its values itself" in str(error)
    return False


def by_math(case: dict) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """torch's math backend in the inputs' dtype, where torch's SDPA knows the call."""
    if (
        case["scale"] is not None
        or case["sink"] is not None
        or case["softcap"]
        or case["tensors"][0].dtype not in (torch.bfloat16, torch.float16)
    ):
        return None
    leaves = leaves_of(case, None)
    rows, keys = leaves["q"].shape[2], leaves["k"].shape[2]
    seen, mask = inside(rows, keys, case).unsqueeze(1), leaves.get("mask", case["mask"])
    if not seen.all():
        added = mask is not None and mask.dtype != torch.bool
        mask = mask.masked_fill(~seen, -math.inf) if added else seen if mask is None else mask & seen
    with sdpa_kernel(SDPBackend.MATH):
        output = scaled_dot_product_attention(*(leaves[n] for n in "qkv"), attn_mask=mask, enable_gqa=True)
    return leaves, {"output": output}


def gradients(leaves: dict, results: dict, cotangents: dict[str, Tensor]) -> dict[str, Tensor | None]:
    loss = sum(
        (torch.where(results[n].isfinite(), results[n], torch.zeros_like(results[n])) * g.to(results[n])).sum()
        for n, g in cotangents.items()
    )
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))


def scale_of(case: dict) -> Tensor | float:
    if case["scale"] is None:
        return 1 / math.sqrt(case["tensors"][0].shape[-1])
    scale = case["scale"].detach().double().abs()
    return scale.reshape(1, -1, 1, 1) if scale.dim() == 1 else scale


def score_terms(case: dict) -> Tensor:
    """Σ |scale · q_e k_e| behind every score: its rounding is that many epsilons."""
    q, k = (t.detach().double().abs() for t in case["tensors"][:2])
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale_of(case)


def terms(case: dict, exact: dict[str, Tensor], cotangents: dict[str, Tensor]) -> dict[str, float]:
    """The largest sum of absolute terms behind an entry of each gradient: its rounding is that many epsilons."""
    q, k, v = (t.detach().double() for t in case["tensors"])
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    p, z, n = exact["p"], exact["z"], exact["visible"].double().clamp(min=1).unsqueeze(-1)
    g = {name: cotangents[name].abs() if name in cotangents else torch.zeros(1) for name in ("output", *SIGNS)}
    row = {name: g[name].unsqueeze(-1) if name in cotangents else torch.zeros(1) for name in SIGNS}
    sign = {name: exact[name].detach().nan_to_num(neginf=0).abs().unsqueeze(-1) for name in SIGNS}
    dz = p * (
        row["lse"]
        + row["entropy"] * (z.abs() + sign["lse"] + sign["entropy"])
        + 2 * row["sum_p2"] * (p + sign["sum_p2"])
    )
    if "output" in cotangents:
        dz = dz + p * (g["output"] @ v.abs().mT + (g["output"] * exact["output"].detach().abs()).sum(-1, keepdim=True))
    dz = (
        dz + exact["counted"] * (row["mean"] + 2 * row["variance"] * (z.abs() + sign["mean"])) / n + p * 2 * row["peak"]
    )
    factor, long = scale_of(case), score_terms(case)  # the rounding of a score goes through exp into the weight
    through = dz * (1 + long + sign["lse"])
    found = {
        "q": through @ k.abs() * factor,
        "k": through.mT @ (q.abs() * factor),
        "v": (p * (1 + long + sign["lse"])).mT @ g["output"] if "output" in cotangents else torch.zeros(1),
        "scale": (through * (q.abs() @ k.abs().mT)),
        "mask": through,
    }
    if case["sink"] is not None:
        s, of_sink = case["sink"].double().abs().reshape(1, -1, 1, 1), exact["p of sink"].unsqueeze(-1)
        dz = (
            row["lse"]
            + row["entropy"] * (s + sign["lse"] + sign["entropy"])
            + 2 * row["sum_p2"] * (of_sink + sign["sum_p2"])
        )
        if "output" in cotangents:
            dz = dz + (g["output"] * exact["output"].detach().abs()).sum(-1, keepdim=True)
        dz = of_sink * dz + (row["mean"] + 2 * row["variance"] * (s + sign["mean"])) / n
        found["sink"] = (dz * (1 + long.amax(-1, keepdim=True) + s + sign["lse"])).sum((0, 2)) * math.sqrt(
            dz[:, 0].numel()
        )
    sums = {"scale": case["scale"], "mask": case["mask"]}
    for name, tensor in sums.items():
        if tensor is not None:
            shape = (1, -1, 1, 1) if tensor.dim() == 1 else tensor.shape or (1, 1, 1, 1)
            terms_of = found[name].numel() / max(tensor.numel(), 1)
            found[name] = found[name].sum_to_size(tensor.reshape(shape).shape) * math.sqrt(terms_of)
    gathered = found["k"].unflatten(1, (-1, share)).sum(2)
    return {name: m.max().item() for name, m in (found | {"k": gathered}).items()}


def error(actual: Tensor, exact: Tensor) -> float:
    good = exact.isfinite()
    return (actual.double() - exact)[good].abs().max().item() if good.any() else 0.0


def check(seed: int, worst: dict[str, tuple[float, int]], device: str) -> list[str]:
    case = draw(seed, device)
    dtype = case["tensors"][0].dtype
    exact_leaves, exact = defined(case, torch.float64)
    plain_leaves, plain = defined(case, torch.float32)
    leaves, found = measured(case)
    math_run = by_math(case)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shrink = 1.0 if wide == torch.float32 else 2.0**-29  # the ratio of the two epsilons
    failures = []

    def hold(name: str, actual: Tensor, truth: Tensor, usual: Tensor, backend: Tensor | None, mass: float) -> None:
        if not torch.equal(actual[~truth.isfinite()].double().nan_to_num(7), truth[~truth.isfinite()].nan_to_num(7)):
            failures.append(f"{name}: infinities")
            return
        own, largest = (
            error(actual, truth),
            truth[truth.isfinite()].abs().max().item() if truth.isfinite().any() else 0.0,
        )
        kind = torch.finfo(actual.dtype)
        budget = (
            kind.eps * (largest / 2 + kind.tiny) + torch.finfo(wide).eps * mass
        )  # eps · tiny: what no number is below
        budget += FACTOR * error(usual, truth) * shrink
        if backend is not None:
            budget += HALF_FACTOR * error(backend, truth)
        what = f"{str(dtype)[6:]} {name}{' beside half' if backend is not None else ''}"
        worst[what] = max(worst.get(what, (0.0, 0)), (own / max(budget, 1e-300), seed))
        if not own <= budget:
            failures.append(f"{name}: error {own:.2e} exceeds {budget:.2e} ({case['kernel']}, {str(dtype)[6:]})")

    logits, value_size = (
        max(exact["z"].abs().max(), score_terms(case).max()).item(),
        case["tensors"][2].double().abs().max().item(),
    )
    for name, value in found.items():
        if name == "visible":
            if not torch.equal(value.cpu(), exact[name]):
                failures.append("visible")
            continue
        backend = math_run[1]["output"].detach() if math_run and name == "output" else None
        sizes = {
            "output": value_size * (1 + logits),
            "variance": logits**2,
            "entropy": 1 + logits,
            "sum_p2": 1 + logits,
        }
        hold(name, value.detach().cpu(), exact[name].detach(), plain[name].detach(), backend, sizes.get(name, logits))

    losses = [name for name in dict.fromkeys(case["losses"]) if name in found and found[name].requires_grad]
    if not losses:
        return failures
    cotangents = {
        name: torch.randn_like(exact[name]).to(dtype if name == "output" else wide).double() for name in losses
    }
    if "peak" in cotangents:
        cotangents["peak"] *= exact["gap"] > 1e-3  # elsewhere rounding names the arg-max
    truth, usual = gradients(exact_leaves, exact, cotangents), gradients(plain_leaves, plain, cotangents)
    backend = gradients(*math_run, cotangents) if math_run and losses == ["output"] else {}
    if dtype in (torch.bfloat16, torch.float16) and not backend:
        backend = gradients(*defined(case | {"rounds": dtype}, torch.float64), cotangents)
    mass = terms(case, exact, cotangents)
    for name, grad in gradients(leaves, found, cotangents).items():
        if grad is not None and truth[name] is not None:
            hold(f"d{name}", grad.cpu(), truth[name], usual[name], backend.get(name), mass[name])
    return failures


def run(first: int, cases: int, device: str) -> tuple[int, Counter[str], dict[str, tuple[float, int]]]:
    """How many cases failed, at what, and what came nearest to its budget."""
    failed, worst, kinds = 0, {}, Counter()
    for seed in range(first, first + cases):
        for failure in (failures := check(seed, worst, device)):
            print(f"case {seed}: {failure}", flush=True)
            kinds[failure.split(":")[0]] += 1
        failed += bool(failures)
    return failed, kinds, worst


def run_part(part: tuple[int, int, str]) -> tuple[int, Counter[str], dict[str, tuple[float, int]]]:
    return run(*part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args()
    if asked.device == "cpu":
        from attemper.kernels.cpu import native

        native.configure(poison=1)
    started = time.monotonic()
    parts = [(seed, min(ALIKE, asked.seed + asked.cases - seed), asked.device) for seed in
             range(asked.seed, asked.seed + asked.cases, ALIKE)]  # fmt: skip
    if asked.jobs > 1:
        torch.set_num_threads(1)
        with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
            done = []
            for part in pool.imap_unordered(run_part, parts):
                done.append(part)
                print(
                    f"{len(done)} of {len(parts)} parts, {time.monotonic() - started:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    else:
        done = [run(*part) for part in parts]
    worst: dict[str, tuple[float, int]] = {}
    for _, _, nearest in done:
        for kind, found in nearest.items():
            worst[kind] = max(worst.get(kind, (0.0, 0)), found)
    print("nearest to its budget (error / budget, case):")
    for kind, (ratio, seed) in sorted(worst.items(), key=lambda item: -item[1][0])[:12]:
        print(f"  {ratio:5.2f}  {kind} (case {seed})")
    failed, kinds = sum(part[0] for part in done), sum((part[1] for part in done), Counter())
    print(
        f"{asked.cases} cases, {failed} failed {dict(kinds) or ''}, {time.monotonic() - started:.0f} s, {asked.device}"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
