"""Every public function with torch's modes, hooks, threads and transforms around it: the numbers are those of a plain call."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attemper
from attemper.errors import AttemperError
from close import assert_float64
from public.entries import ENTRIES, inputs, loss

EVERY = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Answering(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


def unpacked(tensor: Tensor) -> Tensor:
    return tensor.clone()


AROUND = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "dispatch mode": Dispatching,
    "function mode": Answering,
    "flop counter": functools.partial(FlopCounterMode, display=False),
    "profiler": profiled,
    "deterministic": deterministic,
    "anomaly": functools.partial(torch.autograd.detect_anomaly, check_nan=False),
    "saved tensors hooks": functools.partial(saved_tensors_hooks, unpacked, unpacked),
    "save on cpu": save_on_cpu,
    "autocast of another dtype": functools.partial(torch.autocast, "cpu", enabled=False),
    "forward mode": torch.autograd.forward_ad.dual_level,
}


def plain(entry, given):
    """Results and gradients of a plain call."""
    held = [one.detach().clone().requires_grad_() for one in given]
    results = [one.detach() for one in entry(*held)]
    return results, torch.autograd.grad(loss(entry, *held), held, allow_unused=True)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert_float64(one.detach(), other)


@EVERY
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_around_a_call_and_its_backward(entry, around):
    given = inputs()
    results, gradients = plain(entry, given)
    held = [one.clone().requires_grad_() for one in given]
    with around():
        assert_same(entry(*held), results)
        tracked = torch.is_grad_enabled()
        found = torch.autograd.grad(loss(entry, *held), held, allow_unused=True) if tracked else gradients
    assert_same(found, gradients)


@EVERY
def test_inference_mode(entry):
    """Inside, and with tensors that were made in it: they are read, and copied where a backward would keep them."""
    given = inputs()
    results, gradients = plain(entry, given)
    with torch.inference_mode():
        inside = entry(*given)
        made = [one.clone() for one in given]
        assert all(one.is_inference() for one in inside)
        assert_same(inside, results)
        assert_same(entry(*made), results)
    assert_same(entry(*made), results)
    held = given[0].clone().requires_grad_()
    assert_same(torch.autograd.grad(loss(entry, held, *made[1:]), held), gradients[:1])


@EVERY
def test_threads(entry):
    """Several at once, forward and backward, and a mode in one is not in the others."""
    each = [inputs() for _ in range(6)]
    expected = [plain(entry, given) for given in each]
    gate = threading.Barrier(3, timeout=60)

    def work(given):
        gate.wait()
        return plain(entry, given)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, each))
    for (results, gradients), (right, steps) in zip(found, expected, strict=True):
        assert_same(results, right)
        assert_same(gradients, steps)


@EVERY
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(entry, reentrant):
    given = inputs()
    held = [one.clone().requires_grad_() for one in given]
    total = checkpoint(functools.partial(loss, entry), *held, use_reentrant=reentrant)
    total.backward()
    assert_same([one.grad for one in held], plain(entry, given)[1])


@EVERY
def test_functorch(entry):
    """vmap, grad, vmap of grad, vjp and jacrev."""
    given = inputs(3)
    each = [[one[i] for one in given] for i in range(3)]
    right = [plain(entry, one) for one in each]
    together = [torch.stack(parts) for parts in zip(*(results for results, _ in right), strict=True)]
    gradients = [torch.zeros_like(one) for one in given]
    for i, (_, steps) in enumerate(right):
        for whole, step in zip(gradients, steps, strict=True):
            whole[i] = 0 if step is None else step
    assert_same(vmap(entry)(*given), together)
    assert_same(vmap(entry, in_dims=(0, None, None))(given[0], *each[0][1:])[0][:1], right[0][0][0][None])
    step = grad(functools.partial(loss, entry), argnums=(0, 1, 2))
    assert_same(step(*each[1]), [gradient[1] for gradient in gradients])
    assert_same(vmap(step)(*given), gradients)
    value, pull = vjp(functools.partial(loss, entry), *each[2])
    assert_same(pull(torch.ones_like(value)), [gradient[2] for gradient in gradients])
    small = [each[0][0][:1, :, :2], each[0][1][:1], each[0][2][:1]]
    jacobian = jacrev(lambda q: entry(q, *small[1:])[0].sum(-1))(small[0])
    held = small[0].clone().requires_grad_()
    rows = entry(held, *small[1:])[0].sum(-1)
    direct = [torch.autograd.grad(row, held, retain_graph=True)[0] for row in rows.flatten()]
    assert_float64(jacobian.reshape(-1, *held.shape), torch.stack(direct))


@EVERY
def test_derivatives_that_a_kernel_lacks_are_refused_in_a_sentence(entry):
    """Forward mode, and a second derivative: never a wrong number."""
    given = inputs()
    tangents = tuple(map(torch.randn_like, given))
    for attempt in (lambda: jvp(entry, tuple(given), tangents), lambda: twice(entry, given)):
        if entry is ENTRIES["weights"]:
            attempt()  # the definition computes them
            continue
        with pytest.raises((AttemperError, RuntimeError), match=r"kernel='reference'|forward|derivative"):
            attempt()


def twice(entry, given):
    held = [one.clone().requires_grad_() for one in given]
    (first,) = torch.autograd.grad(loss(entry, *held), held[0], create_graph=True)
    return torch.autograd.grad(first.square().sum(), held[0])


@pytest.mark.parametrize("tracked", [False, True])
def test_functionalize(tracked):
    given = torch.randn(2, 3, 5, 8, requires_grad=tracked)
    found = torch.func.functionalize(lambda one: attemper.sdpa(one, one, one))(given)
    assert torch.equal(found, attemper.sdpa(given, given, given))


def test_gradients_through_functionalize():
    """Inside it no tensor shows that it requires a gradient."""
    given = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)

    def run(one):
        output, vitals = attemper.attention(one, one.flip(-2), one)
        return sum(part.sin().sum() for part in (output, *vitals.to_dict().values()))

    (direct,), (found,) = (torch.autograd.grad(f(given), given) for f in (run, torch.func.functionalize(run)))
    assert_float64(found, direct)


def test_the_definition_has_them():
    q, k, v = inputs()

    def entropy(q):
        return attemper.measure(q, k, kernel="reference").entropy.sum()

    _, slope = jvp(entropy, (q,), (q,))
    assert_float64(slope, (grad(entropy)(q) * q).sum())
    held = q.clone().requires_grad_()
    few = [one[:1, :1, :2] for one in (held, k, v)]
    assert torch.autograd.gradgradcheck(lambda q: attemper.attention(q, *few[1:], kernel="reference").output, few[0])


@EVERY
def test_on_other_devices_than_the_tensors(entry):
    """The default device is nobody's; meta and fake tensors have shapes and no numbers."""
    given = inputs()
    results, _ = plain(entry, given)
    if entry not in (ENTRIES["masked"], ENTRIES["biased"], ENTRIES["additive"]):  # they make tensors of their own
        with torch.device("meta"):
            assert_same(entry(*given), results)
        with FakeTensorMode() as mode:
            fake = entry(*(mode.from_tensor(one) for one in given))
        for found in (fake, entry(*(one.to("meta") for one in given))):
            assert [(one.shape, one.dtype) for one in found] == [(result.shape, result.dtype) for result in results]


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(entry, dtype):
    """As if the inputs were in its dtype, as torch's own attention reads them."""
    given = inputs(dtype=torch.float32)
    rounded = [one.to(dtype) for one in given]
    if entry in (ENTRIES["masked"],):
        return  # its scale would be rounded as well
    with torch.autocast("cpu", dtype=dtype):
        found = entry(*given)
        narrow = entry(*rounded)
    expected = entry(*rounded)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in zip(narrow, expected, strict=True))


def test_modules():
    """The modules as torch's: functional_call, vmap over stacked parameters, a state dict, a deep copy."""
    module = attemper.MultiHeadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = module(x, need_weights=False)[0]
    parameters = {name: one.detach() for name, one in module.named_parameters()}
    assert_float64(functional_call(module, parameters, (x,), {"need_weights": False})[0], expected)
    stacked = {name: torch.stack([one, 2 * one]) for name, one in parameters.items()}
    found = vmap(lambda given: functional_call(module, given, (x,), {"need_weights": False})[0])(stacked)
    assert_float64(found[0].detach(), expected.detach())
    steps = grad(lambda given: functional_call(module, given, (x,), {"need_weights": False})[0].sum())(parameters)
    expected.sum().backward()
    for name, one in module.named_parameters():
        assert_float64(steps[name], one.grad, name)
