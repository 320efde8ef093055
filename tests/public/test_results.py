"""What a user may do to what a call returned: write into it, drop parts, copy, flatten, store; and never a wrong gradient."""

import copy
import functools
import gc

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import attemper
from close import assert_float64
from public.definition import DERIVED, SIGNS, attend
from serving import ON_CPU

FLOATING = SIGNS[1:]
LEAVES = ("query", "key", "value", "mask", "scale")
CALLS = {"plain": {}, "causal": {"causal": True}, "mask and scale": {"mask": True, "scale": True}}
OTHERS = [pytest.param(CALLS[name], id=name, marks=pytest.mark.exhaustive) for name in ("plain", "causal")]


def leaves(dtype: torch.dtype = torch.float64, **options: bool) -> dict[str, Tensor]:
    shapes = {"query": (2, 4, 9, 8), "key": (2, 2, 12, 8), "value": (2, 2, 12, 5)}
    shapes |= {name: shape for name, shape in (("mask", (9, 12)), ("scale", (4,))) if options.get(name)}
    return {name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}


def run(given: dict[str, Tensor], kernel: str, causal: bool = False, **_: bool) -> dict[str, Tensor]:
    more = {name: given[name] for name in ("mask", "scale") if name in given}
    output, vitals = attemper.attention(*(given[n] for n in LEAVES[:3]), **more, causal=causal, kernel=kernel)
    return {"output": output} | {name: getattr(vitals, name) for name in SIGNS}


def differentiated(results: dict[str, Tensor], given: dict[str, Tensor], name: str) -> list[Tensor | None]:
    cotangent = torch.linspace(-1, 1, results[name].numel(), dtype=results[name].dtype).reshape(results[name].shape)
    return list(
        torch.autograd.grad(results[name], list(given.values()), cotangent, allow_unused=True, retain_graph=True)
    )


def same_bits(found: list, expected: list) -> bool:
    return all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("options", [*OTHERS, pytest.param(CALLS["mask and scale"], id="mask and scale")])
@pytest.mark.parametrize("way", ["no_grad", "detach"])
def test_writing_into_a_result_changes_no_other_and_no_gradient_silently(options, kernel, way):
    given = leaves(**options)
    expected = run(given, kernel, **options)
    gradients = {name: differentiated(expected, given, name) for name in ("output", *FLOATING)}
    for written in ("output", *SIGNS):
        results = run(given, kernel, **options)
        assert all(torch.equal(results[name], one) for name, one in expected.items())
        if way == "no_grad":
            with torch.no_grad():
                results[written].mul_(3).add_(1)
        else:
            results[written].detach().mul_(3).add_(1)
        for name, one in expected.items():
            if name != written:
                assert torch.equal(results[name], one), f"writing {written} changed {name}"
                if name != "visible":
                    check_gradient(results, given, name, gradients[name])


def check_gradient(results: dict[str, Tensor], given: dict[str, Tensor], name: str, expected: list) -> None:
    """Right, or refused by torch's counter of versions."""
    try:
        found = differentiated(results, given, name)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return
    assert same_bits(found, expected), f"a wrong gradient of {name}"


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("changed", LEAVES)
def test_an_input_that_was_changed_since_gives_no_wrong_gradient(changed, kernel):
    options = CALLS["mask and scale"]
    given = leaves(**options)
    gradients = {name: differentiated(run(given, kernel), given, name) for name in ("output", *FLOATING)}
    for name, expected in gradients.items():
        results = run(given, kernel)
        kept = given[changed].detach().clone()
        with torch.no_grad():
            given[changed].mul_(2)
        check_gradient(results, given, name, expected)
        with torch.no_grad():
            given[changed].copy_(kept)


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("kept", ["output", *FLOATING])
def test_one_result_is_kept_and_the_rest_dropped(kept, kernel):
    given = leaves()
    expected = run(given, kernel)
    gradient = differentiated(expected, given, kept)
    one = run(given, kernel)[kept]
    gc.collect()
    assert torch.equal(one, expected[kept])
    assert same_bits(differentiated({kept: one}, given, kept), gradient)
    output, vitals = attemper.attention(*(given[n] for n in LEAVES[:3]), kernel=kernel)
    for name in vitals.measured:
        if name != kept:
            delattr(vitals, name)
    assert vitals.measured == (() if kept == "output" else (kept,))
    assert same_bits(
        differentiated({kept: output if kept == "output" else getattr(vitals, kept)}, given, kept), gradient
    )


@pytest.mark.parametrize("kernel", ON_CPU)
def test_every_result_is_an_ordinary_tensor(kernel):
    """Contiguous, of its own type, with a view of any shape; numpy, DLPack and safetensors take it."""
    for given in (leaves(), leaves(torch.float32), leaves(torch.bfloat16)):
        detached = {name: one.detach() for name, one in run(given, kernel).items()}
        with torch.no_grad():
            expected = run(given, kernel)
        for results in (detached, expected):
            stored = safetensors.torch.load(safetensors.torch.save(results))
            for name, one in results.items():
                assert type(one) is Tensor
                assert one.is_contiguous()
                assert torch.equal(one.view(-1), one.flatten())
                assert one.dtype == torch.bfloat16 or torch.equal(torch.from_numpy(one.numpy()), one)
                assert torch.equal(torch.from_dlpack(one), one)
                assert torch.equal(stored[name], one)
                assert not one.is_inference()
                assert one.grad_fn is None


CHANGED = {"as they were": torch.clone, "zeros": torch.zeros_like}


@pytest.mark.parametrize("way", ["output", "signs"])
@pytest.mark.parametrize("kernel", ON_CPU)
def test_saved_tensor_hooks_hold_all_that_a_backward_reads(kernel, way):
    """So a checkpoint keeps nothing of its region, and what is moved to a disk is gone from memory."""
    given = leaves()
    not_replaced, found = [one.data_ptr() for one in given.values()], {}
    for what, change in CHANGED.items():
        replaced = []

        def unpack(one, change=change, replaced=replaced):
            if one.data_ptr() in not_replaced:
                return one
            replaced.append(one)
            return change(one)

        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, unpack):
            output, vitals = attemper.attention(*given.values(), kernel=kernel)
        not_replaced.append(output.data_ptr())
        result = output if way == "output" else vitals.entropy
        found[what] = torch.autograd.grad(result.square().sum(), list(given.values())[:2])
        assert replaced
    found["plain"] = differentiated_squares(given, kernel, way)
    assert same_bits(list(found["as they were"]), list(found["plain"]))
    assert not same_bits(list(found["zeros"]), list(found["plain"]))


def differentiated_squares(given: dict[str, Tensor], kernel: str, way: str) -> tuple[Tensor, ...]:
    output, vitals = attemper.attention(*given.values(), kernel=kernel)
    return torch.autograd.grad((output if way == "output" else vitals.entropy).square().sum(), list(given.values())[:2])


ELSEWHERE = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "profiler": functools.partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.parametrize("mode", ELSEWHERE.values(), ids=ELSEWHERE)
@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_a_sign_is_the_same_wherever_it_is_first_read(batched, tracked, kernel, mode):
    """With its gradient, if the call was recorded; and fit for a loss, if it was not."""
    given = [leaf if batched else leaf[0] for leaf in leaves().values()]
    held = given if tracked else [one.detach() for one in given]
    learned = torch.ones((), dtype=torch.float64, requires_grad=True)
    for call in (attemper.attention, lambda q, k, v, kernel: (None, attemper.measure(q, k, kernel=kernel))):
        for name in ("entropy", "peak", "mean"):
            expected = getattr(call(*held, kernel=kernel)[1], name)
            vitals = call(*held, kernel=kernel)[1]
            with mode():
                found = getattr(vitals, name)
                assert torch.equal(found, expected)
            for sign in (found, getattr(vitals, name)):
                assert not sign.is_inference()
                assert sign.requires_grad == tracked
                wanted = [learned, *held[:2]] if tracked else [learned]
                steps, exact = ((learned * one.square()).sum() for one in (sign, expected))
                assert same_bits(
                    list(torch.autograd.grad(steps, wanted, retain_graph=True)),
                    list(torch.autograd.grad(exact, wanted, retain_graph=True)),
                )


@pytest.mark.parametrize("kernel", ON_CPU)
def test_signs_of_a_call_in_inference_mode_are_of_it(kernel):
    given = [leaf.detach() for leaf in leaves().values()]
    with torch.inference_mode():
        output, vitals = attemper.attention(*given, kernel=kernel)
        read = vitals.entropy
    assert all(one.is_inference() for one in (output, read, vitals.entropy, vitals.sum_p2, vitals.visible))


def test_a_sign_of_a_module_that_is_logged_has_its_gradient():
    module = attemper.MultiHeadAttention(16, 4, signs=("entropy",))
    x = torch.randn(2, 5, 16)
    module(x)
    with torch.no_grad():
        assert module.vitals.entropy.mean() > 0
    (-module.vitals.entropy.mean()).backward()
    assert all(one.grad is not None for name, one in module.named_parameters() if "in_proj" in name)


def called(kernel: str = "auto", dtype: torch.dtype = torch.float64) -> attemper.Attended:
    return attemper.attention(*leaves(dtype).values(), kernel=kernel)


COPIES = {
    "copy": copy.copy,
    "deepcopy of the detached": lambda vitals: copy.deepcopy(vitals.each(Tensor.detach)),
    "pytree": lambda vitals: pytree.tree_unflatten(*pytree.tree_flatten(vitals)),
    "tree_map": lambda vitals: pytree.tree_map(torch.clone, vitals),
    "each": lambda vitals: vitals.each(torch.clone),
}


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_copies_have_every_sign_and_merge_like_the_original(way, kernel):
    q, k, v = (leaf * 9 for leaf in leaves(torch.float32).values())
    halves = [
        attemper.attention(q, k[..., s, :], v[..., s, :], kernel=kernel).vitals for s in (slice(0, 5), slice(5, 12))
    ]
    copied = [way(one) for one in halves]
    for one, other in zip(copied, halves, strict=True):
        assert one is not other
        assert one.measured == other.measured
        assert all(
            torch.equal(value, other.to_dict()[name]) for name, value in one.to_dict().items() if name != "evenness"
        )
    found, expected = (attemper.merge(parts).to_dict() for parts in (copied, halves))
    assert all(torch.equal(found[name], value) for name, value in expected.items() if name != "evenness")


def test_a_copy_can_be_written_without_the_original():
    vitals = called().vitals
    copied = copy.copy(vitals)
    copied.entropy = copied.entropy * 0
    assert vitals.entropy.abs().sum() > 0
    del copied.peak
    assert "peak" in vitals.measured


def test_attended_is_a_pytree_and_a_tuple():
    attended = called()
    output, vitals = attended
    assert attended.output is output
    assert attended.vitals is vitals
    flat, spec = pytree.tree_flatten(attended)
    again = pytree.tree_unflatten(flat, spec)
    assert isinstance(again, attemper.Attended)
    assert again.vitals.measured == SIGNS


def test_a_sign_that_was_not_measured_says_what_to_ask_for():
    q = torch.randn(2, 5, 4)
    vitals = attemper.measure(q, q, signs=("entropy",))
    for name in (*SIGNS, *DERIVED):
        if name != "entropy":
            with pytest.raises(attemper.errors.SignNotMeasured, match=r"Add '.*' to signs=, or use signs='all'"):
                getattr(vitals, name)
    assert not hasattr(vitals, "nonsense")


def test_by_head_is_the_mean_over_rows_and_the_largest_peak():
    """Empty rows and rows that were left out do not count; saturated rows are those of at least 8 keys."""
    q, k, v = (one.detach() * size for one, size in zip(leaves().values(), (6, 1, 1), strict=True))
    mask = torch.rand(2, 1, 9, 12) > 0.2
    mask[0, :, 2] = False
    keep = torch.rand(2, 1, 9) > 0.3
    vitals = attemper.attention(q, k, v, mask=mask).vitals
    exact = attend(q, k, v, mask=mask)
    for rows in (None, keep):
        summary = vitals.by_head(rows)
        counted = (exact["visible"] > 0) & (True if rows is None else rows)
        total = counted.sum((0, 2))
        assert torch.equal(summary.rows.long(), total)
        for name in (*SIGNS, "top_weight", "effective_keys", "jacobian_trace"):
            if name != "peak":
                mean = torch.where(counted, exact[name].double(), 0.0).sum((0, 2)) / total
                assert_float64(getattr(summary, name).double(), mean, name)
        assert_float64(summary.peak.double(), exact["peak"].masked_fill(~counted, -torch.inf).amax((0, 2)))
        several = counted & (exact["visible"] > 1)
        assert_float64(
            summary.evenness.double(), torch.where(several, exact["evenness"], 0.0).sum((0, 2)) / several.sum((0, 2))
        )
        long = counted & (exact["visible"] >= 8)
        share = (long & (exact["top_weight"] > 0.99)).sum((0, 2)) / long.sum((0, 2)).double()
        assert_float64(summary.saturated.double(), share)


def test_summaries_merge_exactly():
    q, k, v = (leaf.detach() for leaf in leaves().values())
    whole = attemper.attention(q, k, v).vitals.by_head()
    first, second = (attemper.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1]).vitals.by_head() for i in (0, 1))
    merged = first.merge(second)
    for name in whole.signs:
        assert_float64(getattr(merged, name), getattr(whole, name), name)


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("far", [-1e9, torch.finfo(torch.float32).min, 1e7])
def test_logits_of_any_size_keep_their_shares(far, kernel):
    """Where a logarithm is too coarse to hold ln n, top_weight and merged shards still have it."""
    q, k = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 12, 4)
    v = torch.eye(12).expand(1, 2, 12, 12)
    bias = torch.full((1, 1, 5, 12), far)
    halves = [
        attemper.attention(q, k[..., s, :], v[..., s, :], mask=bias[..., s], kernel=kernel)
        for s in (slice(0, 5), slice(5, 12))
    ]
    for output, vitals in (attemper.attention(q, k, v, mask=bias, kernel=kernel), attemper.merge(halves)):
        for found in (output, vitals.top_weight):
            assert ((found - 1 / 12).abs() <= 8 * torch.finfo(torch.float32).eps / 12).all()
    with torch.no_grad():
        alone = attemper.measure(q, k, mask=bias, kernel=kernel).top_weight
    assert ((alone - 1 / 12).abs() <= 8 * torch.finfo(torch.float32).eps / 12).all()
