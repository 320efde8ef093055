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
from attemper.operation.checks import prepare
from cases import PAIRWISE
from judge import judge
from native import VARIANTS, native, needed

pytestmark = needed


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch, poisoned):
    """Workspaces are filled with NaN as well as results."""
    monkeypatch.setattr(native, "_POISON", 1)


@pytest.fixture
def use(monkeypatch):
    """Choose a variant and a number of threads; both are put back."""
    before = torch.get_num_threads()

    def choose(variant=None, threads=before):
        if variant:
            monkeypatch.setattr(native, "_VARIANT", native.VARIANTS.index(variant))
        torch.set_num_threads(threads)

    yield choose
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("variant", VARIANTS[:-1])
@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_every_variant_is_as_exact_as_plain_pytorch(case, variant, use):
    use(variant)
    judge(case.tensors(), case.options(), "cpu")


FEW_HEADS = {
    "one head": ({"heads": 1, "rows": 130, "keys": 1100}, {}),
    "causal": ({"heads": 3, "rows": 600, "keys": 600}, {"causal": True}),
    "grouped": ({"heads": 3, "groups": 1, "rows": 100, "keys": 700}, {"causal": "lower_right"}),
    "window": ({"heads": 1, "rows": 600, "keys": 600, "dim": 40}, {"window": 90, "softcap": 2.0}),
    "decode": ({"heads": 1, "rows": 1, "keys": 5000}, {}),
    "grouped decode": ({"heads": 6, "groups": 2, "rows": 2, "keys": 3000, "dim": 33}, {"causal": "lower_right"}),
    "decode in a window": ({"heads": 1, "rows": 3, "keys": 3000}, {"causal": "lower_right", "window": 700}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("shape", "options"), FEW_HEADS.values(), ids=FEW_HEADS)
def test_few_heads_on_several_threads(shape, options, variant, use):
    """Workers share heads, take parts of the keys, and join what they found."""
    use(variant, threads=3)
    judge(draw(**shape), options, "cpu")


@pytest.mark.parametrize("mask_shape", [(1, 1, 1), (300, 600), (2, 1, 600), (3, 2, 300, 600), (3, 1, 300, 1)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_the_gradient_of_a_shared_mask_on_several_threads(mask_shape, groups, use):
    use(threads=3)
    tensors = draw(heads=2, groups=groups, rows=300, keys=600, batch=3)
    judge({**tensors, "mask": torch.randn(mask_shape)}, {"causal": True}, "cpu")


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
def test_threads_change_no_bit_of_a_head_that_is_not_split(rows, use):
    tensors = draw(heads=8, rows=rows, keys=400, dim=64)
    use(threads=1)
    alone = attend(tensors, causal="lower_right")
    use(threads=3)
    together = attend(tensors, causal="lower_right")
    if rows > 8:
        assert torch.equal(alone.output, together.output)
    torch.testing.assert_close(alone.output, together.output)
    torch.testing.assert_close(alone.vitals.variance, together.vitals.variance)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 20])
def test_logits_that_climb_from_tile_to_tile(variant, rows, use):
    """Each tile tops the last by far more than the slack, to +1e4 and from -1e4: the reference is raised every time."""
    use(variant)
    tensors = draw(rows=rows, keys=2500)
    tensors["mask"] = torch.linspace(-1e4, 1e4, 2500)
    judge(tensors, {}, "cpu")
    tensors["mask"] = tensors["mask"].flip(0)
    judge(tensors, {}, "cpu")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 20])
def test_every_half_precision_number_passes_through_unchanged(variant, dtype, rows, use):
    """One key has weight 1: each output is its value, all 65,536 of them; what float32 calls subnormal becomes 0."""
    use(variant)
    every = torch.arange(1 << 16).to(torch.int32).sub(1 << 15).to(torch.int16).view(dtype)
    every = every.masked_fill(every.abs() < torch.finfo(torch.float32).tiny, 0.0)
    value = every.view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, rows, 4, dtype=dtype)
    output = attemper.attention(zero, zero[:, :, :1], value, kernel="cpu").output
    for row in output[0, 0]:
        assert torch.equal(row.isnan(), every.isnan())
        known = ~every.isnan()
        assert torch.equal(row[known], every[known])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("payload", [0x7FC00001, 0x7FFFFFFF, -1])
def test_a_nan_of_any_payload_stays_nan(variant, payload, use):
    use(variant)
    for rows, keys in ((2, 70), (40, 70), (40, 64)):  # few rows; a tile that ends within a panel, and one that fills it
        tensors = draw(rows=rows, keys=keys, heads=1)
        tensors["query"].view(torch.int32)[0, 0, 1] = payload
        output, vitals = attend(tensors)
        assert output[0, 0, 1].isnan().all()
        assert vitals.peak[0, 0, 1].isnan()
        assert output[0, 0, 0].isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (300, 8), (8, 520), (257, 33)])
def test_head_dims_from_one_to_hundreds(variant, dim, value_dim, use):
    use(variant)
    judge(draw(rows=30, keys=50, dim=dim, value_dim=value_dim), {"causal": True}, "cpu")


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
        return torch.stack([output.sum((-1, -2)), vitals.variance.sum(-1), vitals.peak.sum(-1), vitals.p2.sum(-1)])

    actual, expected = (torch.func.jacrev(lambda a, k=k: signs(a, k))(x) for k in ("cpu", "reference"))
    torch.testing.assert_close(actual, expected)


def test_a_negated_view_is_read_as_its_numbers():
    spun = torch.randn(3, 1, 2, 20, 8, dtype=torch.complex64).conj()
    query, key, value = spun.imag
    assert query.is_neg()
    tensors = {"query": query, "key": key, "value": value}
    torch.testing.assert_close(attend(tensors).output, attend({n: t.resolve_neg() for n, t in tensors.items()}).output)


def test_dropout_does_not_depend_on_threads_or_tiles(use):
    tensors = draw(heads=1, rows=9, keys=1500)
    found = []
    for threads in (1, 3):
        use(threads=threads)
        torch.manual_seed(4)
        found.append(attend(tensors, dropout=0.4).output)
    torch.testing.assert_close(*found)


def test_numbers_too_small_to_be_normal_are_the_callers_business():
    attend(draw(heads=4, rows=50, keys=50))
    assert torch.tensor([1e-39]).mul(0.5).item() > 0


def test_auto_takes_it_and_says_so():
    tensors = draw()
    verdicts = why(*tensors.values())
    assert verdicts[0].kernel == "cpu"
    assert verdicts[0].taken
    assert math.isfinite(attemper.measure(tensors["query"], tensors["key"]).entropy.sum())


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WHY = "import torch, attemper; q = torch.randn(1, 1, 4, 8); print(attemper.kernels.why(q, q, q))"
NOT_BUILT = "import importlib.machinery as m; m.EXTENSION_SUFFIXES.clear(); "


def test_a_build_without_it_says_why_and_runs_the_next():
    said = run(f"{NOT_BUILT}{WHY}; attemper.attention(q, q, q)").splitlines()
    assert said[0].startswith("cpu        not taken: is not built here: install attemper where there is a C compiler")
    assert said[1] == "blockwise  taken: the fastest that serves this call"
    found = run(f"{NOT_BUILT}from attemper import env; print(env.describe()['kernels']['cpu'])")
    assert "'available': False" in found
    assert "is not built here" in found


def test_a_named_kernel_that_is_not_there_raises_with_a_sentence():
    said = run(
        f"{NOT_BUILT}{WHY}\ntry: attemper.attention(q, q, q, kernel='cpu')\n"
        "except attemper.errors.KernelUnavailable as error: print(error)"
    )
    assert "attention(): kernel='cpu' is not built here: install attemper where there is a C compiler" in said


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_environment_chooses_a_variant(variant):
    said = run("from attemper import env; print(env.describe()['kernels']['cpu'])", ATTEMPER_CPU_VARIANT=variant)
    assert f"with {variant}" in said


def test_an_unknown_variant_is_named():
    said = run(WHY, ATTEMPER_CPU_VARIANT="avx51")
    assert "cpu        not taken: knows no ATTEMPER_CPU_VARIANT='avx51': Did you mean 'avx512'?" in said


def test_a_library_without_our_functions_is_refused(monkeypatch):
    monkeypatch.setattr(native, "_find", lambda: Path(torch.__file__).parent / "lib" / "libc10.so")
    with pytest.raises(KernelUnavailable, match="was built from other sources: install attemper again"):
        native._load()


@pytest.mark.parametrize(("value", "poison"), [("", 0), ("0", 0), ("1", 1)])
def test_poison_is_off_when_the_environment_says_0(value, poison):
    said = run("from attemper.kernels.cpu import native; print(native._POISON)", ATTEMPER_CPU_POISON=value)
    assert int(said) == poison


def test_a_parallel_loop_that_fails_is_not_called_a_lack_of_memory(monkeypatch, use):
    use(threads=2)
    fails = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 7)
    monkeypatch.setattr(native, "_PARALLEL", ctypes.cast(fails, ctypes.c_void_p).value)
    with pytest.raises(RuntimeError, match="torch_parallel_for failed"):
        attend(draw(heads=4, rows=50))
