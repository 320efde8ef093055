"""Masks whose class answers for torch: a watch changes nothing of such a call, and measures it, or says that it does not."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as ALIAS
from torch.overrides import TorchFunctionMode

import attemper
from watched import bits, same_record, steps

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


class Values(torch.Tensor):
    """A mask whose class could do anything, and does what torch does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Unwrapped(Values):
    """One that finds torch's function by its name, as CausalBias does, and gives it the plain mask."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            kwargs = {**(kwargs or {}), "attn_mask": kwargs["attn_mask"].as_subclass(torch.Tensor)}
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


class Plain(torch.Tensor):
    """A class that overrides nothing."""


class AsCausal(TorchFunctionMode):
    """Makes every attention causal, and finds it by its name too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            kwargs = {**(kwargs or {}), "attn_mask": None, "is_causal": True}
        return func(*args, **(kwargs or {}))


def visible(rows, keys, offset=0):
    return torch.ones(rows, keys, dtype=torch.bool).tril(offset)


MASKS = {
    "upper left": (causal_upper_left, lambda rows, keys: None),
    "lower right": (causal_lower_right, lambda rows, keys: None if rows == keys else visible(rows, keys, keys - rows)),
    "unwrapped": (lambda rows, keys: visible(rows, keys).as_subclass(Unwrapped), visible),
    "parameter": (
        lambda *sizes: nn.Parameter(torch.zeros(sizes)),
        lambda *sizes: torch.zeros(sizes, requires_grad=True),
    ),
}
"""Those that are measured: as a model makes them, and what they mean as a mask; None is is_causal."""


class Masked(nn.Module):
    """Self-attention, whose last `rows` tokens alone may be queries, under a mask that is held or made in each forward."""

    def __init__(self, make, held, rows=None):
        super().__init__()
        self.packed, self.make, self.rows = nn.Linear(16, 48), make, rows
        self.held = make(rows or 5, 5) if held else None

    def forward(self, x):
        q, k, v = self.packed(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        q = q[:, :, -(self.rows or q.shape[2]) :]
        mask = self.make(q.shape[2], k.shape[2]) if self.held is None else self.held
        causal = {"is_causal": True} if mask is None else {"attn_mask": mask}
        return F.scaled_dot_product_attention(q, k, v, **causal).transpose(1, 2).flatten(2)


def model(make, *, held=False, rows=None):
    torch.manual_seed(0)
    return Masked(make, held, rows)


class Unwatched:
    def step(self):
        pass


def drive(subject, watch):
    torch.manual_seed(1)
    return bits(steps(subject, watch, count=4))


@pytest.fixture(params=[False, True], ids=["float32", "autocast"])
def autocast(request):
    with torch.autocast("cpu", torch.bfloat16, enabled=request.param):
        yield


@pytest.mark.parametrize("full", [False, True], ids=["intercepted", "full"])
@pytest.mark.parametrize("held", [False, True], ids=["made inside", "held"])
@pytest.mark.parametrize("rows", [None, 2], ids=["square", "two rows"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("autocast")
def test_the_output_and_the_record_are_those_of_the_plain_mask(name, rows, held, full):
    make, plain = MASKS[name]
    expected = drive(model(make, held=held, rows=rows), Unwatched())
    subject = model(make, held=held, rows=rows)
    with attemper.watch(subject, full=full, gradients=True) as watch:
        found = drive(subject, watch)
    assert found == expected
    with attemper.watch(model(plain, rows=rows), full=True, gradients=True) as same:
        drive(same.model, same)
    assert watch.record.notes == same.record.notes == []
    same_record(watch.record, same.record)


def test_an_intercepted_pass_stays_intercepted_with_a_causal_bias(kinds):
    subject = model(causal_upper_left)
    with attemper.watch(subject) as watch:
        steps(subject, watch)
    assert kinds == ["full"] + ["intercepted"] * 5


@pytest.mark.parametrize("full", [False, True], ids=["intercepted", "full"])
def test_a_mask_of_an_unknown_class_is_left_alone_and_that_is_said(full):
    def make(rows, keys):
        return torch.zeros(rows, keys).masked_fill(~visible(rows, keys), -torch.inf).as_subclass(Values)

    expected = drive(model(make), Unwatched())
    subject = model(make)
    with (
        pytest.warns(UserWarning, match="Values objects"),
        attemper.watch(subject, full=full) as watch,
    ):
        found = drive(subject, watch)
    assert found == expected
    assert not watch.record.to_dicts()
    assert watch.unmeasured == 4


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("around", ["a mode", "a class"])
def test_who_finds_the_function_by_its_name_finds_torchs(watched, around):
    """Also in a model that nobody watches, while another is."""
    subject = (
        model(lambda rows, keys: torch.zeros(rows, keys), held=True) if around == "a mode" else model(causal_upper_left)
    )
    mode, x = AsCausal() if around == "a mode" else torch.no_grad(), torch.randn(2, 5, 16)
    with mode:
        expected = subject(x)
    other = model(lambda rows, keys: None)
    with attemper.watch(subject if watched else other) as watch:
        other(x)
        for _ in range(3):
            with mode:
                found = subject(x)
            assert torch.equal(found, expected)
    # 5 tokens see 1 to 5 keys
    assert {row["visible"] for row in watch.record.to_dicts()} == {3.0}


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_a_scan_and_a_floor_see_the_same_mask(make):
    subject, plain, x = model(make), model(lambda rows, keys: None), torch.randn(2, 5, 16)
    found, expected = attemper.scan(subject, x), attemper.scan(plain, x)
    assert found.heads == expected.heads
    assert found.findings == expected.findings
    outputs = []
    for one in (subject, plain):
        with attemper.floor(one, floor=0.9) as floored:
            output = one(x)
            output.sum().backward()
        assert floored.calls == 1
        outputs += [output.detach(), one.packed.weight.grad]
    assert bits(outputs[:2]) == bits(outputs[2:])


def test_a_floor_leaves_a_mask_of_an_unknown_class_to_that_class():
    subject, x = model(lambda rows, keys: visible(rows, keys).as_subclass(Unwrapped)), torch.randn(2, 5, 16)
    expected = subject(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing got a gradient
        with attemper.floor(subject) as floored:
            found = subject(x)
    assert torch.equal(found, expected)
    assert floored.calls == 0


def test_any_subclass_can_be_made_in_a_watched_forward():
    class Makes(nn.Module):
        def forward(self, x):
            made = [Plain(2, 3), Plain([1.0, 2.0]), x.as_subclass(Plain)[:1], torch.Tensor(2)]
            self.types = [type(one) for one in made]
            return F.scaled_dot_product_attention(x, x, x)

    subject = Makes()
    with attemper.watch(subject, full=True) as watch:
        for _ in range(2):
            subject(torch.randn(2, 3, 5, 8))
    assert subject.types == [Plain, Plain, Plain, torch.Tensor]
    assert len(watch.record.to_dicts()) == 3


@pytest.mark.parametrize("options", [{}, {"full": True}], ids=["intercepted", "full"])
def test_a_name_of_its_own_for_torchs_function(options):
    """The class compares the function with the one that torch's name has, where ours is while the model runs."""

    class Alias(nn.Module):
        def forward(self, x):
            q = x[:, None]
            return ALIAS(q, q, q, attn_mask=causal_upper_left(x.shape[1], x.shape[1]))[:, 0]

    model, x = Alias(), torch.randn(2, 9, 8)
    expected, before = model(x), dict(vars(CausalBias))
    with attemper.watch(model, **options) as watch:
        for _ in range(3):
            assert torch.equal(model(x), expected)
            watch.step()
        assert torch.equal(x.__new__(torch.Tensor, [1.0]), torch.ones(1))  # what a watch puts there is no method
    assert [row["visible"] for row in watch.record.to_dicts()] == [5.0] * 3
    assert dict(vars(CausalBias)) == before
