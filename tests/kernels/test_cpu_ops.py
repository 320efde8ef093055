"""The ops of a compiled graph as the extension computes them, against our functions in Python, bit for bit."""

import sys

import pytest
import torch

from attemper.kernels.contract import ALL_SIGNS, OUTPUT_LOW_BIT, NeedsGrad, Problem, Results, Upstream, packed_signs
from attemper.operation import ops, tally
from attemper.operation.call import prepare
from native import native, needed

pytestmark = [needed, pytest.mark.skipif(native is None or not native.bound, reason="needs torch's table of DLPack")]
B, H, G, ROWS, KEYS, E, EV = 2, 4, 2, 3, 9, 8, 5
HANDED_ON = object()


def problem(dtype=torch.float32, value_dim=EV, **options):
    shapes = (B, H, ROWS, E), (B, G, KEYS, E), (B, G, KEYS, value_dim)
    return prepare("test", *(torch.randn(shape, dtype=dtype) for shape in shapes), **options).problem


PLAIN = {
    "full": {},
    "equal widths": {"value_dim": E},
    "causal window": {"causal": "lower_right", "window": 4},
    "softcap": {"softcap": 2.0},
    "boolean mask": {"mask": torch.rand(B, 1, 1, KEYS) > 0.3},
    "float mask": {"mask": torch.randn(H, ROWS, KEYS)},
    "learned scale": {"scale": torch.rand(H)},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "causal": True},
}
OTHERS = {
    "float64": {"dtype": torch.float64},
    "dropout": {"dropout": 0.3},
    "sink": {"sink": torch.randn(H)},
    "documents": {"documents": (torch.tensor([0, 2, 3]), torch.tensor([0, 4, 9]))},
    "no values": {"value_dim": 0},
}
plain = pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
others = pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)


def op(name, *more):
    """The function of the extension; it returns a mark instead of handing a call on to Python."""
    return native.library.op(name, (lambda *_: HANDED_ON, *more) if more else lambda *_: HANDED_ON)


def results(asked, bits=ALL_SIGNS | OUTPUT_LOW_BIT):
    return ops.packed_forward(*asked, bits, "cpu")


@plain
@pytest.mark.parametrize("bits", [ALL_SIGNS, ALL_SIGNS | OUTPUT_LOW_BIT])
def test_forward(options, bits):
    asked = problem(**options)
    found, expected = op("forward_packed")(*asked, bits, "cpu"), results(asked, bits)
    for one, other in zip(found[:4], expected[:4], strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)
    signs, others = (packed_signs(packed, (B, H, ROWS)) for packed in (found[4], expected[4]))
    assert found[4].shape == expected[4].shape
    assert all(torch.equal(signs[name], others[name]) for name in others)


@plain
@pytest.mark.parametrize("needed", [range(7), (0,), (1, 2), (2,)], ids=str)
def test_backward(options, needed):
    asked = problem(**options)
    output, low, lse_low, lse, _ = results(asked)
    saved = Results(output, low, None, lse_low, *[None] * 4, lse, None, None)
    upstream = Upstream(torch.randn(output.shape).to(output.dtype), *[None] * 6)
    there = [tensor is not None and tensor.is_floating_point() for tensor in asked.tensors]
    wanted = [there[i] and i in needed and i != 3 for i in range(7)]
    args = (*asked, *saved, *upstream, wanted, "cpu")
    found, expected = op("backward")(*args), ops.op_backward(*args)
    assert all(map(torch.equal, found, expected))
    assert [bool(one.numel()) for one in found] == wanted
    if there[3]:
        assert op("backward")(*asked, *saved, *upstream, [True] * 7, "cpu") is HANDED_ON
    assert op("backward")(*asked, *saved._replace(lse=lse.mT.contiguous().mT), *upstream, wanted, "cpu") is HANDED_ON


@others
def test_other_calls_are_handed_on(options):
    asked = problem(**options)
    assert op("forward_packed")(*asked, ALL_SIGNS, "cpu") is HANDED_ON
    output, low, lse_low, lse, _ = results(asked)
    saved, upstream = Results(output, low, None, lse_low, *[None] * 4, lse, None, None), Upstream(output, *[None] * 6)
    if options not in (OTHERS["float64"], OTHERS["no values"]):
        needs = NeedsGrad(True, True, True, False, False)
        assert op("backward")(*asked, *saved, *upstream, list(needs), "cpu") is HANDED_ON


def test_recorded_calls_and_other_kernels_are_handed_on():
    asked = problem()
    assert op("forward_packed")(*asked, ALL_SIGNS, "blockwise") is HANDED_ON
    asked.query.requires_grad_()
    assert op("forward_packed")(*asked, ALL_SIGNS, "cpu") is HANDED_ON
    with torch.no_grad():
        assert op("forward_packed")(*asked, ALL_SIGNS, "cpu") is not HANDED_ON


def described(keep, grade=2, kind="self"):
    return (keep, grade, "test", kind, "", None, None, "float32", G, KEYS, E, 0.5, None, None, None, 0.0, False, False)


def adding():
    return op("tally_packed", tally._NUMBERS, tally.SATURABLE_KEYS, tally.SATURATED_WEIGHT)


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("keep", [None, torch.rand(B, ROWS) > 0.3, (torch.rand(B, 1) > 0.3).expand(B, ROWS)])
def test_tally(keep, kind):
    asked, about = problem(), described(keep, kind=kind)
    _, _, lse_low, lse, packed = results(asked)
    found, expected = (torch.zeros(2, 3, H + 1, tally.WIDTH, dtype=torch.float64) for _ in range(2))
    tally._tally_packed(
        torch.zeros_like(found), lse, lse_low, packed, *about
    )  # from now on its description has a number
    for number in range(3):
        peak = packed_signs(packed, (B, H, ROWS))["peak"]
        peak[0, 1, 0] = (-50.0, float("nan"), 50.0)[number]
        assert adding()(found, lse, lse_low, packed, *about) is None
        tally._tally_packed(expected, lse, lse_low, packed, *about)
        assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert found[..., tally.CALLS].sum() == 3 * H


def test_a_tally_that_does_not_fit_and_a_new_description_are_handed_on():
    _, _, lse_low, lse, packed = results(problem())
    room, about = torch.zeros(2, 3, H, tally.WIDTH, dtype=torch.float64), described(None)
    assert adding()(room, lse, lse_low, packed, None, 2, "new", *about[3:]) is HANDED_ON
    tally._tally_packed(room.clone(), lse, lse_low, packed, *about)
    assert adding()(room, lse, lse_low, packed, *about) is None
    for wrong in (room[:, :, :1], room.float(), room[..., :3], room.mT):
        assert adding()(wrong, lse, lse_low, packed, *about) is HANDED_ON
    assert adding()(room, lse, lse_low, packed, *described(None, grade=3)) is HANDED_ON
    assert adding()(room, lse, lse_low, packed[1:], *about) is HANDED_ON
    assert adding()(room, lse.double(), lse_low, packed, *about) is HANDED_ON
    assert adding()(room, lse, lse_low, packed, *described(torch.ones(B, ROWS))) is HANDED_ON


def test_a_call_that_a_backward_computes_again_is_not_added():
    _, _, lse_low, lse, packed = results(problem())
    room, about = torch.zeros(2, 3, H, tally.WIDTH, dtype=torch.float64), described(None)
    tally._tally_packed(room.clone(), lse, lse_low, packed, *about)
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: adding()(room, lse, lse_low, packed, *about))
    (leaf * 2).sum().backward()
    assert not room.any()
    adding()(room, lse, lse_low, packed, *about)
    assert room.any()


def test_no_reference_is_kept_or_lost():
    asked, about = problem(value_dim=E), described(torch.rand(B, ROWS) > 0.3)
    output, low, lse_low, lse, packed = results(asked)
    room = torch.zeros(2, 3, H, tally.WIDTH, dtype=torch.float64)
    tally._tally_packed(room, lse, lse_low, packed, *about)
    saved = (output, low, None, lse_low, *[None] * 4, lse, None, None)
    differ = (*asked, *saved, output, *[None] * 6, [True] * 3 + [False] * 4, "cpu")
    functions = [op("forward_packed"), op("backward"), adding()]
    held = [*asked.tensors[:3], output, low, lse_low, lse, packed, room, about[0], tally._NUMBERS, *functions]

    def run():
        functions[0](*asked, ALL_SIGNS, "cpu")
        functions[0](*asked, ALL_SIGNS, "blockwise")
        functions[1](*differ)
        functions[2](room, lse, lse_low, packed, *about)

    run()
    before = [sys.getrefcount(one) for one in held]
    for _ in range(200):
        run()
    assert max(abs(sys.getrefcount(one) - count) for one, count in zip(held, before, strict=True)) < 20


def test_wrong_arguments_raise():
    with pytest.raises(ValueError, match="no op is named 'x'"):
        native.library.op("x", None)
    for name in ("forward_packed", "backward"):
        with pytest.raises(TypeError, match=r"takes \d+ arguments; got 1"):
            op(name)(None)
    assert len(Problem._fields) == 15  # the extension counts them
