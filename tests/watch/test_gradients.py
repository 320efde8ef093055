"""|dq| and |dk| per head, against gradients that autograd itself hands out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.watch.attach.gradients import NO_GRADIENTS, GradientHooks
from close import in_float64
from watched import Block


class Net(nn.Module):
    """Attention on projections that are kept, so that their gradients can be read."""

    def __init__(self, groups=4, by_hand=False):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 8 * groups), nn.Linear(16, 8 * groups)
        self.groups, self.by_hand = groups, by_hand

    def forward(self, x, keep=None):
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (part(x).unflatten(-1, (self.groups, 8)).transpose(1, 2) for part in (self.k, self.v))
        mask = None if keep is None else keep[:, None, None, :]
        for tensor in (q, k):
            tensor.retain_grad()
        self.kept = q, k
        if self.by_hand:
            scores = q @ k.mT / 8**0.5
            scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
            return (scores.softmax(-1) @ v).square()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.groups != 4).square()


def expected(gradient, heads, keep):
    """Per head: count, RMS and median of |gradient| over the real rows."""
    gradient = gradient.repeat_interleave(heads // gradient.shape[1], dim=1)
    rows = [gradient[:, head][keep].abs().double().flatten() for head in range(heads)]
    return [(len(row), row.square().mean().sqrt().item(), row.median().item()) for row in rows]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("groups", "by_hand"), [(4, False), (2, False), (4, True)])
def test_rms_and_median(groups, by_hand, padded):
    net, x = Net(groups, by_hand), torch.randn(3, 6, 16)
    keep = torch.ones(3, 6, dtype=torch.bool)
    if padded:
        keep[0, 4:] = False
    with attemper.watch(net, gradients=True) as watch:
        output = net(x, keep if padded else None)
        (output * keep[:, None, :, None]).sum().backward()
    query, key = (tensor.grad for tensor in net.kept)
    rows = watch.record.to_dicts()
    for name, gradient in (("q", query), ("k", key)):
        for row, (count, rms, median) in zip(rows, expected(gradient, 4, keep), strict=True):
            assert row[f"grad_{name}_count"] == count
            assert row[f"grad_{name}_rms"] == in_float64(rms)
            assert row[f"grad_{name}_median"] == in_float64(median)


def test_a_leaf_keeps_no_hook():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Parameter(torch.randn(1, 2, 5, 8))

        def forward(self):
            return F.scaled_dot_product_attention(self.q, self.q, self.q).sum()

    net = Leaves()
    with attemper.watch(net, gradients=True) as watch:
        net().backward()
    assert watch.record.to_dicts()[0]["grad_q_rms"] > 0
    assert not net.q._backward_hooks


def test_without_a_backward_or_without_asking_there_are_none():
    net, x = Net(), torch.randn(1, 5, 16)
    with attemper.watch(net, gradients=True) as watch:
        net(x)
    assert "grad_q_rms" not in watch.record.signs
    with attemper.watch(net) as watch:
        net(x).sum().backward()
    assert "grad_q_rms" not in watch.record.signs


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradients_that_did_not_come_are_noted(context):
    model, x = nn.Sequential(Block(), Block()), torch.randn(1, 5, 16)
    with context(), attemper.watch(model, gradients=True) as watch:
        model(x)
        watch.step()
        model(x)  # said once
    assert watch.record.notes == [NO_GRADIENTS.format(step=0, layers="any layer")]
    model[0].requires_grad_(False)
    with attemper.watch(model, gradients=True) as watch:
        model(x).sum().backward()
    assert watch.record.notes == [NO_GRADIENTS.format(step=0, layers="0")]


def test_a_gradient_that_cannot_be_measured_ends_no_backward(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("out of memory")

    net, x = Block(), torch.randn(1, 5, 16)
    monkeypatch.setattr(GradientHooks, "add", full)
    with (
        pytest.warns(UserWarning, match=r"^watch\(\): Block: gradients could not be measured: out of memory\.$"),
        attemper.watch(net, gradients=True),
    ):
        net(x).sum().backward()
    assert net.packed.weight.grad is not None


def test_a_backward_after_the_watch_ended_is_harmless():
    net, x = Net(), torch.randn(1, 5, 16)
    with attemper.watch(net, gradients=True):
        output = net(x).sum()
    output.backward()
    assert net.q.weight.grad is not None
