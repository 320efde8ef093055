"""Documents and sinks on every kernel, against the same call spelled out: a mask between documents, a sink as one more key."""

import itertools
from dataclasses import dataclass

import pytest
import torch

import attemper
from attemper.errors import InputError
from attemper.kernels.contract import measuring_dtype
from cases import DTYPES, GRID, Case, cover
from close import assert_float64, assert_reordered
from judge import SIGNS, _clear_winner, assert_within, blaming, by_definition, by_kernel, gradients
from native import WAYS, variant
from rounding import gradient_mass, reference_mass, sign_mass
from serving import FUSED, ON_CPU, fused

EVERY = [way for kernel in FUSED for way in ((WAYS or ("cpu",)) if kernel == "cpu" else (kernel,))]
PACKED = {
    "dtype": GRID["dtype"],
    "mask": ["none", "bool", "additive", "bias_row"],
    "causal": GRID["causal"],
    "heads": GRID["heads"],
    "window": GRID["window"],
    "softcap": GRID["softcap"],
    "scale": GRID["scale"],
    "lengths": [(1, 1), (63, 63), (63, 130)],
    "dim": [(8, 8), (60, 24)],
    "documents": ["none", "shared", "each", "for keys"],
    "sink": [False, True],
}


def serves(row: dict) -> bool:
    if row["documents"] == "none":
        return row["sink"]
    return row["documents"] == "for keys" or row["lengths"][0] == row["lengths"][1]


@dataclass(frozen=True)
class Packed:
    case: Case
    documents: str
    sink: bool

    def __str__(self) -> str:
        return f"{self.case}-{self.documents}-{'sink' if self.sink else 'none'}"

    def offsets(self):
        """The argument of the call, and the offsets of each item for queries and keys."""
        rows, keys = self.case.lengths
        first, second = _offsets(rows, 0), _offsets(rows, 1)
        if self.documents == "shared":
            return torch.tensor(first), [(first, first)] * 2
        if self.documents == "each":
            return torch.tensor([first, second]), [(first, first), (second, second)]
        of_keys = _offsets(keys, 2)
        given = torch.tensor([first, second], dtype=torch.int32), torch.tensor(of_keys)
        return given, [(first, of_keys), (second, of_keys)]

    def call(self, device):
        """Tensors and options of the call; and of the same call spelled out, without documents, sink and band."""
        tensors, options = self.case.tensors(device), self.case.options()
        (rows, keys), heads = self.case.lengths, self.case.heads[0]
        given, offsets = (None, [([0, rows], [0, keys])] * 2) if self.documents == "none" else self.offsets()
        if given is not None:
            options["documents"] = given
        keep = torch.stack([visible(*own, self.case.causal, self.case.window) for own in offsets]).to(device)
        spelled = dict(tensors)
        mask = torch.zeros(2, heads, rows, keys, dtype=torch.float64, device=device)
        if "mask" in tensors:
            own = tensors["mask"]
            mask = mask + (torch.where(own, 0.0, -torch.inf) if own.dtype == torch.bool else own.double())
        spelled["mask"] = mask.masked_fill(~keep[:, None], -torch.inf)
        if self.sink:
            tensors["sink"] = sink = torch.randn(heads, device=device).bfloat16().float()
            column = sink.double().view(1, heads, 1, 1).expand(2, heads, rows, 1)
            spelled["mask"] = torch.cat((spelled["mask"], column), -1)
            for name in ("key", "value"):
                spelled[name] = torch.cat((tensors[name], torch.zeros_like(tensors[name][:, :, :1])), 2)
        return tensors, options, spelled, {"softcap": self.case.softcap}


def _offsets(length: int, kind: int) -> list[int]:
    """Five documents, some without a token."""
    return sorted(
        [0, length // 7, (length // 7, length // 3, 0)[kind], (length // 2, length, length - 1)[kind], length, length]
    )


def visible(of_rows, of_keys, causal, window):
    """Which keys each row sees, entry by entry."""
    keep = torch.zeros(of_rows[-1], of_keys[-1], dtype=torch.bool)
    for (first, last), (start, stop) in zip(itertools.pairwise(of_rows), itertools.pairwise(of_keys), strict=True):
        shift = (stop - start) - (last - first) if causal == "lower_right" else 0
        for i in range(last - first):
            for j in range(stop - start):
                before = i + shift - j  # how many keys back
                seen = before >= 0 if causal else window is None or -before < window
                keep[first + i, start + j] = seen and (window is None or before < window)
    return keep


def cases():
    found = []
    for row in cover(PACKED, serves):
        documents, sink = row.pop("documents"), row.pop("sink")
        found.append(Packed(Case(**row), documents, sink))
    return found


@pytest.mark.usefixtures("poisoned", "poisoned_workspace")
@pytest.mark.parametrize("packed", cases(), ids=str)
def test_documents_and_sinks_are_as_exact_as_plain_pytorch(packed, device):
    tensors, options, spelled, plainly = packed.call(device)
    dtype, keys = tensors["query"].dtype, tensors["key"].shape[2]
    wide = measuring_dtype(dtype)
    eps = torch.finfo(wide).eps
    exact_leaves, exact, problem = by_definition(spelled, plainly, torch.float64)
    plain_leaves, plain, _ = by_definition(spelled, plainly, torch.float32)
    plain["output"] = plain["output"] if wide == dtype else by_definition(spelled, plainly, dtype)[1]["output"]
    # a sink is no peak
    alone = {**options, "kernel": "reference", "signs": "peak"}
    masks = {
        n: tensors[n].double() if tensors[n].is_floating_point() else tensors[n]
        for n in ("mask", "scale")
        if n in tensors
    }
    peak = attemper.measure(tensors["query"].double(), tensors["key"].double(), **masks, **alone).peak
    mass = sign_mass(problem, exact)
    found = {}
    served = [way for way in EVERY if way.partition(":")[0] in fused(dtype)] + ["reference"]
    for way in served:
        with variant(way.partition(":")[2]), blaming(way):
            found[way] = by_kernel(tensors, options, way)
            actual = found[way][1]
            assert torch.equal(actual["visible"], exact["visible"]), "visible differs"
            assert_within("peak", actual["peak"], peak, peak, eps * mass["peak"])
            far = reference_mass(exact) if way == "triton" else 0.0
            for name in ("output", "mean", "variance", "lse", "entropy", "sum_p2"):
                more = far if name == "mean" else 0.0
                assert_within(name, actual[name], exact[name].detach(), plain[name], eps * (mass[name] + more))
    for loss in ("output", *SIGNS):
        if loss == "peak" and packed.sink:
            continue
        cotangent = torch.randn_like(exact[loss])
        if loss == "peak":
            cotangent = cotangent * _clear_winner(exact)
        if loss == "output":
            cotangent = cotangent.to(dtype).double()
        wanted, usual = (
            as_called(gradients(leaves, results, {loss: cotangent}), tensors, keys)
            for leaves, results in ((exact_leaves, exact), (plain_leaves, plain))
        )
        moved = gradient_mass(problem, exact, loss, cotangent)
        moved["sink"] = moved["mask"] * cotangent.shape[2] * cotangent.shape[0]
        for way in served:
            with blaming(way), variant(way.partition(":")[2]):
                for name, grad in gradients(*found[way], {loss: cotangent}).items():
                    # a sink's is made of the output, for which tiles round the weights
                    once = usual[name].to(dtype if name == "sink" else grad.dtype)
                    assert_within(f"d({loss})/d({name})", grad, wanted[name], once, eps * moved[name])


def as_called(grads, tensors, keys):
    """The gradients of the spelled-out call as those of the call."""
    mask = grads.pop("mask")
    if "sink" in tensors:
        grads["sink"] = mask[..., -1].sum((0, 2))
    if "mask" in tensors:
        grads["mask"] = mask[..., :keys].sum_to_size((1,) * (4 - tensors["mask"].dim()) + tuple(tensors["mask"].shape))
    return {name: grad[:, :, :keys] if name in ("key", "value") else grad for name, grad in grads.items()}


def inputs(rows=23, keys=23, dtype=torch.float64, heads=4, groups=2, batch=2, device="cpu", grad=False):
    shapes = (heads, rows, 8), (groups, keys, 8), (groups, keys, 5)
    return [torch.randn(batch, *shape, dtype=dtype, device=device, requires_grad=grad) for shape in shapes]


def alone(tensors, documents, **options):
    """What each document gives by itself, joined."""
    parts = [
        attemper.attention(*(t[:, :, a:b] for t in tensors), **options)
        for a, b in itertools.pairwise(documents)
        if a < b
    ]
    signs = {name: torch.cat([getattr(part.vitals, name) for part in parts], 2) for name in attemper.vitals.SIGNS}
    return {"output": torch.cat([part.output for part in parts], 2), **signs}


@pytest.mark.usefixtures("poisoned", "poisoned_workspace")
@pytest.mark.parametrize("causal", [False, True, "lower_right"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_document_is_computed_as_if_it_were_alone(dtype, causal, device):
    """To the bit, with its gradients: it is the same call of the same kernel."""
    documents = [0, 0, 5, 6, 6, 20, 23]
    for kernel in fused(dtype):
        tensors = inputs(dtype=dtype, device=device, grad=True)
        options = {"causal": causal, "window": 6, "softcap": 3.0, "kernel": kernel}
        output, vitals = attemper.attention(*tensors, documents=torch.tensor(documents), **options)
        found, expected = {"output": output, **vitals.each(lambda t: t).__dict__}, alone(tensors, documents, **options)
        for name, wanted in expected.items():
            assert torch.equal(found[name], wanted), (kernel, name)
        for name in ("output", *SIGNS):
            cotangent = torch.randn_like(expected[name])
            both = [
                torch.autograd.grad(one[name], tensors, cotangent, retain_graph=True, allow_unused=True)
                for one in (found, expected)
            ]
            for one, other in zip(*both, strict=True):
                assert (one is None) == (other is None), (kernel, name)
                assert one is None or torch.equal(one, other), (kernel, name)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_every_document_drops_its_own_weights_and_the_backward_drops_the_same(kernel):
    query, key, value = (torch.randn(1, 2, 8, 8, dtype=torch.float64).repeat(1, 1, 3, 1) for _ in range(3))
    value.requires_grad_()
    output = attemper.attention(
        query, key, value, documents=torch.tensor([0, 8, 16, 24]), dropout=0.5, kernel=kernel
    ).output
    first, second, third = output.split(8, 2)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    cotangent = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, value, cotangent)
    assert_float64((grad * value).sum(), (output * cotangent).sum())  # the output is linear in the values


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("rows", [0, 3])
def test_documents_without_queries_or_keys(kernel, rows):
    tensors = inputs(rows, 0, grad=True)
    output, vitals = attemper.attention(
        *tensors, documents=(torch.tensor([0, rows, rows]), torch.tensor([0, 0, 0])), kernel=kernel
    )
    assert output.shape == (2, 4, rows, 5)
    assert not output.any()
    assert not vitals.visible.any()
    assert all(not grad.any() for grad in torch.autograd.grad(output.sum() + vitals.entropy.sum(), tensors))


WRONG = {
    "end": [0, 5, 22],
    "beyond": [0, 5, 24],
    "begin": [1, 5, 23],
    "below": [-1, 5, 23],
    "falls": [0, 9, 5, 23],
    "far": [0, 2**40, 23],
}


@pytest.mark.parametrize(("kernel", "compiled"), [*((name, False) for name in ON_CPU), ("blockwise", True)])
def test_offsets_that_are_none_are_never_read_by(kernel, compiled):
    """Values are seen where the call runs: nothing out of bounds is read. Compiled graphs of all kernels hold the same op."""
    tensors = inputs()

    def run(documents):
        return attemper.attention(*tensors, documents=documents, kernel=kernel).output

    torch._dynamo.reset()
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    assert run(torch.tensor([0, 5, 23])).isfinite().all()
    for offsets in WRONG.values():
        with pytest.raises(InputError, match=r"`documents` must begin with 0, never fall, and end with"):
            run(torch.tensor(offsets))


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_sink_is_what_merge_makes_of_a_shard_of_one_key(kernel):
    tensors = inputs(grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 1, 23, 23) > 0.5
    mask[:, :, 3] = False  # a row without keys
    without = attemper.attention(*tensors, mask=mask, kernel=kernel)
    rows = sink.view(1, 4, 1).expand(2, 4, 23)
    ones, zeros = torch.ones_like(rows), torch.zeros_like(rows)
    own = {
        "visible": ones.int(),
        "mean": rows,
        "variance": zeros,
        "peak": -torch.inf * ones,
        "lse": rows,
        "entropy": zeros,
    }
    shard = attemper.Attended(torch.zeros_like(without.output), attemper.Vitals(**own, sum_p2=ones))
    expected = attemper.merge([without, shard])
    found = attemper.attention(*tensors, mask=mask, sink=sink, kernel=kernel)
    for name in ("output", *attemper.vitals.SIGNS):
        one, other = (each.output if name == "output" else getattr(each.vitals, name) for each in (found, expected))
        assert_float64(one, other, name)
        if name == "visible":
            continue
        cotangent = torch.randn_like(other)
        leaves = (*tensors, sink)
        grads = [
            torch.autograd.grad(each, leaves, cotangent, retain_graph=True, materialize_grads=True, allow_unused=True)
            for each in (one, other)
        ]
        for a, b in zip(*grads, strict=True):
            assert_float64(a, b, name)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_sink_of_any_size(kernel):
    query, key, value = inputs(dtype=torch.float32, grad=True)
    mask = torch.ones(23, 23, dtype=torch.bool)
    mask[3] = False

    def run(sink):
        return attemper.attention(query, key, value, mask=mask, sink=sink, kernel=kernel)

    plain = attemper.attention(query, key, value, mask=mask, kernel=kernel)
    sink = torch.tensor([-torch.inf, 1e4, -1e4, 0.0], requires_grad=True)
    output, vitals = run(sink)
    assert torch.equal(vitals.visible[:, 0], plain.vitals.visible[:, 0])
    for name in attemper.vitals.SIGNS[1:]:  # -inf is none
        assert_reordered(getattr(vitals, name)[:, 0], getattr(plain.vitals, name)[:, 0], 24, name)
    assert_reordered(output[:, 0], plain.output[:, 0], 24)
    assert not output[:, 1].any()
    assert vitals.lse[:, 1].eq(1e4).all()
    assert_reordered(output[:, 2, :3], plain.output[:, 2, :3], 24)
    # a row without keys: all weight is the sink's
    assert not output[:, :, 3].any()
    assert vitals.peak[:, :, 3].isneginf().all()
    assert vitals.sum_p2[:, 1:, 3].eq(1).all()
    assert vitals.visible[:, :, 3].tolist() == [[0, 1, 1, 1]] * 2
    assert not vitals.top_weight[:, :, 3].any()
    loss = output.square().sum() + sum(
        getattr(vitals, name)[..., 1:, :].sum() for name in ("mean", "variance", "lse", "entropy", "sum_p2")
    )
    for grad in torch.autograd.grad(loss, (query, key, value, sink)):
        assert grad.isfinite().all()
    assert run(torch.full((4,), torch.inf)).output[:, :, :3].isnan().all()  # as softmax has it
    assert run(torch.full((4,), torch.nan)).output[:, :, :3].isnan().all()


@pytest.mark.parametrize("kernel", ON_CPU)
def test_signs_that_are_not_asked_for_change_no_bit_of_the_output(kernel):
    for dtype in (torch.bfloat16, torch.float32):
        tensors, options = inputs(dtype=dtype), {"documents": torch.tensor([0, 7, 23]), "sink": torch.randn(4)}
        outputs = [
            attemper.attention(*tensors, **options, signs=signs, kernel=kernel).output
            for signs in ("all", (), "entropy", "lse")
        ]
        assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_weights_with_documents_and_a_sink():
    query, key, value = inputs()
    sink, documents = torch.randn(4, dtype=torch.float64), torch.tensor([0, 7, 23])
    output, vitals = attemper.attention(query, key, value, documents=documents, sink=sink, causal=True)
    weights = attemper.weights(query, key, documents=documents, sink=sink, causal=True)
    assert_float64(weights @ value.repeat_interleave(2, 1), output)
    assert_float64(1 - weights.sum(-1), (sink[:, None] - vitals.lse).exp())
    assert not weights[..., 7:, :7].any()
    assert_float64(weights.amax(-1), vitals.top_weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", FUSED)
def test_gradients_with_a_sink_are_rounded_once_too(kernel, dtype, device):
    """Keys and values that share a part: δ of a rounded output would not cancel against it."""
    query, key, value, cotangent = (torch.randn(1, 2, 520, 32, device=device) for _ in range(4))
    tensors = [one.to(dtype) for one in (query, key + 5, value + 3)]
    errors = []
    for sink in (None, torch.randn(2, device=device)):
        found = []
        for wide, name in ((dtype, kernel), (torch.float64, "reference")):
            leaves = [tensor.to(wide).requires_grad_() for tensor in tensors]
            output = attemper.attention(*leaves, sink=sink, causal=True, kernel=name).output
            found.append(torch.autograd.grad(output, leaves, cotangent.to(dtype).to(wide)))
        errors.append([((one - exact).norm() / exact.norm()).item() for one, exact in zip(*found, strict=True)])
    assert all(with_sink <= 2 * without for without, with_sink in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("sink", [torch.inf, torch.nan])
@pytest.mark.parametrize("kernel", FUSED)
def test_a_sink_that_is_no_number_spoils_what_it_spoils_in_the_definition(kernel, sink, empty, device):
    q = torch.randn(1, 2, 6, 8, device=device)
    mask = torch.arange(6, device=device)[:, None] > (0 if empty else -1)  # the first row may see no key
    options = {"sink": torch.tensor([sink, 0.5], device=device), "mask": mask}
    found, expected = (attemper.attention(q, q, q, **options, kernel=name) for name in (kernel, "reference"))
    pairs = {"output": (found.output, expected.output)}
    pairs |= {name: (getattr(found.vitals, name), getattr(expected.vitals, name)) for name in SIGNS}
    for name, (one, other) in pairs.items():
        assert torch.equal(one.isnan(), other.isnan()), name
        assert torch.equal(one.isinf(), other.isinf()), name
