"""Attention as people write it: every form that is followed, in any layout of heads, and what only looks like it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from close import in_float64

BATCH, HEADS, LENGTH, EACH = 3, 4, 7, 8
WIDTH = HEADS * EACH


class Base(nn.Module):
    """q, k and v as (B, H, L, E); what is done with them is for each form to say."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mixing = nn.Linear(HEADS, HEADS)
        self.experts = nn.Parameter(torch.randn(WIDTH, 16))
        self.num_heads = HEADS

    def parts(self, x):
        return [part(x).unflatten(-1, (HEADS, EACH)).transpose(1, 2) for part in (self.q, self.k, self.v)]

    def forward(self, x):
        return self.meet(*self.parts(x))


def form(meet, cls=Base):
    torch.manual_seed(0)
    return type("Form", (cls,), {"meet": meet})()


def watched(net, x=None, **options):
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)) if x is None else x
    with torch.no_grad():
        expected = net(x)
        with attemper.watch(net, **options) as watch:
            output = net(x)
    assert torch.equal(output, expected)
    return watch.record, x


def mixed(self, z):
    return self.mixing(z.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def top_four(z):
    best = z.topk(4, -1)
    return torch.full_like(z, -1e9).scatter(-1, best.indices, best.values)


def last(q, k, v):
    return (part.transpose(1, 2) for part in (q, k, v))


def bqhk(self, q, k, v):
    q, k, v = last(q, k, v)
    return torch.einsum("bqhk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1), v)


def bqkh(self, q, k, v):
    q, k, v = last(q, k, v)
    return torch.einsum("bqkh,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqkh", q, k).softmax(2), v)


def ijbn(self, q, k, v):
    q, k, v = (part.permute(2, 0, 1, 3) for part in (q, k, v))
    return torch.einsum("ijbn,jbnd->ibnd", torch.einsum("ibnd,jbnd->ijbn", q, k).softmax(1), v)


def folded(self, q, k, v):
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


# how it is written, and what the logits are (None: q·kᵀ)
FORMS = {
    "heads mixed before": (
        lambda self, q, k, v: mixed(self, q @ k.mT).softmax(-1) @ v,
        lambda self, q, k: mixed(self, q @ k.mT),
    ),
    "heads mixed after": (lambda self, q, k, v: mixed(self, (q @ k.mT).softmax(-1)) @ v, None),
    "heads mixed by an einsum": (
        lambda self, q, k, v: torch.einsum("bhqk,hg->bgqk", (q @ k.mT).softmax(-1), self.mixing.weight) @ v,
        None,
    ),
    "keys first": (lambda self, q, k, v: (k @ q.mT).softmax(-2).mT @ v, None),
    "clamp_max": (
        lambda self, q, k, v: torch.clamp_max(q @ k.mT, 0.2).softmax(-1) @ v,
        lambda self, q, k: torch.clamp_max(q @ k.mT, 0.2),
    ),
    "leaky_relu": (
        lambda self, q, k, v: F.leaky_relu(q @ k.mT).softmax(-1) @ v,
        lambda self, q, k: F.leaky_relu(q @ k.mT),
    ),
    "a sink by padding": (
        lambda self, q, k, v: F.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :-1] @ v,
        lambda self, q, k: F.pad(q @ k.mT, (0, 1)),
    ),
    "selected keys": (lambda self, q, k, v: (q @ k.mT).index_select(3, torch.arange(LENGTH)).softmax(-1) @ v, None),
    "the four best": (
        lambda self, q, k, v: top_four(q @ k.mT).softmax(-1) @ v,
        lambda self, q, k: top_four(q @ k.mT),
    ),
    "a sum of products": (
        lambda self, q, k, v: ((q @ k.mT).softmax(-1)[..., None] * v[..., None, :, :]).sum(-2),
        None,
    ),
    "log_softmax and exp": (lambda self, q, k, v: F.log_softmax(q @ k.mT, -1).exp() @ v, None),
    "heads before keys": (bqhk, None),
    "heads last": (bqkh, None),
    "sequence first": (ijbn, None),
    "heads folded": (folded, None),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("meet", "logits"), FORMS.values(), ids=FORMS)
def test_every_form_is_measured_head_by_head(meet, logits):
    net = form(meet)
    record, x = watched(net)
    q, k, _ = net.parts(x)
    z = q @ k.mT if logits is None else logits(net, q, k)
    sum_p2 = z.softmax(-1).square().sum(-1).mean((0, 2))
    assert [(entry.kind, len(entry.heads)) for entry in record.entries] == [("self", HEADS)]
    assert [row["sum_p2"] for row in record.to_dicts()] == in_float64(sum_p2.tolist())
    assert [row["rows"] for row in record.to_dicts()] == [BATCH * LENGTH] * HEADS
    assert record.notes == []


def causal(scores, value):
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), value)


# a softmax takes no notice of what is subtracted from every key of a row, and the record does not either
SHIFTS = {
    "the largest of each row": (lambda z: z - z.amax(-1, keepdim=True), lambda z: z),
    "the largest of all": (lambda z: z - z.max(), lambda z: z),
    "in place": (lambda z: z.sub_(z.max(-1, keepdim=True).values), lambda z: z),
    "twice": (lambda z: z - z.amax(-1, keepdim=True) - 7 * torch.ones(()), lambda z: z),
    "then scaled": (lambda z: (z - z.amax(-1, keepdim=True)) * 3 / 2, lambda z: z * 1.5),
    "then hidden": (lambda z: causal(z - z.amax(-1, keepdim=True), -1e4), lambda z: causal(z, -torch.inf)),
    "hidden before": (
        lambda z: (h := causal(z, torch.finfo(z.dtype).min)) - h.amax(-1, keepdim=True),
        lambda z: causal(z, -torch.inf),
    ),
    "beside a sink": (
        lambda z: (s := torch.cat([z, torch.full_like(z[..., :1], 9e3)], -1)) - s.amax(-1, keepdim=True),
        lambda z: z,
    ),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("shifted", "logits"), SHIFTS.values(), ids=SHIFTS)
def test_what_is_subtracted_from_all_keys_of_a_row_is_added_back(shifted, logits):
    net = form(lambda self, q, k, v: shifted(60 + 40 * (q @ k.mT)).softmax(-1)[..., :LENGTH] @ v)
    record, x = watched(net)
    q, k, _ = net.parts(x)
    peaks = logits(60 + 40 * (q @ k.mT)).amax((0, 2, 3))
    assert [row["peak"] for row in record.to_dicts()] == [in_float64(one, 1e4) for one in peaks.tolist()]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("meet", "rows"),
    [
        (lambda self, q, k, v: torch.addmm(torch.zeros(LENGTH, LENGTH), q[0, 0], k[0, 0].mT).softmax(-1) @ v[0, 0], 7),
        (lambda self, q, k, v: (k[0, 0] @ q[0, 0, 0]).softmax(-1) @ v[0, 0], 1),
    ],
    ids=["addmm", "one query"],
)
def test_without_a_batch(meet, rows):
    net = form(meet)
    record, x = watched(net)
    q, k, _ = net.parts(x)
    sum_p2 = (q[0, 0, :rows] @ k[0, 0].mT).softmax(-1).square().sum(-1).mean()
    assert [(row["rows"], in_float64(row["sum_p2"])) for row in record.to_dicts()] == [(rows, sum_p2.item())]


@pytest.mark.usefixtures("float64")
def test_gradients_of_a_product_with_the_keys_on_its_left():
    net = form(lambda self, q, k, v: (k @ (q * 1.0).mT).softmax(-2).mT @ v)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with attemper.watch(net, gradients=True) as watch:
        net(x).square().sum().backward()
    q, k, v = (part.detach().requires_grad_() for part in net.parts(x))
    ((q @ k.mT).softmax(-1) @ v).square().sum().backward()
    for head, row in enumerate(watch.record.to_dicts()):
        for name, part in (("q", q), ("k", k)):
            assert row[f"grad_{name}_rms"] == in_float64(part.grad[:, head].square().mean().sqrt().item())


def test_heads_are_those_of_the_attention_and_not_of_what_is_around_it():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return (self.q(x) @ x.mT).softmax(-1) @ x

    class Block(nn.Module):
        num_heads = 3  # divides the batch

        def __init__(self):
            super().__init__()
            self.pool = Single()

        def forward(self, x):
            return self.pool(x)

    record, _ = watched(Block())
    assert [(row["layer"], row["rows"]) for row in record.to_dicts()] == [("pool", BATCH * LENGTH)]


def test_heads_that_nothing_names_are_told_by_the_batch():
    net = form(folded)
    del net.num_heads
    record, _ = watched(net)
    assert len(record.entries[0].heads) == HEADS
    assert record.notes == []


def test_heads_that_nothing_shows_are_said_to_be_one():
    class Folded(nn.Module):
        def forward(self, *, q):
            return (q @ q.mT).softmax(-1) @ q

    net = Folded()
    with torch.no_grad(), attemper.watch(net) as watch:
        net(q=torch.randn(12, 5, 8))
    assert len(watch.record) == 1
    assert watch.record.notes == [
        "Folded: which part of its scores belongs to which head is not known: measured as one head."
    ]


def test_weights_that_meet_values_twice_are_counted_once():
    def meet(self, q, k, v):
        p = (q @ k.mT).softmax(-1)
        return (p * 0.5) @ v + p @ torch.ones(LENGTH, 1)

    record, _ = watched(form(meet))
    assert record.to_dicts()[0]["rows"] == BATCH * LENGTH


@pytest.mark.usefixtures("float64")
def test_both_softmaxes_of_a_difference_are_counted():
    def meet(self, q, k, v):
        return ((q @ k.mT).softmax(-1) - 0.3 * (q.flip(-1) @ k.mT * 9).softmax(-1)) @ v

    net = form(meet)
    record, x = watched(net)
    q, k, _ = net.parts(x)
    assert record.to_dicts()[0]["rows"] == 2 * BATCH * LENGTH
    assert record.to_dicts()[0]["peak"] == in_float64((q.flip(-1) @ k.mT * 9)[:, 0].max().item())


def router(self, x, weight):
    gates = (x.flatten(0, 1) @ weight).softmax(-1)
    return (gates.mT @ x.flatten(0, 1).to(gates.dtype)).sum()


def capsules(self, x):
    parts, logits = self.v(x).unflatten(-1, (HEADS, EACH)), torch.zeros(BATCH, LENGTH, HEADS)
    for _ in range(3):
        out = torch.einsum("blh,blhe->bhe", logits.softmax(-1), parts)
        logits = logits + torch.einsum("blhe,bhe->blh", parts, out)
    return out.sum()


BESIDE = {
    "a router": lambda self, x: router(self, x, self.experts),
    "a router by cosines": lambda self, x: router(self, F.normalize(x, dim=-1), F.normalize(self.experts, dim=0)),
    "a codebook": lambda self, x: ((x @ (self.experts * 2.0)).softmax(-1) @ self.experts.mT).sum(),
    "capsules": capsules,
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_what_only_looks_like_attention_is_not_counted(beside, autocast):
    class Beside(Base):
        def forward(self, x):
            return F.scaled_dot_product_attention(*self.parts(x)) + beside(self, x)

    net, x = Beside(), torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), attemper.watch(net) as watch:
        for _ in range(2):  # autocast keeps the copies it makes of weights
            net(x)
    assert [(entry.kind, len(entry.heads)) for entry in watch.record.entries] == [("self", HEADS)]
    assert watch.record.to_dicts()[0]["rows"] == 2 * BATCH * LENGTH
    assert watch.record.info["", "self"].route == "sdpa"


@pytest.mark.parametrize("causal", [False, True])
def test_the_facts_of_sdpa_s_own_math(causal):
    """With dropout, SDPA on the CPU is a product, a softmax and a product."""
    net = form(
        lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.1, dropout_p=1e-9)
    )
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with attemper.watch(net) as watch:
        net(x)
    info = watch.record.info["", "self"]
    assert (info.route, info.causal) == ("sdpa", causal)
    assert info.scale == in_float64(0.1)


def test_a_query_multiplied_before_the_product_leaves_the_scale_unknown():
    record, _ = watched(form(lambda self, q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v))
    assert record.info["", "self"].scale is None


class Windows(nn.Module):
    """Each query attends to its own window; batch and heads are one dimension (local-attention)."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, q, k, v):
        q, k, v = (part.flatten(0, 1).unflatten(1, (-1, self.size)) for part in (q, k, v))
        return (torch.einsum("bwie,bwje->bwij", q, k).softmax(-1) @ v).flatten(1, 2).unflatten(0, (-1, HEADS))


class InWindows(Base):
    def __init__(self, size, inner):
        super().__init__()
        self.size, self.inner = size, Windows(size) if inner else None

    def forward(self, x):
        q, k, v = self.parts(x)
        return Windows(self.size).forward(q, k, v) if self.inner is None else self.inner(q, k, v)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("windows", [1, 2, 4, 8])
@pytest.mark.parametrize("inner", [True, False])
def test_windows_are_no_heads(inner, windows):
    net = InWindows(5, inner)
    record, x = watched(net, torch.randn(BATCH, 5 * windows, WIDTH))
    q, k, _ = (part.unflatten(2, (-1, 5)) for part in net.parts(x))
    sum_p2 = (q @ k.mT).softmax(-1).square().sum(-1).mean((0, 2, 3))
    if inner or windows != HEADS:
        assert [row["sum_p2"] for row in record.to_dicts()] == in_float64(sum_p2.tolist())
        assert record.notes == []
    else:  # as many windows as heads: either may be the heads
        assert [row["sum_p2"] for row in record.to_dicts()] == [in_float64(sum_p2.mean().item())]
        assert len(record.notes) == 1
        assert "which head is not known: measured as one head" in record.notes[0]
    assert {row["rows"] for row in record.to_dicts()} == {BATCH * 5 * windows * HEADS / len(record.to_dicts())}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("blocks", "known"), [(2, True), (HEADS, False)])
def test_as_many_blocks_as_heads(blocks, known):
    """Nothing in (B, 4, 4, q, k) says which 4 are the heads."""

    def meet(self, q, k, v):
        q, k, v = (part.unflatten(2, (blocks, -1)) for part in (q, k, v))
        return (torch.einsum("bhnie,bhnje->bhnij", q, k).softmax(-1) @ v).flatten(2, 3)

    net = form(meet)
    record, _ = watched(net, torch.randn(BATCH, 3 * blocks, WIDTH))
    assert len(record.to_dicts()) == (HEADS if known else 1)
    assert bool(record.notes) is not known
