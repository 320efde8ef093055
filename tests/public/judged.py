"""The judge: how far a result may be from the definition in float64, measured by what rounding every step does to it."""

from typing import Any

import torch
from torch import Tensor

from public.calls import DTYPES, Call
from public.definition import DERIVED, DRAWS, SIGNS, Rounds

FACTOR = 2.0  # so many times the largest error of the draws: a kernel rounds in an order of its own


def parts_of(name: str) -> tuple[str, ...]:
    return DERIVED.get(name, (name,))


def asked_for(signs: Any) -> set[str]:
    """The signs that are stored for these."""
    return set(SIGNS) if signs == "all" else {part for name in signs for part in parts_of(name)}


def loss_of(call: Call) -> str:
    """The result that is differentiated: the one that the call names, where it was measured."""
    stored = asked_for(call.signs) - {"visible"}
    if call.loss in ("output", "weights") or call.loss in stored:
        return call.loss
    return min(stored) if stored else "output"


def wants(call: Call, leaves: dict[str, Tensor]) -> list[str]:
    """The leaves that have gradients."""
    chosen = {"all": set(leaves), "mask and scale": {"mask", "scale", "weight", "sink"}, "none": set()}.get(
        call.wanted, {call.wanted}
    )
    if call.entry in ("measure", "weights"):
        chosen = chosen - {"value"}
    return [name for name, one in leaves.items() if name in chosen and one.is_floating_point()]


def gradients(results: dict[str, Tensor], leaves: dict[str, Tensor], loss: str, cotangent: Tensor) -> dict[str, Tensor]:
    """Of Σ cotangent · result, where the result is finite; zeros where nothing arrives."""
    named = {name: one for name, one in leaves.items() if one.requires_grad}
    if not named or not results[loss].requires_grad:
        return {name: torch.zeros_like(one) for name, one in named.items()}
    result = results[loss]
    total = (torch.where(result.isfinite(), result, 0.0) * cotangent.to(result.dtype)).sum()
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if one is None else one
        for (name, leaf), one in zip(named.items(), found, strict=True)
    }


def by_definition(
    call: Call, given: dict[str, Tensor], rounds: Rounds, cotangent: Tensor | None
) -> tuple[dict, dict, Any]:
    """Results, gradients and the cotangent, which the first pass draws."""
    leaves = {name: one.double() if one.is_floating_point() else one for name, one in given.items()}
    for name in wants(call, given):
        leaves[name].requires_grad_()
    results = call.defined(leaves, rounds=rounds)
    loss = loss_of(call)
    if cotangent is None:
        cotangent = torch.randn_like(results[loss])
        if loss == "peak":
            cotangent = cotangent * (results["gap"] > 1e-4)  # else the arg-max is nobody's to name
        if loss == "output":
            cotangent = cotangent.to(DTYPES[call.dtype]).double()
    found = gradients(results, leaves, loss, cotangent)
    return {name: one.detach() for name, one in results.items()}, found, cotangent


def assert_near(name: str, found: Tensor, exact: Tensor, rounded: list[Tensor]) -> float:
    """Within FACTOR times the error of the draws, and a rounding of the largest entry; how much of that was used."""
    assert found.shape == exact.shape, f"{name}: shape {tuple(found.shape)} for {tuple(exact.shape)}"
    found = found.detach()
    wide = found.double()
    finite = exact.isfinite()
    same = (wide == exact) | (wide.isnan() & exact.isnan())
    assert same[~finite].all(), f"{name}: infinities or NaN differ"
    if not finite.any():
        return 0.0
    error = (wide - exact)[finite].abs()
    assert error.isfinite().all(), f"{name}: not finite where the definition is"
    yardstick = max((one - exact)[finite].abs().max().item() for one in rounded)
    kind = torch.finfo(found.dtype)
    largest = max(exact[finite].abs().max().item(), kind.tiny)  # below it, numbers are equally far apart
    room = FACTOR * (yardstick + kind.eps * largest)
    used = error.max().item() / room if room else float(error.max().item() > 0) * torch.inf
    assert used <= 1 or used != used, f"{name}: error {error.max():.2e} exceeds {room:.2e}"
    return 0.0 if used != used else used


def judge(call: Call) -> dict[str, float]:
    """Every value and every gradient of a call; how much of what it may err each used."""
    given = call.leaves()
    dtype = DTYPES[call.dtype]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact, exact_gradients, cotangent = by_definition(call, given, Rounds(), None)
    steps = Rounds(torch.finfo(wide).eps, torch.finfo(dtype).eps if wide != dtype else 0.0)
    rounded = [by_definition(call, given, steps, cotangent)[:2] for _ in range(DRAWS)]

    leaves = {name: one.clone() for name, one in given.items()}
    for name in wants(call, given):
        leaves[name].requires_grad_()
    results, vitals = call.run(leaves, call.signs)
    used = {}
    if vitals is not None:
        assert set(vitals.measured) == asked_for(call.signs), "other signs than were asked for"
        derived = {name for name, needs in DERIVED.items() if set(needs) <= asked_for(call.signs)}
        assert set(results) - {"output"} == asked_for(call.signs) | derived
        if call.entry not in ("merge", "measure"):
            alone = call.run(leaves, ())[0]["output"]
            assert torch.equal(alone, results["output"]), "signs change the output"
    for name, found in results.items():
        if name == "visible":
            assert found.dtype == torch.int32
            assert torch.equal(found, exact[name]), "visible differs"
            continue
        assert found.dtype == (dtype if name == "output" else wide), f"{name}: {found.dtype}"
        assert found.grad_fn is not None or not wants_through(call, name, given), f"{name} has no gradient"
        used[name] = assert_near(name, found, exact[name], [one[0][name] for one in rounded])
    loss = loss_of(call)
    for name, found in gradients(results, leaves, loss, cotangent).items():
        title = f"d({loss})/d({name})"
        assert found.dtype == leaves[name].dtype, f"{title}: {found.dtype}"
        used[title] = assert_near(title, found, exact_gradients[name], [one[1][name] for one in rounded])
    for name, one in given.items():
        assert torch.equal(leaves[name].detach(), one), f"{name} was changed"
    return used


def wants_through(call: Call, name: str, given: dict[str, Tensor]) -> bool:
    """Whether a result must have a gradient: one of a value reaches the output alone."""
    wanted = set(wants(call, given))
    return bool(wanted if name == "output" else wanted - {"value"})
