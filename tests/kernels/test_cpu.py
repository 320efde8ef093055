"""The native kernel beyond what every kernel is tested on: each variant, several threads, decode, dtypes, layouts, absence."""

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attemper
from attemper.errors import KernelUnavailable
from attemper.kernels import load, why
from attemper.operation.call import prepare
from close import assert_float64
from judge import judge
from native import VARIANTS, WAYS, configured, native, needed

pytestmark = [needed, pytest.mark.usefixtures("poisoned", "poisoned_workspace")]


def draw(heads=2, groups=None, rows=5, keys=7, dim=8, value_dim=None, batch=1, dtype=torch.float32):
    def tensor(*shape):
        return torch.randn(batch, *shape).to(dtype)

    return {
        "query": tensor(heads, rows, dim),
        "key": tensor(groups or heads, keys, dim),
        "value": tensor(groups or heads, keys, value_dim or dim),
    }


def attend(tensors, **options):
    return attemper.attention(*(tensors[name] for name in ("query", "key", "value")), kernel="cpu", **options)


FEW_HEADS = {
    "one head": ({"heads": 1, "rows": 130, "keys": 1100}, {}),
    "causal": ({"heads": 3, "rows": 600, "keys": 600}, {"causal": True}),
    "grouped": ({"heads": 3, "groups": 1, "rows": 100, "keys": 700}, {"causal": "lower_right"}),
    "window": ({"heads": 1, "rows": 600, "keys": 600, "dim": 40}, {"window": 90, "softcap": 2.0}),
    "decode": ({"heads": 1, "rows": 1, "keys": 5000}, {}),
    "grouped decode": ({"heads": 6, "groups": 2, "rows": 2, "keys": 3000, "dim": 33}, {"causal": "lower_right"}),
    "decode in a window": ({"heads": 1, "rows": 3, "keys": 3000}, {"causal": "lower_right", "window": 700}),
}


@pytest.mark.parametrize(("shape", "options"), FEW_HEADS.values(), ids=FEW_HEADS)
def test_few_heads_on_several_threads(shape, options, threads):
    """Workers share heads, take parts of the keys, and join what they found."""
    threads(3)
    judge(draw(**shape), options, *WAYS)


# more keys than are differentiated together, so that there are several parts
@pytest.mark.parametrize("mask_shape", [(1, 1, 1), (110, 420), (2, 1, 420), (3, 2, 110, 420), (3, 1, 110, 1)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_the_gradient_of_a_shared_mask_on_several_threads(mask_shape, groups, threads):
    threads(3)
    assert native.library.parts(420, 1) > 1
    tensors = draw(heads=2, groups=groups, rows=110, keys=420, batch=3)
    judge({**tensors, "mask": torch.randn(mask_shape)}, {"causal": "lower_right"}, "cpu")


@pytest.mark.parametrize(
    ("mask_shape", "expected"),
    [((3, 4, 5, 7), (3, 4)), ((1, 4, 5, 7), (1, 4)), ((3, 1, 5, 7), (3, 1)), ((1, 1, 5, 7), (1, 1))],
)
def test_only_what_shares_a_mask_is_done_in_turn(mask_shape, expected):
    """A bias of (1, H, L, L), as T5 has, spreads over the heads."""
    tensors = draw(heads=4, rows=5, keys=7, batch=3)
    problem = prepare("test", *tensors.values(), mask=torch.zeros(mask_shape)).problem
    assert load("cpu")._writers(problem.mask, problem) == expected


@pytest.mark.parametrize("rows", [1, 300])
def test_threads_change_no_bit_of_a_head_that_is_not_split(rows, threads):
    tensors = draw(heads=8, rows=rows, keys=400, dim=64)
    threads(1)
    alone = attend(tensors, causal="lower_right")
    threads(3)
    together = attend(tensors, causal="lower_right")
    assert torch.equal(alone.output, together.output)
    assert torch.equal(alone.vitals.variance, together.vitals.variance)


@pytest.mark.parametrize("rows", [1, 20])
def test_logits_that_climb_from_tile_to_tile(rows):
    """Each tile tops the last by far more than the slack, to +1e4 and from -1e4: the reference is raised every time."""
    tensors = draw(rows=rows, keys=2500)
    tensors["mask"] = torch.linspace(-1e4, 1e4, 2500)
    judge(tensors, {}, *WAYS)
    tensors["mask"] = tensors["mask"].flip(0)
    judge(tensors, {}, *WAYS)


@pytest.mark.usefixtures("every_variant")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 20])
def test_every_half_precision_number_passes_through_unchanged(dtype, rows):
    """One key has weight 1: each output is its value, all 65,536 of them; what float32 calls subnormal becomes 0."""
    every = torch.arange(1 << 16).to(torch.int32).sub(1 << 15).to(torch.int16).view(dtype)
    every = every.masked_fill(every.abs() < torch.finfo(torch.float32).tiny, 0.0)
    value = every.view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, rows, 4, dtype=dtype)
    output = attemper.attention(zero, zero[:, :, :1], value, kernel="cpu").output
    for row in output[0, 0]:
        assert torch.equal(row.isnan(), every.isnan())
        known = ~every.isnan()
        assert torch.equal(row[known], every[known])


@pytest.mark.usefixtures("every_variant")
@pytest.mark.parametrize("payload", [0x7FC00001, 0x7FFFFFFF, -1])
def test_a_nan_of_any_payload_stays_nan(payload):
    for rows, keys in ((2, 70), (40, 70), (40, 64)):  # few rows; a tile that ends within a panel, and one that fills it
        tensors = draw(rows=rows, keys=keys, heads=1)
        tensors["query"].view(torch.int32)[0, 0, 1] = payload
        output, vitals = attend(tensors)
        assert output[0, 0, 1].isnan().all()
        assert vitals.peak[0, 0, 1].isnan()
        assert output[0, 0, 0].isfinite().all()


@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (300, 8), (8, 520), (257, 33)])
def test_head_dims_from_one_to_hundreds(dim, value_dim):
    judge(draw(rows=30, keys=50, dim=dim, value_dim=value_dim), {"causal": True}, *WAYS)


def test_views_that_start_anywhere():
    """A value that could be read in place, but for its alignment."""
    base = {name: torch.randn(2, 3, 41, 65)[..., 1:] for name in ("query", "key", "value")}
    judge(base, {"causal": True}, "cpu")


def test_a_mask_of_an_exotic_dtype_is_widened():
    tensors = draw(rows=20)
    mask = torch.randn(20, 7).to(torch.float8_e5m2)
    expected = attend(tensors, mask=mask.float()).output
    assert torch.equal(attend(tensors, mask=mask).output, expected)


def test_what_is_saved_may_lie_anywhere():
    """A batched backward hands over expanded and strided copies; nothing may be freed before the library reads it."""
    x = torch.randn(3, 2, 40, 8, dtype=torch.float64)

    def signs(a, kernel):
        output, vitals = attemper.attention(a, a, a, causal=True, kernel=kernel)
        return torch.stack([output.sum((-1, -2)), vitals.variance.sum(-1), vitals.peak.sum(-1), vitals.sum_p2.sum(-1)])

    actual, expected = (torch.func.jacrev(lambda a, k=k: signs(a, k))(x) for k in ("cpu", "reference"))
    assert_float64(actual, expected)


def test_a_negated_view_is_read_as_its_numbers():
    spun = torch.randn(3, 1, 2, 20, 8, dtype=torch.complex64).conj()
    query, key, value = spun.imag
    assert query.is_neg()
    tensors = {"query": query, "key": key, "value": value}
    assert torch.equal(attend(tensors).output, attend({n: t.resolve_neg() for n, t in tensors.items()}).output)


def test_dropout_does_not_depend_on_threads_or_tiles(threads):
    tensors = draw(heads=1, rows=9, keys=1500)
    found = []
    for count in (1, 3):
        threads(count)
        torch.manual_seed(4)
        found.append(attend(tensors, dropout=0.4).output)
    assert torch.equal(*found)


def test_numbers_too_small_to_be_normal_are_the_callers_business():
    attend(draw(heads=4, rows=50, keys=50))
    assert torch.tensor([1e-39]).mul(0.5).item() > 0


def test_auto_takes_it_and_says_so():
    tensors = draw()
    choices = why(*tensors.values())
    assert choices[0].kernel == "cpu"
    assert choices[0].taken
    assert math.isfinite(attemper.measure(tensors["query"], tensors["key"]).entropy.sum())


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NOT_BUILT = """
import sys
sys.modules["attemper.kernels.cpu._native"] = None
import torch, attemper
from attemper import env
q = torch.randn(1, 1, 4, 8)
print(attemper.kernels.why(q, q, q))
attemper.attention(q, q, q)
print(env.describe()["kernels"]["cpu"])
try:
    attemper.attention(q, q, q, kernel="cpu")
except attemper.errors.KernelUnavailable as error:
    print(error)
"""


def test_a_build_without_it_says_why_and_runs_the_next():
    cpu, triton, blockwise, _, described, named = run(NOT_BUILT).splitlines()
    assert cpu.startswith("cpu        not taken: is not built here: install attemper where there is a C compiler")
    assert triton == "triton     not taken: needs cuda tensors; got cpu"
    assert blockwise == "blockwise  taken: the fastest that serves this call"
    assert "'available': False" in described
    assert "is not built here" in described
    assert named.startswith("attention(): kernel='cpu' is not built here: install attemper where there is a C compiler")


def test_the_environment_is_read_when_the_library_is_loaded():
    code = "from attemper import env; from attemper.kernels.cpu import native; print(native._how['poison'], env.describe())"
    said = run(code, ATTEMPER_CPU_VARIANT="portable", ATTEMPER_CPU_POISON="1")
    assert said.startswith("1 ")
    assert "runs on cpu, with portable" in said


SLOW = """
import warnings
import torch, attemper
q = torch.randn(1, 2, 5, 8)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        attemper.attention(q, q, q)
        attemper.measure(q, q)
        attemper.kernels.why(q, q, q)
print(*(str(one.message) for one in said), sep="\\n")
print(*attemper.scan(torch.nn.MultiheadAttention(8, 2), (q[0],) * 3).document["notes"], sep="\\n")
"""


def test_a_library_that_cannot_run_is_said_once_and_in_a_scan():
    said = run(SLOW, ATTEMPER_CPU_VARIANT="bogus").splitlines()
    known = ", ".join(map(repr, native.VARIANTS))
    words = f"kernel 'cpu' does not recognise ATTEMPER_CPU_VARIANT='bogus': Known: {known}. Calls on "
    slow = [line for line in said if "kernel 'cpu'" in line]
    assert [line.startswith(words) for line in slow] == [
        False,
        True,
    ]  # the warning, which begins with our name; the note
    assert slow[0] == f"attemper: {slow[1]}"
    assert "kernel 'cpu'" not in run(SLOW)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_environment_chooses_a_variant(monkeypatch, variant):
    best = native.library.best()
    monkeypatch.setenv(native.CHOICE, variant)
    assert native.VARIANTS[native._variant(best)] == variant
    monkeypatch.delenv(native.CHOICE)
    assert native._variant(best) == best


def test_a_variant_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(native, "VARIANTS", ("portable", "avx2", "avx512", "amx"))
    monkeypatch.setenv(native.CHOICE, "avx51")
    with pytest.raises(
        KernelUnavailable, match=r"does not recognise ATTEMPER_CPU_VARIANT='avx51': Did you mean 'avx512'\?"
    ):
        native._variant(3)
    monkeypatch.setenv(native.CHOICE, "avx512")
    with pytest.raises(KernelUnavailable, match=r"'avx512': this processor has at most 'avx2'"):
        native._variant(1)


@pytest.mark.parametrize(("value", "poison"), [("", 0), ("0", 0), ("1", 1)])
def test_poison_is_off_when_the_environment_says_0(monkeypatch, value, poison):
    monkeypatch.setenv(native.POISON, value)
    assert native._poison() == poison


OTHERS = {
    "another parameter": ("FUNCTIONS", lambda own: {**own, "parts": "heads, keys, /"}),
    "another function": ("FUNCTIONS", lambda own: {**own, "split": "/"}),
    "another name": ("names", lambda own: lambda: {**own(), "more": None}),
    "another order": ("names", lambda own: lambda: dict(reversed(own().items()))),
}


@pytest.mark.parametrize(("name", "change"), OTHERS.values(), ids=OTHERS)
def test_a_library_with_other_functions_is_refused(monkeypatch, name, change):
    monkeypatch.setattr(native, name, change(getattr(native, name)))
    with pytest.raises(KernelUnavailable, match="was built from other sources: install attemper again"):
        native._load(native._find())


def test_a_library_that_is_no_extension_is_refused():
    with pytest.raises(KernelUnavailable, match="was built from other sources: install attemper again"):
        native._load(str(Path(torch.__file__).parent / "lib" / "libc10.so"))


def test_a_library_of_another_system_is_refused(tmp_path):
    (tmp_path / "_native.so").write_bytes(b"\xcf\xfa\xed\xfe" * 100)
    with pytest.raises(KernelUnavailable, match="does not load here: its library was built for another system"):
        native._load(str(tmp_path / "_native.so"))


def test_a_parallel_loop_that_fails_is_not_called_a_lack_of_memory(threads):
    threads(2)
    fails = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 7)
    tensors = {name: t.requires_grad_() for name, t in draw(heads=4, rows=50).items()}
    output = attend(tensors).output.sum()
    with configured(parallel=ctypes.cast(fails, ctypes.c_void_p).value):
        for run in (lambda: attend(draw(heads=4, rows=50)), output.backward):
            with pytest.raises(RuntimeError, match="pass on torch's threads: torch_parallel_for failed"):
                run()
