"""judge() for a score: output, vitals and gradients against the plain page in float64, by the rule of tests/judge.py."""

import warnings
import zlib
from dataclasses import dataclass

import torch

import attemper
from attemper.kernels.contract import measuring_dtype
from attemper.operation.call import prepare
from cases import DTYPES
from judge import SIGNS, _clear_winner, assert_within, gradients
from scores.plain import AdditiveRounding, CosineRounding, additive_logits, attend, cosine_logits, kept, per_head

LOGITS = {"additive": additive_logits, "cosine": cosine_logits}


@dataclass(frozen=True)
class Case:
    score: str
    dtype: str = "f32"
    lengths: tuple[int, int] = (33, 33)
    heads: tuple[int, int] = (2, 2)
    dim: int = 12
    mask: str = "none"
    causal: bool | str = False
    window: int | None = None
    size: float = 1.0  # of the weight or the scale
    per_head: bool = True

    def __str__(self) -> str:
        parts = [self.score, self.dtype, f"L{self.lengths[0]}x{self.lengths[1]}", f"H{self.heads[0]}-{self.heads[1]}"]
        return "-".join([*parts, f"E{self.dim}", self.mask, str(self.causal), str(self.window), f"{self.size:g}"])

    def tensors(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        dtype, (heads, groups), (rows, keys) = DTYPES[self.dtype], self.heads, self.lengths

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        found = {
            "query": draw(2, rows, heads, self.dim).transpose(1, 2),  # strides of a (B, L, H, E) model on purpose
            "key": draw(2, groups, keys, self.dim),
            "value": draw(2, groups, keys, 7),
        }
        if self.mask == "additive":
            found["mask"] = draw(1, heads, rows, keys)
            found["mask"][draw(1, heads, rows, keys) > 1] = -float("inf")
            found["mask"][draw(1, heads, rows, keys) > 1] = -3e4
            found["mask"][:, 0, -1] = -float("inf")  # a row that sees nothing
        elif self.mask == "bias_row":
            found["mask"] = draw(2, heads, 1, keys)
        found = {name: t.to(dtype) for name, t in found.items()}
        if self.mask == "bool":
            found["mask"] = draw(2, 1, rows, keys) > -0.5
            found["mask"][0, :, 0] = False
        wide = measuring_dtype(dtype)
        if self.score == "additive":
            found["weight"] = self.size * draw(*([heads] if self.per_head else []), self.dim).to(wide)
        else:
            found["scale"] = self.size * (1 + draw(*([heads] if self.per_head else [])).abs()).to(wide)
        return {name: t.to(device) for name, t in found.items()}


def by_definition(case: Case, tensors: dict, dtype: torch.dtype) -> tuple[dict, dict]:
    leaves = {n: t.detach().to(dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}
    for leaf in leaves.values():
        leaf.requires_grad_(leaf.is_floating_point())
    keep = kept(*case.lengths, case.causal, case.window).to(leaves["query"].device)
    with warnings.catch_warnings():
        # torch's own bfloat16 products of awkward size say so when they fall back
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        extra = leaves["weight" if case.score == "additive" else "scale"]
        z = LOGITS[case.score](leaves["query"], leaves["key"], extra)
        return leaves, attend(z, per_head(leaves["value"], leaves["query"]), leaves.get("mask"), keep)


def by_attemper(case: Case, tensors: dict) -> tuple[dict, dict]:
    leaves = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    function = attemper.additive_attention if case.score == "additive" else attemper.cosine_attention
    output, vitals = function(**leaves, causal=case.causal, window=case.window)
    return leaves, {"output": output, **{n: getattr(vitals, n) for n in vitals.measured}}


def judge(case: Case, device: str = "cpu") -> None:
    tensors = case.tensors(device)
    dtype = tensors["query"].dtype
    wide = measuring_dtype(dtype)
    exact_leaves, exact = by_definition(case, tensors, torch.float64)
    wide_leaves, wide_plain = by_definition(case, tensors, torch.float32)
    half = dtype not in (torch.float32, torch.float64)
    plain_leaves, plain = by_definition(case, tensors, dtype) if half else (wide_leaves, wide_plain)
    leaves, actual = by_attemper(case, tensors)
    rounding = _rounding(case, exact_leaves, exact)

    mass = rounding.signs()
    assert torch.equal(actual["visible"], exact["visible"]), "visible differs"
    for name in ("output", *SIGNS):
        assert actual[name].dtype == (dtype if name == "output" else wide)
        yard = plain if name == "output" else wide_plain
        assert_within(name, actual[name], exact[name].detach(), yard[name], torch.finfo(wide).eps * mass[name])
    for loss in ("output", *SIGNS):
        cotangent = torch.randn_like(exact[loss]) * (_clear_winner(exact) if loss == "peak" else 1.0)
        yard = (plain_leaves, plain) if loss == "output" else (wide_leaves, wide_plain)
        exact_grads, plain_grads = (gradients(*pair, {loss: cotangent}) for pair in ((exact_leaves, exact), yard))
        mass = rounding.gradients(loss, cotangent)
        for name, grad in gradients(leaves, actual, {loss: cotangent}).items():
            assert grad.dtype == leaves[name].dtype
            eps = torch.finfo(dtype if loss == "output" else wide).eps
            assert_within(f"d({loss})/d({name})", grad, exact_grads[name], plain_grads[name], eps * mass[name])


def _rounding(case: Case, leaves: dict, exact: dict) -> AdditiveRounding | CosineRounding:
    options = {"mask": leaves.get("mask"), "causal": case.causal, "window": case.window}
    scale = leaves.get("scale", 1.0)
    problem = prepare("judge", leaves["query"], leaves["key"], leaves["value"], scale=scale, **options).problem
    return (
        AdditiveRounding(problem, exact, leaves["weight"])
        if case.score == "additive"
        else CosineRounding(problem, exact)
    )
