"""Launches without a GPU: Triton compiles for Hopper, and driver.c, which keeps what it should launch, stands for the driver."""

import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attemper
from attemper import kernels
from attemper.kernels.contract import ALL_SIGNS, OUTPUT_LOW_BIT, Capabilities, Problem, Results
from attemper.operation.call import prepare
from attemper.vitals import SIGNS
from attemper.watch.record.sums import StepAccumulator
from scripts import walk

READY = (
    os.environ.get("TRITON_INTERPRET") != "1"
    and importlib.util.find_spec("triton") is not None
    and shutil.which("gcc") is not None
    and not torch.cuda.is_available()
)
pytestmark = pytest.mark.skipif(not READY, reason="needs triton beside torch without a GPU, and gcc: make triton")
SIZES = {"i32": [4], "i64": [8], "fp32": [4], "fp64": [8], "constexpr": []}
OF_DESCRIPTOR = [128, *[4] * 4, *[8] * 4]  # the hardware's own, sizes, strides
MOST, FIELDS = 96, 128


class Launched(ctypes.Structure):
    """As driver.c has it."""

    _fields_ = (
        ("config", ctypes.c_uint * 8),
        ("stream", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("parameters", (ctypes.c_ubyte * FIELDS) * MOST),
    )


class Known(ctypes.Structure):
    """The sizes of a function's parameters."""

    _fields_ = (("function", ctypes.c_void_p), ("count", ctypes.c_int), ("sizes", ctypes.c_int * MOST))


class Driver:
    """What stands in for CUDA's driver."""

    def __init__(self, library):
        self.refuses, self.without_context, self.launches = (
            ctypes.c_int.in_dll(library, name) for name in ("refuses", "without_context", "launches")
        )
        self.launched = (Launched * MOST).in_dll(library, "launched")
        self.known = (Known * MOST).in_dll(library, "known")
        self.functions = []

    def know(self, compiled):
        if compiled.function in [function.function for function in self.functions]:
            return
        sizes = []
        for kind in compiled.src.signature.values():
            sizes += [8] if kind[0] == "*" else OF_DESCRIPTOR if kind.startswith("tensordesc") else SIZES[kind]
        entry = self.known[len(self.functions)]
        self.functions.append(compiled)
        entry.function, entry.count = compiled.function, len(sizes) + 2  # two scratch memories
        entry.sizes[: entry.count] = [*sizes, 8, 8]

    def take(self):
        """All that was launched since the last time: config, stream, function and the bytes of each parameter."""
        found = []
        for one in self.launched[: self.launches.value]:
            known = next(entry for entry in self.known if entry.function == one.function)
            sizes = known.sizes[: known.count]
            bytes_ = [bytes(field)[:size] for field, size in zip(one.parameters, sizes, strict=False)]
            found.append(SimpleNamespace(config=[*one.config], stream=one.stream, function=one.function, given=bytes_))
        self.launches.value = 0
        return found

    def by_name(self, one):
        """The parameters of a launch by the names of the kernel's arguments, as numbers; of a descriptor, its address."""
        compiled, given, found = next(c for c in self.functions if c.function == one.function), [*one.given], {}
        for name, kind in compiled.src.signature.items():
            if kind != "constexpr":
                first, *_ = [given.pop(0) for _ in range(len(OF_DESCRIPTOR) if kind.startswith("tensordesc") else 1)]
                found[name] = int.from_bytes(first[:8], sys.byteorder)
        assert given == [bytes(8)] * 2
        return compiled.name, found


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """CUDA's driver for Triton and for us, loaded by the name of the real one."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    folder = tmp_path_factory.mktemp("driver")
    include, library = Path(triton.__file__).parent / "backends/nvidia/include", folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-I", include]
    subprocess.run(["gcc", *flags, Path(__file__).with_name("driver.c"), "-o", library], check=True)

    class OnHopper(CudaDriver):
        def __init__(self):
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 700 + device

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_LIBCUDA_PATH", str(folder))
    patch.setattr(triton.runtime.driver, "_active", None)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    triton.runtime.driver.set_active(OnHopper())
    kernels.load("triton")._launch.driver_functions.cache_clear()
    yield Driver(loaded)
    patch.undo()


@pytest.fixture
def world(driver, monkeypatch):
    """The kernels as on Hopper, nothing planned, and what was planned since."""
    package = kernels.load("triton")
    module, planned = package._launch, []
    monkeypatch.setitem(kernels.KERNELS, "triton", Capabilities(additive=False))
    for owner in (package, package._decode):
        monkeypatch.setattr(owner, "room", lambda device: 227 << 10)
    monkeypatch.setattr(package, "is_hopper", lambda device: True)
    monkeypatch.setattr(module, "PLANS", {})
    init = module.LaunchPlan.__init__

    def plan(plan, launch, compiled, n_tensors):
        init(plan, launch, compiled, n_tensors)
        driver.know(compiled)
        planned.append((plan, launch, compiled, n_tensors))

    monkeypatch.setattr(module.LaunchPlan, "__init__", plan)
    driver.refuses.value = driver.without_context.value = driver.launches.value = 0
    library = kernels.extension()
    yield SimpleNamespace(package=package, module=module, planned=planned, driver=driver)
    library.forget()


def vectors(*shape, dtype=torch.bfloat16, by_token=False, tracked=True):
    batch, heads, rows, dim = shape
    made = torch.randn(batch, rows, heads, dim, dtype=dtype).transpose(1, 2) if by_token else torch.randn(*shape)
    return made.to(dtype).requires_grad_(tracked)


def attend(query, key, value, signs=False, **options):
    attended = attemper.attention(query, key, value, kernel="triton", **options)
    loss = attended.output.float().sum()
    if signs:
        loss = loss + attended.vitals.entropy.sum() + attended.vitals.variance.sum()
    loss.backward()


def decode(signs):
    query, key, value = (vectors(2, heads, n, 64).detach() for heads, n in ((4, 1), (2, 700), (2, 700)))
    attemper.attention(query, key, value, signs=signs, kernel="triton")


def masked(dtype):
    query, key, value = (vectors(2, 2, 40, 24, dtype=dtype) for _ in range(3))
    mask, scale = torch.randn(2, 1, 40, 40, requires_grad=True), torch.ones(2, requires_grad=True)
    attend(query, key, value, mask=mask.to(dtype), scale=scale, window=9, softcap=5.0)


CASES = {
    "half precision": lambda: attend(*(vectors(2, 3, 140, 64) for _ in range(3)), causal=True),
    "by token": lambda: attend(*(vectors(2, 3, 140, 64, by_token=True) for _ in range(3))),
    "grouped, wider values": lambda: attend(vectors(1, 4, 140, 32), vectors(1, 2, 190, 32), vectors(1, 2, 190, 64)),
    "gradients of signs": lambda: attend(*(vectors(2, 3, 140, 64) for _ in range(3)), signs=True),
    "float32": lambda: attend(*(vectors(2, 3, 140, 64, dtype=torch.float32) for _ in range(3))),
    "signs alone": lambda: attemper.measure(*(vectors(1, 2, 200, 64).detach() for _ in range(2)), kernel="triton"),
    "masked, gain": lambda: masked(torch.float32),
    "decode": lambda: decode("all"),
}


def in_triton_s_way(world, plan, tensors, numbers=(), programs=None):
    """Start it by Triton's own launcher."""
    launcher, plan.launcher = plan.launcher, None
    plan.run(tensors, numbers, programs)
    plan.launcher = launcher
    return world.driver.take()


@pytest.mark.parametrize("case", CASES)
def test_the_driver_gets_from_us_what_it_gets_from_triton(world, case):
    CASES[case]()
    world.driver.launches.value = 0
    assert world.planned
    for plan, launch, _, n_tensors in world.planned:
        place = 0
        while place < len(launch.args) and not isinstance(launch.args[place], (int, float)):
            place += 1
        tensors = [getattr(arg, "base", arg) for arg in launch.args[:place]]
        assert plan.launcher is not None
        plan.run(tensors, launch.args[place:n_tensors], launch.programs)
        ours = world.driver.take()
        assert ours == in_triton_s_way(world, plan, tensors, launch.args[place:n_tensors], launch.programs)
        [one] = ours
        assert one.config[:3] == [*launch.programs]
        assert one.stream == 700
        shown = world.driver.by_name(one)[1]
        addresses = {name: tensor.data_ptr() for name, tensor in zip(launch.kernel.arg_names, tensors, strict=False)}
        assert {name: shown[name] for name in addresses} == addresses
    tiled = any(plan.tiles for plan, *_ in world.planned)
    assert tiled == (case not in ("masked, gain", "decode"))


def given(batch=2, heads=4, groups=2, rows=140, keys=190, dim=64, wide=64, tracked=False, **how):
    shapes = (batch, heads, rows, dim), (batch, groups, keys, dim), (batch, groups, keys, wide)
    return [vectors(*shape, tracked=tracked, **how) for shape in shapes]


AGAIN = {
    "plain": ({}, {}),
    "by token, recorded": ({"by_token": True, "tracked": True}, {"causal": True}),
    "wider values": ({"wide": 32, "tracked": True}, {"causal": "lower_right", "signs": ("mean", "sum_p2")}),
    "no signs": ({"dtype": torch.float32}, {"signs": (), "window": 9, "softcap": 5.0}),
    "a mask of heads": ({}, {"mask": torch.rand(1, 4, 140, 190) > 0.2}),
    "learned scales": ({"tracked": True}, {"scale": torch.ones(4), "mask": torch.zeros(2, 1, 140, 190)}),
    "measured": ({}, {"alone": True, "scale": 0.3}),
}


def run(tensors, alone=False, **options):
    if alone:
        return None, attemper.measure(*tensors[:2], kernel="triton", **options)
    return attemper.attention(*tensors, kernel="triton", **options)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("case", AGAIN)
def test_a_call_like_an_earlier_one_is_started_with_its_own_tensors(world, monkeypatch, case, compiled):
    """By the native library and by Python, and as Triton would start it."""
    how, options = AGAIN[case]
    if not compiled:
        monkeypatch.setattr(kernels, "extension", lambda: None)
    run(given(**how), **options)
    world.driver.take()
    tensors = given(**how)
    output, vitals = run(tensors, **options)
    [found] = world.driver.take()
    signs = vitals.__dict__.get("_signs")
    if signs is None:  # nothing was asked for: what was written is in the launch alone
        assert world.driver.by_name(found)[1]["p_output"] == output.data_ptr()
        return
    query, key, value = tensors
    block = getattr(signs, "_others", signs)  # what a backward will read has its signs with a derivative in one tensor
    written = [block.as_written(name) for name in Results._fields[1:]]
    fields = [None if one is None else one.data_ptr() for one in written]
    mask, gain = options.get("mask"), options.get("scale")
    given_to = (query, key, value, mask, gain if isinstance(gain, torch.Tensor) else None)
    inputs = [query if one is None else one for one in given_to]
    if options.get("alone"):
        inputs[2] = value = query
    vectors_ = (key, key if options.get("alone") else value)
    [(plan, *_)] = [one for one in world.planned if one[1].kernel.fn.__name__ == "forward_kernel"]
    expected = in_triton_s_way(world, plan, (*inputs, *vectors_, output, *fields))
    assert [found] == expected
    if output is not None:
        assert output.stride() == world.package.empty_vectors(query, value.shape[3]).stride()
        assert (signs.output_low is not None) == (query.requires_grad and query.dtype != torch.float32)


def test_only_a_call_like_an_earlier_one_is_run_again(world):
    """It is started by the launch of that one: whatever makes it another call must be in its key."""
    bits = ALL_SIGNS | OUTPUT_LOW_BIT

    def forward(tensors, bits=bits, causal=True, **options):
        problem = prepare("attention", *tensors, causal=causal, **options).problem
        return type(world.package.forward(problem, bits, saved=True)[1])

    assert forward(given()) is Results
    assert forward(given()) is world.package.Signs
    shifted = [torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape) for t in given()]
    sizes = [{"batch": 1}, {"heads": 2}, {"groups": 4}, {"rows": 141}, {"keys": 191}, {"dim": 32}, {"wide": 32}]
    others = [{"causal": False}, {"causal": "lower_right"}, {"scale": 0.5}, {"softcap": 5.0}, {"window": 9}]
    others += [{"mask": torch.ones(140, 190, dtype=torch.bool)}, {"bits": ALL_SIGNS}, {"dropout": 0.5}]
    library = kernels.extension()
    for tensors in [given(**one) for one in (*sizes, {"dtype": torch.float16}, {"by_token": True})] + [shifted]:
        problem = prepare("attention", *tensors, causal=True).problem
        assert library.replay_checked(*problem[:5], *_numbers(problem), bits) is None
    for options in others:
        asked = {"causal": True, **options}
        wanted = asked.pop("bits", bits)
        problem = prepare("attention", *given(), **asked).problem
        assert library.replay_checked(*problem[:5], *_numbers(problem), wanted) is None, options
    library.forget()
    assert forward(given()) is Results


def _numbers(problem: Problem):
    return (problem.seed, problem.left, problem.right, problem.scale, problem.softcap, problem.dropout)


def test_a_backward_after_a_replayed_forward_reads_what_that_wrote(world):
    def call():
        tensors = given(tracked=True)
        attended = attemper.attention(*tensors, kernel="triton")
        upstream = torch.ones_like(attended.output)
        return tensors, attended, upstream, torch.autograd.grad(attended.output, tensors, upstream)

    call()
    world.driver.take()
    (query, key, value), (output, vitals), upstream, grads = call()
    names, started = zip(*map(world.driver.by_name, world.driver.take()), strict=True)
    assert names == ("forward_kernel", "row_terms_kernel", "rows_kernel", "keys_kernel")
    forward, terms, rows, keys = started
    signs = vitals._signs
    for name in ("output", "low", "lse", "lse_low"):
        assert terms[f"p_{name}"] == forward[f"p_{name}"]
    for name in ("visible", "mean", "entropy", "sum_p2"):  # only the gradients of signs need any of these
        assert not terms[f"p_{name}"]
    assert (forward["p_output"], forward["p_lse"]) == (output.data_ptr(), signs.addresses[SIGNS.index("lse")])
    assert terms["p_g"] == rows["p_g"] == keys["p_g"] == upstream.data_ptr()
    assert terms["p_terms"] == rows["p_rows"] == keys["p_rows"]
    tiles = (rows["k_tiles"], rows["v_tiles"], keys["q_tiles"], keys["g_tiles"])
    assert tiles == tuple(tensor.data_ptr() for tensor in (key, value, query, upstream))
    assert [rows["p_dq"], keys["p_dk"], keys["p_dv"]] == [grad.data_ptr() for grad in grads]
    assert [vitals.mean.requires_grad, vitals.visible.requires_grad] == [True, False]


def test_decode_of_a_longer_cache_starts_with_its_own_numbers(world):
    def call(keys):
        query, key, value = (vectors(2, heads, n, 64).detach() for heads, n in ((4, 1), (2, keys), (2, keys)))
        return key, attemper.attention(query, key, value, kernel="triton")

    call(1600)
    world.driver.take()
    key, (output, vitals) = call(2000)
    split, join = world.driver.take()
    assert (split.config[:3], join.config[:3]) == ([6, 4, 1], [8, 1, 1])
    assert len(world.planned) == 2
    (_, split), (_, join) = map(world.driver.by_name, (split, join))
    assert (split["p_key"], split["keys"], split["step_kb"]) == (key.data_ptr(), 2000, key.stride(0))
    assert split["p_parts"] == join["p_parts"]
    assert (join["p_output"], join["p_entropy"]) == (output.data_ptr(), vitals.entropy.data_ptr())
    assert (join["heads"], join["rows"], join["n_rows"], join["splits"]) == (4, 1, 8, 6)


def test_signs_share_their_memory_and_not_their_version(world):
    for _ in range(2):
        found = run(given())[1]
    signs, (memory,) = found._signs, found._signs.memory
    memory.copy_(torch.arange(memory.numel()))
    shape, begins = (2, 4, 140), []
    for name, address in zip((*SIGNS, "lse_low"), signs.addresses, strict=True):
        sign = getattr(signs, name)
        assert (sign.shape, sign.data_ptr(), address % 16) == (shape, address, 0)
        assert sign.dtype == (torch.int32 if name == "visible" else torch.float32)
        assert sign.untyped_storage().data_ptr() == memory.data_ptr()
        begins.append(address - memory.data_ptr())
    begins.sort()
    assert begins[0] == 0
    steps = [after - before for before, after in zip(begins, [*begins[1:], memory.nbytes], strict=True)]
    assert min(steps) >= 4 * 2 * 4 * 140
    before = found.entropy._version, memory._version
    found.mean.add_(1)
    assert (found.entropy._version, memory._version) == before
    assert signs.argmax is signs.output_low is None


@pytest.mark.parametrize("causal", [False, True])
def test_a_watch_starts_an_earlier_measurement_again_without_vitals(world, causal):
    query, key, _ = given(tracked=True)
    assert world.package.replay_signs(query, key, None, causal, None) is None  # there is none yet
    with torch.no_grad():
        for _ in range(2):
            attemper.measure(query, key, causal=causal, kernel="triton")
    [*_, usual] = world.driver.take()
    replayed = world.package.replay_signs(query, key, None, causal, None)
    [started] = world.driver.take()
    expected, found = world.driver.by_name(usual)[1], world.driver.by_name(started)[1]
    written = {f"p_{name}": address for name, address in zip((*SIGNS, "lse_low"), replayed.addresses, strict=True)}
    assert found == expected | written
    assert not replayed.memory[0].requires_grad
    assert world.package.replay_signs(query[:, :, ::2], key, None, causal, None) is None


def test_what_a_backward_reads_is_copied(world):
    for _ in range(2):
        found = run(given(tracked=True))[1]
    block = found._signs._others
    memory = block.memory[0].detach()
    memory.copy_(torch.arange(memory.numel()))
    lies = {name: block.as_written(name) for name in SIGNS}
    for name in SIGNS:
        assert torch.equal(getattr(found, name), lies[name])
        assert getattr(found, name).data_ptr() != lies[name].data_ptr()
    before = found.mean.clone()
    found.mean.detach().fill_(7)
    assert torch.equal(lies["mean"], before)


def half_precision(world):
    """The plan of a forward with descriptors, its tensors, and what Triton compiled."""
    CASES["half precision"]()
    plan, launch, compiled, n_tensors = next(one for one in world.planned if one[0].tiles)
    world.driver.take()
    return plan, launch, compiled, [getattr(arg, "base", arg) for arg in launch.args[:n_tensors]]


UNEXPECTED = {
    "an attribute more": lambda compiled: setattr(compiled._run, "launch_cluster", 1),
    "an attribute less": lambda compiled: delattr(compiled._run, "launch_pdl"),
    "scratch memory": lambda compiled: setattr(compiled._run, "global_scratch_size", 8),
    "scratch memory of a profiler": lambda compiled: setattr(compiled._run, "profile_scratch_size", 8),
    "a cooperative grid": lambda compiled: setattr(compiled._run, "launch_cooperative_grid", True),
    "a cluster": lambda compiled: setattr(compiled, "packed_metadata", (4, 2, 0)),
    "another signature": lambda compiled: setattr(compiled.src, "signature", {"p_query": "u64"}),
    "a card before Hopper": lambda compiled: setattr(compiled, "metadata", SimpleNamespace()),
}


@pytest.mark.parametrize("fault", UNEXPECTED)
def test_what_is_not_as_triton_has_it_is_started_by_triton(world, monkeypatch, fault):
    from copy import copy

    plan, launch, compiled, tensors = half_precision(world)
    other = copy(compiled)
    other._run, other.src = copy(compiled.run), copy(compiled.src)
    UNEXPECTED[fault](other)
    found = world.module.LaunchPlan(launch, other, len(tensors))
    assert plan.launcher is not None
    assert found.launcher is None
    if fault == "an attribute more":
        found.run(tensors)
        assert world.driver.take() == in_triton_s_way(world, plan, tensors)


def test_another_triton_or_no_driver_is_not_called(world, monkeypatch):
    _, launch, compiled, tensors = half_precision(world)

    def is_direct():
        return world.module.LaunchPlan(launch, compiled, len(tensors)).launcher is not None

    assert is_direct()
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    for owner, name, other in (
        (world.module, "KNOWN", False),
        (world.module, "driver_functions", lambda: None),
        (kernels, "extension", lambda: None),
        (nvidia, "CudaLauncher", type("CudaLauncher", (), {})),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            assert not is_direct()


def test_a_profiler_that_follows_launches_is_called(world):
    plan, _, _, tensors = half_precision(world)
    told = []
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(world.module.knobs.runtime, name)
        for start in (lambda: plan.run(tensors), lambda: run(given())):
            start()
            chain.add(told.append)
            try:
                start()
            finally:
                chain.remove(told.append)
            assert len(told) == 1
            told.clear()


@pytest.mark.parametrize("recorded", [False, True])
def test_what_the_driver_refuses_is_told_by_triton(world, recorded):
    for _ in range(2):
        run(given(tracked=recorded))
    world.driver.take()
    world.driver.without_context.value = 1  # Triton makes one
    run(given(tracked=recorded))
    assert len(world.driver.take()) == 1
    world.driver.without_context.value, world.driver.refuses.value = 0, 1
    with pytest.raises(RuntimeError, match="the stand-in refused"):
        run(given(tracked=recorded))
    assert world.driver.take() == []


def test_a_number_that_does_not_fit_is_refused(world):
    plan, *_ = half_precision(world)
    values = [*[0] * 18, *plan.numbers]
    at = next(i for i, kind in enumerate(plan.compiled.src.signature.values()) if kind == "i32")
    values[at] = 1 << 31
    with pytest.raises(OverflowError, match="more than 32 bits"):
        plan.launcher.start(plan.programs, tuple(values))
    with pytest.raises(IndexError):
        plan.launcher.start(plan.programs, ())
    with pytest.raises(TypeError):
        plan.launcher.start((1, 2), tuple(values))


@pytest.fixture
def compilations(world, tmp_path, monkeypatch):
    """What Triton compiles, by name, whether in the main thread, and whether it was on disk; at first nothing is."""
    seen, package = [], world.package
    for ahead in world.module.AHEAD.values():  # of other tests
        ahead.exception()
    jitted = package._forward.forward_kernel, package._backward.rows_kernel, package._backward.keys_kernel
    for kernel in (*jitted, package._rows.row_terms_kernel):
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))

    def listen(src, cache_hit, **_):
        seen.append((src.fn.fn.__name__, threading.current_thread() is threading.main_thread(), cache_hit))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(world.module.knobs.compilation, "listener", listen)
    monkeypatch.setattr(world.module, "COMPILED", {})
    monkeypatch.setattr(world.module, "AHEAD", {})
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_backward_is_compiled_while_its_forward_is(compilations, dtype):
    attend(*(vectors(1, 2, 200, 32, dtype=dtype) for _ in range(3)), causal=True)
    here = [name for name, in_main, _ in compilations if in_main]
    ahead = [name for name, in_main, _ in compilations if not in_main]
    assert here == ["forward_kernel", "row_terms_kernel"]
    assert sorted(ahead) == ["keys_kernel", "rows_kernel"]


def test_what_only_a_backward_knows_is_compiled_in_two_threads(compilations):
    tensors = [vectors(1, 2, 200, 32) for _ in range(3)]
    attend(*tensors)
    compilations.clear()
    attend(*tensors, signs=True)
    assert sorted(compilations) == [
        ("keys_kernel", False, False), ("row_terms_kernel", True, False), ("rows_kernel", True, False)
    ]  # fmt: skip


def test_a_forward_without_a_gradient_compiles_no_backward(compilations):
    run([vectors(1, 2, 200, 32, tracked=False) for _ in range(3)])
    assert [name for name, *_ in compilations] == ["forward_kernel"]


def test_it_says_once_that_it_compiles(world, compilations, monkeypatch, caplog):
    monkeypatch.setattr(world.module, "WONDERS", 0.0)
    world.module._say_once.cache_clear()
    for dim in (32, 16):
        run([vectors(1, 2, 200, dim, tracked=False) for _ in range(3)])
    assert len(compilations) == 2
    [line] = [record.getMessage() for record in caplog.records if record.name == "attemper"]
    assert "compiles a GPU kernel" in line
    assert os.environ["TRITON_CACHE_DIR"] in line


def test_another_process_finds_on_disk_what_was_compiled():
    """Its key does not change from run to run, with the order of sets and dicts."""
    code = """
import sys
import threading
sys.path.insert(0, "scripts")
import gpu_compile
for launch in gpu_compile.launches(90):
    print(gpu_compile.key_on_disk(launch, 90))
"""
    folder = Path(__file__).parents[2]
    runs = [
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, cwd=folder,
                       env=os.environ | {"PYTHONHASHSEED": seed}).stdout.split()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 20


def test_what_is_checked_on_a_hopper_gpu_can_be_started(world, monkeypatch):
    """`research.hopper.check` is run where time is scarce: all that it does before a kernel runs is done here."""
    from research.hopper import check

    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    query, key, value = given(rows=200, keys=300)
    problem = check.problem_of(query, key, value, 0)
    saved = check.forward(problem, ALL_SIGNS | OUTPUT_LOW_BIT)
    for signs in ((), check.SMOOTH):
        grads = [torch.zeros_like(saved.lse) if name in signs else None for name in check.Upstream._fields[1:]]
        gradients = check.Backward(problem, saved, check.Upstream(torch.randn_like(saved.output), *grads)).run()
        assert [grad.shape for grad in gradients] == [tensor.shape for tensor in (query, key, value)]
    assert world.driver.launches.value == 1 + 2 * 3
    # nothing was computed, so nearly all that is compared is wrong
    assert {"visible"} < {fault.split(":")[0] for fault in check.forward_faults(problem, {})}
    assert check.backward_faults(problem, {}, signs=True)


@pytest.fixture
def on_gpu(world, monkeypatch):
    """Every tensor says that it is on a GPU, so that a watch takes the ways of one. Nothing computes, so no rows are summed."""
    without_cpu = {name: serves for name, serves in kernels.KERNELS.items() if name != "cpu"}
    monkeypatch.setattr(kernels, "KERNELS", without_cpu)
    monkeypatch.setattr(kernels, "triton_is_missing", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(world.package, "current_stream", lambda device: None)
    monkeypatch.setattr(world.package, "on_its_device", lambda tensor, run, *args: run(*args))
    monkeypatch.setattr(StepAccumulator, "_fold", lambda sums, layers: [layer.unfolded.clear() for layer in layers])
    return world


@pytest.mark.parametrize(("replace", "most"), [(False, 50), (True, 65)])
def test_a_watched_layer_calls_few_functions_of_ours(on_gpu, replace, most):
    """In steps like the first; 12 of the calls are those of the function by which a watch runs a module, in place of torch's."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    calls = []
    for layers in (2, 4):
        sizes = {"n_layer": layers, "n_head": 4, "n_embd": 128, "n_positions": 64, "vocab_size": 99}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        model, words = transformers.GPT2Model(config).bfloat16().eval(), torch.randint(99, (2, 16))
        with torch.no_grad(), attemper.watch(model, replace=replace) as watch:

            def step(model=model, words=words, watch=watch):
                model(words, use_cache=False)
                watch.step()

            step()
            found = walk.counted(step)
        on_gpu.driver.take()
        assert watch.record.notes == []
        assert len(watch.record.info) == layers
        calls.append(found.calls)
    fewer, more = calls
    assert (more - fewer) / 2 <= most
