"""Real tensors in, real numbers out, whatever the default device is: nothing of ours is made on it."""

import math

import pytest
import torch
from torch import nn

import attemper
from serving import ON_CPU

Q, K, V = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0)).unbind()
LEAVES = [t.clone().requires_grad_() for t in (Q, K, V)]


def gradients(attended):
    loss = attended.output.sum() + sum(getattr(attended.vitals, name).sum() for name in ("entropy", "variance", "peak"))
    return torch.autograd.grad(loss, LEAVES)


def watched():
    with torch.device("cpu"):
        layer = nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.0)
        x = torch.randn(2, 5, 16)
    with attemper.watch(layer, gradients=True) as watch:
        layer(x).sum().backward()
    return [row["entropy"] for row in watch.record.filter(heads=[1]).to_dicts()]


def module(kind, **options):
    with torch.device("cpu"):
        made, x = kind(16, 2, **options), torch.randn(2, 5, 16)
    return made(x, x, x)[0]


def masked(kernel):
    mask = torch.zeros_like(Q[:1, :1, :1]).sum(-1, keepdim=True).expand(1, 1, 1, 9).clone().requires_grad_()
    return torch.autograd.grad(attemper.attention(Q, K, V, mask=mask, kernel=kernel).output.sum(), mask)


ENTRIES = {
    **{f"attention, {kernel}": lambda kernel=kernel: attemper.attention(Q, K, V, kernel=kernel) for kernel in ON_CPU},
    **{f"dropout, {name}": lambda name=name: attemper.attention(Q, K, V, dropout=0.5, kernel=name) for name in ON_CPU},
    **{f"backward, {name}": lambda name=name: gradients(attemper.attention(*LEAVES, kernel=name)) for name in ON_CPU},
    **{f"a mask's gradient, {kernel}": lambda kernel=kernel: masked(kernel) for kernel in ON_CPU},
    "decode": lambda: attemper.attention(Q[:, :, :1], K, V, causal="lower_right", window=4),
    "sdpa with dropout": lambda: attemper.sdpa(Q, K, V, dropout_p=0.5, is_causal=True),
    "a scale per head": lambda: attemper.attention(Q, K, V, scale=Q[0, :, 0, 0].abs()),
    "measure": lambda: attemper.measure(Q, K, softcap=2.0),
    "weights": lambda: attemper.weights(Q, K, causal=True),
    "merge": lambda: attemper.merge([attemper.attention(Q, K[:, :, s], V[:, :, s]) for s in (slice(4), slice(4, 9))]),
    "additive": lambda: gradients(attemper.additive_attention(*LEAVES, Q[0, 0, 0], dropout=0.5)),
    "cosine": lambda: gradients(attemper.cosine_attention(*LEAVES, scale=10.0)),
    "by_head": lambda: attemper.measure(Q, K).by_head().to_dicts(),
    "a module": lambda: module(attemper.MultiHeadAttention, rule="log_n", add_bias_kv=True, dropout=0.5),
    "an additive module": lambda: module(attemper.AdditiveAttention),
    "watch": watched,
}
if "explain" in attemper.__all__:  # which the library alone does not have
    ENTRIES["explain"] = lambda: attemper.explain("the cat sat").to_dict()


def numbers(thing):
    """Every number of a result, as one list."""
    if isinstance(thing, torch.Tensor):
        assert thing.device.type == "cpu"
        return thing.detach().double().flatten().tolist()
    if isinstance(thing, dict):
        return [x for value in thing.values() for x in numbers(value)]
    if isinstance(thing, attemper.Vitals):
        return [x for name in thing.measured for x in numbers(getattr(thing, name))]
    if isinstance(thing, (list, tuple)):
        return [x for value in thing for x in numbers(value)]
    return [float(thing)] if isinstance(thing, (int, float)) else []


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_the_default_device_is_the_callers(entry):
    torch.manual_seed(0)
    expected = numbers(entry())
    torch.manual_seed(0)
    with torch.device("meta"):
        found = numbers(entry())
    assert found
    assert all(map(math.isfinite, found))
    assert found == expected
