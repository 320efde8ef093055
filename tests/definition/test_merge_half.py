"""merge() in half precision: as exact as one call, judged by float64."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import attemper
from attemper.errors import InputError
from judge import assert_as_exact

HALVES = [torch.bfloat16, torch.float16]
KERNELS = ["auto", "blockwise", "reference"]
ROWS, KEYS = 16, 64


def draw(dtype, common, lead=(2, 4)):
    """Queries, keys, and values that share a part, which cancels in exact gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(*lead, length, 16) for length in (ROWS, KEYS, KEYS))
    return [t.to(dtype) for t in (q, k, v + common)]


def shards(q, k, v, count, **options):
    """One call for each; what autograd adds up for q is added in float32."""
    wide, each = q.float(), k.shape[-2] // count
    parts = [slice(i * each, (i + 1) * each) for i in range(count)]
    return [attemper.attention(wide.to(q.dtype), k[..., s, :], v[..., s, :], **options) for s in parts]


def assert_rounded_once(output, inputs, score=attemper.attention):
    """Between the exact numbers rounded, less and more the rounding of its sums: 17 bits of each weight on AMX."""
    q, k, v = (t.detach().double() for t in inputs)
    exact, mass = score(q, k, v).output, score(q, k, v.abs()).output
    slack = mass * max(2.0**-16, KEYS * torch.finfo(torch.float32).eps)
    assert ((exact - slack).to(output.dtype) <= output).all()
    assert (output <= (exact + slack).to(output.dtype)).all()


@pytest.mark.parametrize("common", [0.0, 1000.0])
@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_is_as_exact_as_one_call(kernel, dtype, count, common):
    inputs = draw(dtype, common)
    cotangent = torch.randn(2, 4, ROWS, 16)

    def gradients(run, to):
        leaves = [t.to(to).requires_grad_() for t in inputs]
        output = run(*leaves).output
        return output, torch.autograd.grad((output * cotangent.to(to)).sum(), leaves)

    output, found = gradients(lambda *t: attemper.merge(shards(*t, count, kernel=kernel)), dtype)
    one, alone = gradients(lambda *t: attemper.attention(*t, kernel=kernel), dtype)
    _, exact = gradients(lambda *t: attemper.attention(*t), torch.float64)
    for result in (output, one):
        assert result.dtype == dtype
        assert_rounded_once(result, inputs)
    for name, *grads in zip("qkv", found, alone, exact, strict=True):
        assert_as_exact(f"d{name}", grads[0], [grads[1]], grads[2])


WAYS = {
    "merged before": lambda parts: [attemper.merge(parts[:2]), *parts[2:]],
    "sent": lambda parts: [tree_unflatten(*reversed([tree_flatten(part)[1], tree_flatten(part)[0]])) for part in parts],
    "moved": lambda parts: [tree_map(torch.clone, part) for part in parts],
    "copied": lambda parts: [part._replace(vitals=copy.copy(part.vitals)) for part in parts],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lead", [(), (4,), (2, 3, 2)])
def test_what_rounding_took_goes_with_a_part(way, lead):
    inputs = [t.requires_grad_() for t in draw(torch.bfloat16, 1000.0, lead)]
    assert_rounded_once(attemper.merge(WAYS[way](shards(*inputs, 16))).output, inputs)


SCORES = {
    "dot": attemper.attention,
    "cosine": lambda q, k, v: attemper.cosine_attention(q, k, v, scale=3.0),
    "additive": lambda q, k, v: attemper.additive_attention(q, k, v, torch.ones(16, dtype=torch.float64)),
}


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_every_score_keeps_it(score, repeated):
    """Also where an input is repeated: its gradient is a sum, and such a call runs in float32."""
    q, k, v = (t.requires_grad_() for t in draw(torch.bfloat16, 1000.0))
    k, v = (k[:1], v[:1]) if repeated else (k, v)
    parts = [SCORES[score](q, k[..., s, :], v[..., s, :]) for s in (slice(0, 32), slice(32, 64))]
    assert_rounded_once(attemper.merge(parts).output, (q, k, v), SCORES[score])


def test_what_cannot_be_merged_gets_a_sentence():
    q, k, v = draw(torch.bfloat16, 0.0)
    with pytest.raises(InputError, match=r"outputs of one width; got shapes \(2, 4, 16, 8\), \(2, 4, 16, 16\)"):
        attemper.merge([attemper.attention(q, k, v), attemper.attention(q, k, v[..., :8])])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_of_equal_peaks_the_first_that_is_listed_has_the_gradient(order):
    q, k = torch.ones(1, 1, 4), torch.zeros(1, 6, 4, requires_grad=True)
    parts = [attemper.measure(q, k[:, 2 * place : 2 * place + 2]) for place in order]
    attemper.merge(parts).peak.sum().backward()
    assert k.grad[0].abs().sum(-1).nonzero().flatten().tolist() == [2 * order[0]]


def test_an_output_that_was_changed_is_merged_as_it_is():
    """The bits that rounding took are those of the output that the call returned."""
    q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    hidden = torch.rand(1, 2, 8, 1) > 0.5
    parts = [attemper.attention(q, k[:, :, i : i + 4], v[:, :, i : i + 4]) for i in (0, 4)]
    changed = [attemper.Attended(part.output.masked_fill(hidden, 0), part.vitals) for part in parts]
    merged = attemper.merge(changed).output
    assert merged.masked_select(hidden).eq(0).all()
    assert torch.equal(merged.masked_select(~hidden), attemper.merge(parts).output.masked_select(~hidden))


def test_an_infinite_value_stays_infinite():
    q, k, v = (torch.randn(1, 1, 8, 4, dtype=torch.bfloat16) for _ in range(3))
    v[..., 0] = torch.inf
    parts = [attemper.attention(q.requires_grad_(), k[:, :, i : i + 4], v[:, :, i : i + 4]) for i in (0, 4)]
    assert attemper.merge(parts).output[..., 0].eq(torch.inf).all()
