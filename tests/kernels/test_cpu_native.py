"""The extension of the native kernel against its twin: which calls are plain, which are valid, and the block of signs."""

import gc
import sys
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attemper.errors import InputError
from attemper.heads import COLUMNS
from attemper.kernels.contract import ALL_SIGNS, ARGMAX_BIT, BIT, OUTPUT_LOW_BIT
from attemper.vitals import SIGNS
from native import native, needed

if native is not None:
    from attemper.kernels.cpu import twin

pytestmark = [
    needed,
    pytest.mark.skipif(native is None or not native.bound, reason="needs torch's table of DLPack"),
]
B, H, G, ROWS, KEYS, E = 2, 4, 2, 3, 5, 8
FIELDS = ("output_low", "argmax", "lse_low", *SIGNS)


def lost_storage(t):
    t.untyped_storage().resize_(0)
    return t


def dead(transform):
    """A tensor of a functorch transform that is over."""
    kept = []
    transform(lambda t: (kept.append(t), t.sum())[1])(torch.randn(1, 2, 4, 8))
    return kept[-1]


def fake():
    with FakeTensorMode():
        return torch.empty(1, 2, 4, 8)


def inference(t):
    with torch.inference_mode():
        return t.clone()


class Own(torch.Tensor):
    pass


KINDS = {
    "plain": lambda t: t,
    "by token": lambda t: t.transpose(1, 2),
    "expanded": lambda t: t[:, :1].expand(1, 2, 4, 8),
    "parameter": torch.nn.Parameter,
    "tracked": lambda t: t.requires_grad_(),
    "buffer": torch.nn.Buffer,
    "uninitialized": lambda t: torch.nn.UninitializedParameter(),
    "lazy clone": torch._lazy_clone,
    "negated": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
    "complex": lambda t: torch.complex(t, t),
    "conjugated": lambda t: torch.complex(t, t).conj(),
    "meta": lambda t: t.to("meta"),
    "coo": torch.Tensor.to_sparse,
    "csr": lambda t: t[0, 0].to_sparse_csr(),
    "mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[0]]),
    "jagged": lambda t: torch.nested.nested_tensor([t[0, 0], t[0, 0]], layout=torch.jagged),
    "lazy zeros": lambda t: torch._efficientzerotensor(t.shape),
    "functional": torch._to_functional_tensor,
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "integer": lambda t: t.long(),
    "boolean": lambda t: t > 0,
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "half": torch.Tensor.half,
    "double": torch.Tensor.double,
    "empty": lambda t: t[:0],
    "scalar": torch.Tensor.sum,
    "5 dimensions": lambda t: t[None],
    "without storage": lost_storage,
    "inference": inference,
    "dead batch": lambda t: dead(torch.func.vmap),
    "dead gradient": lambda t: dead(torch.func.grad),
    "fake": lambda t: fake(),
    "subclass": lambda t: t.as_subclass(Own),
    "none": lambda t: None,
    "array": torch.Tensor.numpy,
    "text": lambda t: "causal",
}


@pytest.mark.filterwarnings("ignore")  # of sparse, nested and quantized tensors, which torch calls prototypes
@pytest.mark.parametrize("kind", KINDS)
def test_the_guard_judges_a_tensor_as_its_twin_does(kind):
    tensor = KINDS[kind](torch.randn(1, 2, 4, 8))
    others = torch.randn(4, 1, 2, 4, 8).unbind()
    for index in range(5):
        given = [*others[:index], tensor, *others[index:]]
        for mode in (nullcontext, torch.no_grad):
            with mode():
                assert native.library.guard(*given) == twin.guard(*given)


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class GradInInference:
    def __enter__(self):
        self.entered = torch.inference_mode(), torch.enable_grad()
        for mode in self.entered:
            mode.__enter__()

    def __exit__(self, *error):
        for mode in self.entered[::-1]:
            mode.__exit__(*error)


STATES = {
    "at rest": nullcontext,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "grad in inference mode": GradInInference,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast of another device": lambda: torch.autocast("cuda", torch.bfloat16),
    "function mode": Passing,
    "dispatch mode": Seeing,
    "device": lambda: torch.device("cpu"),
    "forward mode": forward_ad.dual_level,
    "profiler": torch.autograd.profiler.profile,
}


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", STATES)
def test_the_guard_judges_a_state_as_its_twin_does(state, dtype):
    for tracked in (False, True):
        query, key, value = torch.randn(3, 1, 2, 4, 8, dtype=dtype).unbind()
        query = query.clone().requires_grad_(tracked)
        with STATES[state]():
            found = native.library.guard(query, key, value, None, None)
            assert found == twin.guard(query, key, value, None, None)
        assert (found > 0) == (
            state in ("at rest", "no_grad", "inference mode", "autocast off", "autocast of another device")
            or (state == "autocast" and dtype == torch.bfloat16)
        )


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace. is deprecated")
def test_the_guard_judges_transforms_and_traces_as_its_twin_does():
    found = []

    def look(t):
        plain = torch.ones(1, 2, 4, 8)
        for one in (t, plain):
            given = (one, plain, plain, None, None)
            found.append((native.library.guard(*given), twin.guard(*given)))
        return t.sum()

    torch.func.vmap(look)(torch.randn(1, 2, 4, 8))
    torch.func.grad(look)(torch.randn(1, 2, 4, 8))
    torch.jit.trace(look, torch.randn(1, 2, 4, 8), check_trace=False)
    assert found == [(0, 0)] * 6


def test_the_guard_lets_errors_of_torch_through(monkeypatch):
    def fails():
        raise LookupError("torch broke")

    t = torch.randn(1, 2, 4, 8)
    for name in ("grad_mode", "functorch", "dispatch_modes", "is_neg", "any_autocast"):
        native.bind(**{name: lambda *_: fails()})
        try:
            with pytest.raises(LookupError, match="torch broke"):
                native.library.guard(t, t, t, None, None)
        finally:
            native.bind()
    assert native.library.guard(t, t, t, None, None) == 1


def asked(**changed):
    """The arguments of a forward, valid unless they are changed."""
    dtype = changed.pop("dtype", torch.float32)
    usual = {
        "query": torch.randn(B, H, ROWS, E).to(dtype),
        "key": torch.randn(B, G, KEYS, E).to(dtype),
        "value": torch.randn(B, G, KEYS, E).to(dtype),
        **dict.fromkeys(("mask", "gain")),
        "causal": False,
        **dict.fromkeys(("window", "scale", "softcap")),
        "sign_bits": ALL_SIGNS,
        "grouped": True,
        "saved": False,
    }
    assert set(changed) <= set(usual)
    return {**usual, **changed}


VALID = {
    "plain": {},
    "no values": {"value": None},
    "wide values": {"value": torch.randn(B, G, KEYS, 11)},
    "no signs": {"sign_bits": 0},
    "some signs": {"sign_bits": BIT["mean"] | BIT["sum_p2"]},
    "saved": {"saved": True, "sign_bits": ALL_SIGNS | ARGMAX_BIT | OUTPUT_LOW_BIT},
    "saved half": {"saved": True, "sign_bits": ALL_SIGNS | ARGMAX_BIT | OUTPUT_LOW_BIT, "dtype": torch.bfloat16},
    "saved without signs": {"saved": True, "sign_bits": 0},
    "half": {"dtype": torch.float16},
    "double": {"dtype": torch.float64},
    "causal": {"causal": True},
    "lower right": {"causal": "lower_right"},
    "window": {"window": 2},
    "causal window": {"window": 2, "causal": True},
    "window at the end": {"window": 2, "causal": "lower_right"},
    "long window": {"window": 2**63 - 1, "causal": "lower_right"},
    "scale": {"scale": -0.3},
    "no scale": {"scale": 0.0},
    "softcap": {"softcap": 3.0},
    "equal heads": {"key": torch.randn(B, H, KEYS, E), "value": torch.randn(B, H, KEYS, E), "grouped": False},
    "by token": {"query": torch.randn(B, ROWS, H, E).transpose(1, 2)},
    "turned keys": {"key": torch.randn(B, G, E, KEYS).mT},
    "repeated keys": {"key": torch.randn(B, G, 1, E).expand(B, G, KEYS, E)},
    "every other row": {"query": torch.randn(B, H, 2 * ROWS, E)[:, :, ::2]},
    "boolean mask": {"mask": torch.rand(B, 1, 1, KEYS) > 0.4},
    "full mask": {"mask": torch.randn(B, H, ROWS, KEYS)},
    "turned mask": {"mask": torch.randn(B, H, KEYS, ROWS).mT},
    "half mask": {"mask": torch.randn(1, H, ROWS, 1).bfloat16()},
    "one number as mask": {"mask": torch.randn(1, 1, 1, 1)},
    "gain": {"gain": torch.tensor(0.3)},
    "gain in a list": {"gain": torch.tensor([0.3])},
    "gain of heads": {"gain": torch.rand(H)},
    "gain of rows": {"gain": torch.rand(B, 1, ROWS, 1)},
    "half with gain": {"gain": torch.rand(H), "dtype": torch.bfloat16},
    "gain and scale": {"gain": torch.rand(H), "scale": 0.5},
    "parameter": {"query": torch.nn.Parameter(torch.randn(B, H, ROWS, E))},
}
NUMBERS = (True, 1, 0, -1, float("nan"), float("inf"), 1e39, "1", 2**64, torch.tensor(1.0))
REFUSED = {
    **{f"{name} of 3 dimensions": {name: torch.randn(G, KEYS, E)} for name in ("query", "key", "value")},
    **{f"{name} of 5 dimensions": {name: torch.randn(1, B, G, KEYS, E)} for name in ("query", "key", "value")},
    **{f"{name} in double": {name: torch.randn(B, G, KEYS, E).double()} for name in ("query", "key", "value")},
    **{
        f"{name} on meta": {name: torch.randn(B, G, KEYS, E, device="meta")}
        for name in ("query", "key", "value", "mask", "gain")
    },
    **{f"{name} of text": {name: "x"} for name in ("query", "key", "value", "mask", "gain")},
    **{
        f"{name} sparse": {name: torch.randn(B, G, KEYS, E).to_sparse()}
        for name in ("query", "key", "value", "mask", "gain")
    },
    "no query": {"query": None},
    "no key": {"key": None},
    "integers": {"dtype": torch.int64},
    "float8": {"dtype": torch.float8_e4m3fn},
    "empty batch": {name: torch.randn(0, H, ROWS, E) for name in ("query", "key", "value")},
    "no keys": {name: torch.randn(B, G, 0, E) for name in ("key", "value")},
    "no rows": {"query": torch.randn(B, H, 0, E)},
    "no width": {name: torch.randn(B, H, ROWS, 0) for name in ("query", "key")},
    "no values' width": {"value": torch.randn(B, G, KEYS, 0)},
    "another batch": {"key": torch.randn(1, G, KEYS, E), "value": torch.randn(1, G, KEYS, E)},
    "another batch of values": {"value": torch.randn(1, G, KEYS, E)},
    "another width": {"key": torch.randn(B, G, KEYS, E + 1)},
    "another length of values": {"value": torch.randn(B, G, KEYS + 1, E)},
    "another number of value heads": {"value": torch.randn(B, H, KEYS, E)},
    "heads that do not divide": {"key": torch.randn(B, 3, KEYS, E), "value": torch.randn(B, 3, KEYS, E)},
    "more key heads": {"key": torch.randn(B, 8, KEYS, E), "value": torch.randn(B, 8, KEYS, E)},
    "grouped without saying so": {"grouped": False},
    "integer mask": {"mask": torch.ones(B, H, ROWS, KEYS, dtype=torch.int64)},
    "float8 mask": {"mask": torch.ones(B, H, ROWS, KEYS).to(torch.float8_e4m3fn)},
    "flat mask": {"mask": torch.rand(ROWS, KEYS) > 0.4},
    "short mask": {"mask": torch.rand(B, H, ROWS, KEYS - 1) > 0.4},
    "long gain": {"gain": torch.rand(H + 1)},
    "empty gain": {"gain": torch.rand(0)},
    "wide gain": {"gain": torch.rand(1, 1, 1, KEYS)},
    "gain of 2 dimensions": {"gain": torch.rand(1, H)},
    "double gain": {"gain": torch.rand(H).double()},
    "a gain of integers": {"gain": torch.ones(H, dtype=torch.int64)},
    **{f"causal={n!r}": {"causal": n} for n in (None, 1, 0, "upper_left", "", "lower_right ", 0.0)},
    **{f"window={n!r}": {"window": n} for n in NUMBERS if type(n) is not int or n < 1 or n > 2**63},
    **{f"scale={n!r}": {"scale": n} for n in NUMBERS},
    **{f"softcap={n!r}": {"softcap": n} for n in (*NUMBERS, 0.0, -1.0)},
}


def same(a, b):
    if a is None or b is None:
        return a is b
    return torch.equal(a, b) and (a.dtype, a.shape, a.stride(), a.requires_grad) == (
        b.dtype,
        b.shape,
        b.stride(),
        b.requires_grad,
    )


@pytest.mark.parametrize("changed", VALID.values(), ids=VALID)
def test_forward_gives_what_its_twin_gives(changed):
    given = asked(**changed).values()
    with torch.no_grad():
        (output, block), (expected, signs) = native.library.forward(*given), twin.forward(*given)
    assert same(output, expected)
    assert (block is None) == (signs is None)
    for name in (*FIELDS, "packed") if block is not None else ():
        assert same(getattr(block, name), getattr(signs, name)), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changed", REFUSED.values(), ids=REFUSED)
def test_forward_refuses_what_its_twin_refuses(changed):
    given = asked(**changed).values()
    assert twin.forward(*given) is None
    assert native.library.forward(*given) is None


SAVED = ALL_SIGNS | ARGMAX_BIT | OUTPUT_LOW_BIT


def arriving(output, block, names):
    """Gradients for the output and the signs of these names, as Upstream lists them."""
    return tuple(
        torch.randn_like(tensor) if tensor is not None and name in names else None
        for name, tensor in (("output", output), *((name, getattr(block, name)) for name in SIGNS[1:]))
    )


@pytest.mark.parametrize("names", [("output",), ("output", *SIGNS[1:]), ("entropy", "peak"), ()], ids=str)
@pytest.mark.parametrize("changed", VALID.values(), ids=VALID)
def test_backward_gives_what_its_twin_gives(changed, names):
    given = {**asked(**changed), "saved": True, "sign_bits": SAVED}
    if given["gain"] is not None:
        given["gain"] = twin._gain(given["gain"], given["query"])
    with torch.no_grad():
        (output, block), (_, signs) = native.library.forward(*given.values()), twin.forward(*given.values())
        upstream = arriving(output, block, names)
        for needs in (0b10111, 0b00001, 0b00110, 0):
            args = list(given.values())[:5]
            found, expected = (differentiated(one, args, output, upstream, needs) for one in (block, signs))
            assert len(found) == len(expected)
            assert all(map(same, found, expected))


def differentiated(block, tensors, output, upstream, needs):
    saved, memory = block.saved()
    return saved.backward(*tensors, output, memory, upstream, needs)


UNREADY = {
    "a mask's gradient": {"needs": 0b01000},
    "a gain's gradient": {"gain": torch.rand(H), "needs": 0b10000},
    "signs that were not saved": {"saved": False},
    "a strided output": {"output": lambda t: t.mT.contiguous().mT},
    "a strided gradient of a sign": {"arriving": lambda t: t.mT.contiguous().mT},
    "a gradient of a sign in double": {"arriving": torch.Tensor.double},
    "strided memory": {"memory": lambda t: t.repeat_interleave(2)[::2]},
    "memory that begins anywhere": {"memory": lambda t: torch.cat((t[:1], t))[1:]},
}
CHANGED = {
    "a shorter key": {"key": torch.randn(B, G, KEYS - 1, E)},
    "a longer query": {"query": torch.randn(B, H, ROWS + 1, E)},
    "a wide value": {"value": torch.randn(B, G, KEYS, E + 1)},
    "a mask of another shape": {"mask": torch.rand(B, 1, 1, KEYS + 1) > 0},
    "a gain of another shape": {"gain": torch.rand(H + 1)},
    "everything in double": {
        name: torch.randn(B, n, m, E).double()
        for name, n, m in (("query", H, ROWS), ("key", G, KEYS), ("value", G, KEYS))
    },
    "a query in half": {"query": torch.randn(B, H, ROWS, E).half()},
    "an output of another width": {"output": lambda t: t[..., 1:]},
    "an output in half": {"output": torch.Tensor.half},
    "no output": {"output": lambda t: None},
    "a sign that was not measured": {"sign_bits": BIT["lse"]},
    "a meta output": {"output": lambda t: t.to("meta")},
    "shorter memory": {"memory": lambda t: t[:-1]},
    "memory of other numbers": {"memory": lambda t: t.view(torch.uint8)},
    "no memory": {"memory": lambda t: None},
}


def differentiate(changes):
    """What a block's backward gives for tensors that changed since its forward."""
    changes, given = dict(changes), asked(mask=torch.rand(B, 1, 1, KEYS) > 0.2)
    given.update(saved=changes.pop("saved", True), sign_bits=changes.pop("sign_bits", ALL_SIGNS))
    output, block = native.library.forward(*given.values())
    output = changes.pop("output", lambda t: t)(output)
    upstream = (torch.randn(B, H, ROWS, E), changes.pop("arriving", lambda t: t)(torch.randn(B, H, ROWS)), *[None] * 5)
    needs = changes.pop("needs", 0b00111)
    saved, memory = block.saved()
    memory = changes.pop("memory", lambda t: t)(memory)
    return saved.backward(*list({**given, **changes}.values())[:5], output, memory, upstream, needs)


@pytest.mark.parametrize("changes", UNREADY.values(), ids=UNREADY)
def test_backward_leaves_to_python_what_it_cannot_read(changes):
    assert differentiate(changes) is None
    assert differentiate({}) is not None


@pytest.mark.parametrize("changes", CHANGED.values(), ids=CHANGED)
def test_backward_refuses_what_changed(changes):
    with pytest.raises(InputError, match="a tensor that was saved for the backward has another shape or dtype now"):
        differentiate(changes)


def block_of(saved=False):
    return native.library.forward(*asked(saved=saved).values())[1]


def test_a_sign_of_a_block_is_a_tensor_of_its_own():
    block = block_of()
    lse, mean = block.lse, block.mean
    before = mean.clone()
    lse.add_(1)
    assert (lse._version, mean._version) == (1, 0)
    assert torch.equal(mean, before)
    assert block.lse is lse
    assert not lse._is_view()
    assert lse.untyped_storage().nbytes() == lse.nbytes
    assert lse.data_ptr() % 64 == 0


def test_what_a_backward_reads_is_not_what_a_user_writes_into():
    given = asked(saved=True).values()
    (output, block), (_, other) = native.library.forward(*given), native.library.forward(*given)
    block.lse.zero_()
    args = (list(given)[:5], output, (torch.ones_like(output), *[None] * 6), 0b111)
    assert all(map(same, differentiated(block, *args), differentiated(other, *args)))


def test_a_block_in_a_cycle_is_collected():
    """A tensor may have attributes, among them the vitals that it is from."""
    block = block_of()
    sign = block.lse
    sign.block, ended = block, weakref.ref(sign)
    del block, sign
    gc.collect()
    assert ended() is None


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("state", [*STATES, "fake", "meta", "vmap", "grad"])
def test_a_sign_can_be_read_in_any_state(state, saved):
    """It is memory that exists, whatever is active when it is first read."""
    more = {"fake": FakeTensorMode, "meta": lambda: torch.device("meta")}
    given, found = asked(saved=saved).values(), []
    block, expected = native.library.forward(*given)[1], native.library.forward(*given)[1].entropy
    if state in ("vmap", "grad"):
        transform = getattr(torch.func, state)
        transform(lambda t: (found.append(block.entropy), t.sum())[1])(torch.ones(3))
    else:
        with {**STATES, **more}[state]():
            found.append(block.entropy)
    assert type(found[0]) is torch.Tensor
    assert torch.equal(found[0], expected)
    assert not found[0].requires_grad


def test_a_sign_keeps_the_memory_of_its_block():
    kept = [block_of().entropy for _ in range(50)]
    for sign in kept:
        sign.fill_(7)
    ended = []

    def end():
        kept.clear()  # the last tensors of their blocks end in another thread
        ended.append(True)

    copies = [sign.clone() for sign in kept]
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert ended
    assert all(bool((copy == 7).all()) for copy in copies)


def test_no_reference_is_kept_or_lost():
    given = asked(mask=torch.rand(B, 1, 1, KEYS) > 0.1, gain=torch.rand(H))
    wrong = asked(scale="x")

    def run():
        native.library.guard(*list(given.values())[:5])
        native.library.guard("x", *list(given.values())[1:5])
        native.library.forward(*wrong.values())
        _, block = native.library.forward(*given.values())
        return [getattr(block, name) for name in FIELDS]

    held = [*given.values(), *wrong.values(), *native.names().values(), native.library.Block, True, False]
    run()
    before = [sys.getrefcount(one) for one in held]
    for _ in range(200):
        run()
    assert max(abs(sys.getrefcount(one) - count) for one, count in zip(held, before, strict=True)) < 20


def test_threads_call_it_at_once():
    given = asked(query=torch.randn(B, H, 60, E)).values()
    expected, wrong = native.library.forward(*given), []

    def work():
        for _ in range(200):
            output, block = native.library.forward(*given)
            if not (torch.equal(output, expected[0]) and torch.equal(block.entropy, expected[1].entropy)):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FOLDED = {
    "a sign in double": {"sum_p2": torch.zeros(B, H, ROWS).double()},
    "a sign of another shape": {"sum_p2": torch.zeros(B, H, ROWS + 1)},
    "a strided sign": {"sum_p2": torch.zeros(B, ROWS, H).mT},
    "a sign that is not there": {"sum_p2": None},
    "rows of another shape": {"keep": torch.ones(B, 1, ROWS, dtype=torch.bool)},
    "rows as numbers": {"keep": torch.ones(B, H, ROWS)},
    "less room": {"found": torch.zeros(H - 1, len(COLUMNS) + 1, dtype=torch.float64)},
    "room for other columns": {"found": torch.zeros(H, len(COLUMNS), dtype=torch.float64)},
    "room behind its end": {"first": 1},
    "room before its begin": {"first": -1},
}


@pytest.mark.parametrize("changes", FOLDED.values(), ids=FOLDED)
def test_fold_refuses_memory_of_another_shape(changes):
    block, columns = block_of(), len(COLUMNS) + 1
    given = {name: getattr(block, name) for name in (*SIGNS, "lse_low")}
    given.update(
        keep=torch.ones(B, H, ROWS, dtype=torch.bool), found=torch.zeros(H, columns, dtype=torch.float64), first=0
    )

    def fold(**tensors):
        *signs, keep, found, first = {**given, **tensors}.values()
        native.library.fold(tuple(signs), keep, found, first, 8, 0.9)

    fold()
    with pytest.raises(TypeError, match=r"^fold\(\): "):
        fold(**changes)


@pytest.mark.parametrize("saved", [False, True])
def test_fold_takes_a_block_as_it_takes_its_signs(saved):
    block, columns = block_of(saved), len(COLUMNS) + 1
    assert block.foldable == (B, H, ROWS)
    whole, parts = (torch.zeros(3 * H, columns, dtype=torch.float64) for _ in range(2))
    native.library.fold(block, None, whole, H, 2, 0.9)
    native.library.fold(tuple(getattr(block, name) for name in (*SIGNS, "lse_low")), None, parts, H, 2, 0.9)
    assert torch.equal(whole, parts)
    assert (whole[H : 2 * H] != 0).any()
    assert not whole[:H].any()
    assert not whole[2 * H :].any()


@pytest.mark.parametrize("changes", [{"sign_bits": BIT["lse"]}, {"dtype": torch.float64}], ids=["some signs", "double"])
def test_fold_refuses_a_block_of_other_signs(changes):
    block = native.library.forward(*asked(**changes).values())[1]
    assert block.foldable is None
    with pytest.raises(TypeError, match=r"^fold\(\): "):
        native.library.fold(block, None, torch.zeros(H, len(COLUMNS) + 1, dtype=torch.float64), 0, 8, 0.9)


def test_write_refuses_tensors_that_do_not_fit():
    tensors = list(asked().values())[:5]
    results = (torch.empty(B, H, ROWS, E), *[None] * 10)
    native.library.write(*tensors, None, None, None, 1.0, None, 0.0, 0, results)
    for place, tensor in (
        (1, torch.randn(B, G, KEYS, E + 1)),
        (2, "x"),
        (3, torch.ones(7, 7, 7, 7)),
        (4, torch.ones(7)),
    ):
        with pytest.raises(TypeError, match="do not fit one another"):
            native.library.write(
                *tensors[:place], tensor, *tensors[place + 1 :], None, None, None, 1.0, None, 0.0, 0, results
            )
    with pytest.raises(TypeError, match="result 0 is no tensor"):
        native.library.write(*tensors, None, None, None, 1.0, None, 0.0, 0, ("x", *results[1:]))


def test_a_block_is_made_by_a_forward_alone():
    with pytest.raises(TypeError, match="cannot create"):
        native.library.Block()
    with pytest.raises(AttributeError):
        block_of().lse = None
    with pytest.raises(TypeError, match=r"forward\(\) takes 12 arguments; got 1"):
        native.library.forward(None)
