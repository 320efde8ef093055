"""Plain calls reach their kernel without an op: which calls those are, and that they give the same bits as the op."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
from attemper import kernels
from attemper.errors import InputError, KernelUnavailable
from attemper.operation.run import Execution
from attemper.operation.run import attend as run_attention
from attemper.vitals import SIGNS
from close import assert_float64
from native import native, needed

pytestmark = needed
B, H, G, ROWS, KEYS, E = 2, 4, 2, 6, 9, 8


class Seen(TorchDispatchMode):
    """Records every op and changes nothing; no call under it is plain."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def direct(monkeypatch):
    """The passes that went straight to the kernel; "op" for a backward that did not."""
    taken, cpu = [], kernels.load("cpu")

    def counted(name, real):
        def run(*args, **options):
            found = real(*args, **options)
            by_op = sys._getframe(1).f_globals["__name__"] == "attemper.operation.ops"
            if found is not None and not (by_op and name == "forward"):
                taken.append("op" if by_op else name)
            return found

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(cpu, name, counted(name, getattr(cpu, name)))
    native = cpu.native.offered

    def at_once(*args):
        found = native.forward(*args)
        return found if found is None or not args[-1] else (found[0], Block(found[1]))

    class Block:
        """The signs of a call with a backward that is counted."""

        def __init__(self, block):
            self.block, self.backward = block, counted("backward", block.backward)

        def saved(self):
            bare, memory = self.block.saved()
            return Block(bare), memory

        def __getattr__(self, name):
            return getattr(self.block, name)

    counting = SimpleNamespace(guard=native.guard, forward=counted("forward", at_once))
    monkeypatch.setattr(cpu.native, "offered", counting)
    return taken


def tensors(dtype=torch.float32, groups=G, value_dim=E, tracked=False):
    shapes = ((B, H, ROWS, E), (B, groups, KEYS, E), (B, groups, KEYS, value_dim))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(tracked) for shape in shapes]


CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "lower right": {"causal": "lower_right"},
    "window": {"window": 3},
    "a window at the end": {"causal": "lower_right", "window": 4},
    "a window without end": {"window": 2**30, "causal": True},
    "capped": {"softcap": 2.0},
    "a number": {"scale": -0.4},
    "some signs": {"signs": ("variance", "top_weight")},
    "no signs": {"signs": ()},
    "bool mask": {"mask": torch.rand(B, 1, 1, KEYS) > 0.3},
    "flat mask": {"mask": torch.rand(ROWS, KEYS) > 0.3},
    "additive mask": {"mask": torch.randn(1, H, ROWS, 1)},
    "a number per head": {"scale": torch.linspace(0.1, 0.7, H)},
    "wide values": {"value_dim": 5},
    "equal heads": {"groups": H},
    "half precision": {"dtype": torch.bfloat16},
    "double precision": {"dtype": torch.float64},
    "transposed": {"transposed": True},
    "3 dimensions": {"flat": True},
}


def attend(inputs, options):
    """Output, signs and gradients of one call."""
    output, vitals = attemper.attention(*inputs, **options)
    found = [output, *(getattr(vitals, name) for name in vitals.measured)]
    leaves = [t for t in (*inputs, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    if leaves:
        ends = [t for t in found if t.requires_grad]
        found += torch.autograd.grad(ends, leaves, [torch.full_like(t, 0.5) for t in ends])
    return found


def made(options, tracked):
    """The tensors and options of one of the calls."""
    options = dict(options)
    sizes = {name: options.pop(name) for name in ("groups", "value_dim", "dtype") if name in options}
    inputs = tensors(**sizes)
    if options.pop("transposed", False):
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    if options.pop("flat", False):
        inputs = [t[0] for t in inputs]
    inputs = [tensor.detach().requires_grad_(tracked) for tensor in inputs]
    for name, option in options.items():
        if isinstance(option, torch.Tensor) and option.is_floating_point():
            options[name] = option.detach().requires_grad_(tracked)
    return inputs, options


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_it_differs_from_the_op_in_nothing(direct, options, tracked):
    inputs, options = made(options, tracked)
    found = attend(inputs, options)
    assert direct == (["forward", "backward"] if tracked else direct[:1])
    assert len(direct) == 1 + tracked
    with Seen() as seen:
        expected = attend(inputs, options)
    assert seen.ops.count("attemper.forward.default") == 1
    assert seen.ops.count("attemper.backward.default") == tracked
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        assert (a.dtype, a.stride(), a.requires_grad) == (b.dtype, b.stride(), b.requires_grad)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_without_the_table_of_dlpack_it_differs_in_nothing(options, tracked):
    inputs, options = made(options, tracked)
    found = attend(inputs, options)
    native.bind(exchange_api=None)
    try:
        assert not native.bound
        for a, b in zip(attend(inputs, options), found, strict=True):
            assert torch.equal(a, b)
    finally:
        native.bind()


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


def negative(tensor):
    """A tensor whose sign is still to be applied: its memory holds the opposite."""
    lazy = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert lazy.is_neg()
    return lazy


def inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


STATES = {
    "no_grad": (torch.no_grad, 1),
    "inference mode": (torch.inference_mode, 1),
    "a default device": (lambda: torch.device("meta"), 0),
    "a function mode": (Passing, 0),
    "a dispatch mode": (Seen, 0),
    "a profiler": (lambda: torch.profiler.profile(acc_events=True), 0),
    "autocast": (lambda: torch.autocast("cpu", enabled=True), 0),
    "a level of forward mode": (forward_ad.dual_level, 0),
}
KINDS = {
    "a parameter": (torch.nn.Parameter, 1),
    "an inference tensor": (inference, 1),
    "a subclass": (lambda t: t.as_subclass(Own), 0),
    "a lazy sign": (negative, 0),
}


@pytest.mark.parametrize(("state", "times"), STATES.values(), ids=STATES)
def test_only_without_modes(direct, state, times):
    inputs = tensors(torch.float64)  # which autocast leaves alone
    with torch.no_grad():
        expected = attemper.sdpa(*inputs, enable_gqa=True)
        direct.clear()
        with state():
            found = attemper.sdpa(*inputs, enable_gqa=True)
    assert len(direct) == times
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("kind", "times"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", range(3))
def test_only_for_plain_tensors(direct, kind, times, place):
    inputs = tensors()
    expected = attemper.attention(*inputs, causal=True)
    direct.clear()
    inputs[place] = kind(inputs[place])
    with torch.no_grad():
        found = attemper.attention(*inputs, causal=True)
    assert len(direct) == times
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.vitals.entropy, expected.vitals.entropy)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_transforms_and_tracers_see_the_op(direct):
    inputs = tensors(groups=H)
    expected = attemper.sdpa(*inputs)
    direct.clear()
    assert torch.equal(torch.vmap(attemper.sdpa)(*(t[:, None] for t in inputs))[:, 0], expected)
    torch.func.grad(lambda q: attemper.sdpa(q, *inputs[1:]).sum())(inputs[0])
    with torch.no_grad():
        traced = torch.jit.trace(attemper.sdpa, tuple(inputs), check_trace=False)
    assert "attemper::forward" in str(traced.graph)
    with FakeTensorMode() as mode:
        assert attemper.sdpa(*(mode.from_tensor(t) for t in inputs)).shape == expected.shape
    assert set(direct) <= {"op"}  # empty if an earlier test let the extension compute the ops


def test_a_tensor_that_outlived_its_transform_is_refused_by_torch(direct):
    inputs, left = tensors(groups=H), []
    torch.vmap(lambda t: left.append(t) or t)(inputs[0])
    with pytest.raises(RuntimeError):
        attemper.sdpa(left[0], *inputs[1:])
    assert direct == []


def test_the_backward_of_a_direct_call_may_be_batched_hooked_or_differentiated(direct):
    inputs = tensors(torch.float64, tracked=True)
    cotangents = torch.randn(3, B, H, ROWS, E, dtype=torch.float64)
    each = [torch.autograd.grad(attemper.attention(*inputs).output, inputs, g) for g in cotangents]
    assert "op" not in direct
    output = attemper.attention(*inputs).output
    batched = torch.autograd.grad(output, inputs, cotangents, is_grads_batched=True)
    for i, gradients in enumerate(each):
        for alone, together in zip(gradients, batched, strict=True):
            assert_float64(together[i], alone)
    direct.clear()
    with torch.autograd.graph.save_on_cpu():
        output = attemper.attention(*inputs).output
    for a, b in zip(torch.autograd.grad(output, inputs, cotangents[0]), each[0], strict=True):
        assert torch.equal(a, b)
    (first, *_) = torch.autograd.grad(attemper.attention(*inputs).output.sum(), inputs, create_graph=True)
    with pytest.raises(KernelUnavailable, match="kernel='cpu' does not compute second derivatives"):
        first.sum().backward()


def test_only_values_are_tracked(direct):
    query, key, value = tensors()
    value.requires_grad_()
    output, vitals = attemper.attention(query, key, value)
    (gradient,) = torch.autograd.grad([output.sum(), vitals.peak.sum(), vitals.entropy.sum()], value)
    assert torch.equal(gradient, torch.autograd.grad(attemper.attention(query, key, value).output.sum(), value)[0])
    assert "op" not in direct


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"mask": True}], ids=["full", "causal", "mask"])
def test_detached_signs_change_no_bit(direct, dtype, asked):
    """As replace=True calls it: the same output and gradients, and signs for which nothing is saved."""
    query, key, value = tensors(dtype, tracked=True)
    mask = torch.randn(ROWS, KEYS, dtype=dtype)[None, None].requires_grad_() if "mask" in asked else None
    options = {"mask": mask, "causal": False, "scale": None, "softcap": None, "dropout": 0.0} | asked | {"mask": mask}
    inputs = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    output, vitals = attemper.attention(query, key, value, **options)
    expected = torch.autograd.grad(output.float().square().sum(), inputs)
    direct.clear()
    detached = run_attention("attention", query, key, value, SIGNS, Execution(detached=True), **options)
    assert torch.equal(detached.output, output)
    for name in SIGNS:
        sign = getattr(detached.vitals, name)
        assert torch.equal(sign, getattr(vitals, name))
        assert not sign.requires_grad
    assert torch.equal(detached.vitals._lse_low, vitals._lse_low)
    found = torch.autograd.grad(detached.output.float().square().sum(), inputs)
    assert direct == ["forward", "backward"]
    for gradient, same in zip(found, expected, strict=True):
        assert torch.equal(gradient, same)
    again = run_attention("attention", query, key, value, SIGNS, Execution(detached=True), **options).output
    (first, *_) = torch.autograd.grad(again.sum(), inputs, create_graph=True)
    with pytest.raises(KernelUnavailable, match="does not compute second derivatives"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(direct, dtype):
    """Tensors that already have the low dtype go straight to the kernel; others are cast first, then go the same way."""
    inputs = tensors(dtype, tracked=True)
    low = [tensor.detach().to(torch.bfloat16).requires_grad_() for tensor in inputs]
    output = attemper.attention(*low, causal=True).output
    expected = torch.autograd.grad(output.float().square().sum(), low)
    direct.clear()
    with torch.autocast("cpu", torch.bfloat16):
        output_cast = attemper.attention(*inputs, causal=True).output
        found = torch.autograd.grad(output_cast.float().square().sum(), inputs)
    assert torch.equal(output_cast, output)
    for gradient, low_gradient in zip(found, expected, strict=True):
        assert torch.equal(gradient, low_gradient.to(dtype))
    assert direct == ["forward", "backward"]


def test_what_was_saved_and_written_to_is_noticed():
    inputs = tensors(tracked=True)
    output = attemper.sdpa(*inputs, enable_gqa=True)
    output.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_signs_share_no_memory():
    vitals = attemper.attention(*tensors()).vitals
    places = {getattr(vitals, name).untyped_storage().data_ptr() for name in vitals.measured}
    assert len(places) == len(vitals.measured)


def test_threads_do_not_disturb_one_another():
    many = [tensors(groups=H) for _ in range(4)]
    expected = [attemper.sdpa(*inputs) for inputs in many]
    wrong = []

    def work(inputs, output):
        for _ in range(50):
            if not torch.equal(attemper.sdpa(*inputs), output):
                wrong.append(1)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(many, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_auto_takes_the_first_kernel_that_serves_a_call(direct, monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", {"blockwise": kernels.KERNELS["blockwise"], **kernels.KERNELS})
    attemper.attention(*tensors())
    assert direct == []


@pytest.mark.parametrize("shape", [(1, 2, 5, 8), (2, 5, 8)], ids=["4-d", "3-d"])
@pytest.mark.parametrize(
    "signs", [lambda: iter(["lse", "sum_p2"]), lambda: np.array(["lse", "sum_p2"])], ids=["iterator", "array"]
)
def test_signs_of_any_kind_reach_every_path(signs, shape):
    assert attemper.attention(*[torch.randn(shape)] * 3, signs=signs()).vitals.measured == ("lse", "sum_p2")


def swap_data(key):
    key.data = torch.randn(1, 2, 4000, 8)


CHANGED = {
    "other data": (swap_data, lambda t: t),
    "a slice": (lambda key: None, lambda t: t[:, :, :1] if t.dim() > 2 and t.shape[2] == 5 else t),
    "another dtype": (lambda key: None, lambda t: t.bfloat16() if t.dtype == torch.float32 else t),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_saved_tensor_that_changed_is_refused(change):
    between, unpack = CHANGED[change]
    query, key, value = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (5, 9, 9))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        output = attemper.attention(query, key, value).output
    between(key)
    with pytest.raises(InputError, match="a tensor that was saved for the backward has another shape or dtype"):
        torch.autograd.grad(output.sum(), (query, value))


def test_a_lazy_sign_of_a_saved_tensor_counts():
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: torch._neg_view(t.neg()) if t.is_floating_point() else t
    ):
        output = attemper.attention(query, query, query).output
    plain = attemper.attention(query, query, query).output
    (found,), (expected,) = (torch.autograd.grad(o.square().sum(), query) for o in (output, plain))
    assert torch.equal(found, expected)


def test_a_dtype_that_dlpack_refuses_is_refused_in_our_words():
    with pytest.raises(InputError, match="must be"):
        attemper.attention(*[torch.empty(1, 1, 4, 4, dtype=torch.bits8)] * 3)
