"""Heads that are computed some at a time, in slices or in a loop, have their own rows; traced graphs have no layers to name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from close import in_float64
from watched import same

BATCH, LENGTH, HEADS, EACH = 2, 7, 4, 8
WIDTH = HEADS * EACH


class Sliced(nn.Module):
    def __init__(self, way, size):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads, self.way, self.size = HEADS, way, size

    def parts(self, x):
        return [part(x).unflatten(-1, (HEADS, EACH)).transpose(1, 2) for part in (self.q, self.k, self.v)]

    def forward(self, x):
        q, k, v = self.parts(x)
        if self.way == "joined":  # diffusers' attention slicing
            q, k, v = (part.flatten(0, 1) for part in (q, k, v))
            parts = [slice(start, start + self.size) for start in range(0, len(q), self.size)]
            weights = [torch.bmm(q[part], k[part].mT).softmax(-1) for part in parts]
            return torch.cat([torch.bmm(one, v[part]) for one, part in zip(weights, parts, strict=True)])
        if self.way == "copied":
            q, k, v = (part.contiguous() for part in (q, k, v))
        found = []
        for head in range(HEADS):
            one, other = q[:, head], k[:, head]
            if self.way == "turned":
                one, other = one.cos() + one, other.sin() + other
            found.append((one @ other.mT).softmax(-1) @ v[:, head])
        return torch.stack(found, 1)


def watched(net, x):
    with torch.no_grad():
        expected = net(x)
        with attemper.watch(net) as watch:
            assert torch.equal(net(x), expected)
    return watch.record


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("way", "size"), [("joined", 1), ("joined", 2), ("joined", HEADS), ("loop", 1), ("copied", 1)], ids=str
)
def test_heads_that_are_computed_apart_have_their_own_rows(way, size, tmp_path):
    net, x = Sliced(way, size), torch.randn(BATCH, LENGTH, WIDTH)
    record = watched(net, x)
    q, k, _ = net.parts(x)
    z = q @ k.mT
    entropy = torch.special.entr(z.softmax(-1)).sum(-1).mean((0, 2))
    rows = sorted(record.to_dicts(), key=lambda row: row["head"])
    assert [(row["head"], row["rows"]) for row in rows] == [(head, BATCH * LENGTH) for head in range(HEADS)]
    assert [row["peak"] for row in rows] == in_float64(z.amax((0, 2, 3)).tolist())
    assert [row["entropy"] for row in rows] == in_float64(entropy.tolist())
    assert record.notes == []
    record.write(tmp_path / "record.jsonl")
    read = attemper.Record.read(tmp_path / "record.jsonl").to_dicts()
    for one, other in zip(sorted(read, key=lambda row: row["head"]), rows, strict=True):
        same(one, other)


def test_heads_that_nothing_tells_apart_are_said():
    record = watched(Sliced("turned", 1), torch.randn(BATCH, LENGTH, WIDTH))
    assert [(row["head"], row["rows"]) for row in record.to_dicts()] == [(0, HEADS * BATCH * LENGTH)]
    assert record.notes == [
        "Sliced: which part of its scores belongs to which head is not known: measured as one head."
    ]


@pytest.mark.parametrize("way", ["joined", "turned"])
def test_a_clip_leaves_them_alone(way):
    net, x = Sliced(way, 1), torch.randn(BATCH, LENGTH, WIDTH)
    record = watched(net, x)
    attemper.projections(net, x)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    assert "nothing was clipped" in str(attemper.qk_clip(net, record, tau=1e-3))
    assert all(map(torch.equal, before, net.parameters()))


OPERATIONS = {
    "sdpa": F.scaled_dot_product_attention,
    "attemper": lambda q, k, v: attemper.attention(q, k, v).output,
    "hand-written": lambda q, k, v: (q * EACH**-0.5 @ k.mT).softmax(-1) @ v,
}
PARTS = {  # how a layer gives its heads to the operation
    "one": lambda q, k, v: [(q[:, head, None], k[:, head, None], v[:, head, None]) for head in range(HEADS)],
    "two": lambda q, k, v: [(q[:, part], k[:, part], v[:, part]) for part in (slice(2, 4), slice(2))],
    "copied": lambda *parts: PARTS["one"](*(part.contiguous() for part in parts)),
    "three dimensions": lambda q, k, v: [(q[:, head], k[:, head], v[:, head]) for head in range(HEADS)],
    "joined": lambda *parts: zip(*(part.flatten(0, 1).split(2) for part in parts), strict=True),
    "turned": lambda q, k, v: PARTS["one"](q.sin(), k, v),
    "turned apart": lambda q, k, v: [(q.sin(), k, v) for q, k, v in PARTS["one"](q, k, v)],
}
CASES = [
    (name, way)
    for name in OPERATIONS
    for way in PARTS
    if name != "attemper" or way not in ("three dimensions", "joined")
]


class Looped(nn.Module):
    def __init__(self, operation, way):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.num_heads, self.operation, self.way = HEADS, operation, way

    parts = Sliced.parts

    def forward(self, x):
        for q, k, v in PARTS[self.way](*self.parts(x)):
            x = x + self.operation(q, k, v).sum()
        return x


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("full", [True, False], ids=["full", "intercepted"])
@pytest.mark.parametrize("batch", [1, BATCH, HEADS])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_any_operation_on_some_heads_at_a_time(name, way, batch, full):
    net, x = Looped(OPERATIONS[name], way), torch.randn(batch, LENGTH, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            expected = net(x)
            with attemper.watch(net, full=full) as watch:
                assert torch.equal(net(x), expected)
    rows = watch.record.to_dicts()
    if way == "turned apart":
        assert [(row["head"], row["rows"]) for row in rows] == [(0, HEADS * batch * LENGTH)]
        assert "belongs to which head is not known" in str(watch.record.notes)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        attemper.projections(net, x)
        assert "nothing was clipped" in str(attemper.qk_clip(net, watch.record, tau=1e-3))
        assert all(map(torch.equal, before, net.parameters()))
        return
    q, k, _ = net.parts(x)
    z = (q.sin() if way == "turned" else q) @ k.mT * EACH**-0.5
    entropy = torch.special.entr(z.softmax(-1)).sum(-1).mean((0, 2))
    assert watch.record.notes == []
    assert [(row["head"], row["rows"]) for row in rows] == [(head, batch * LENGTH) for head in range(HEADS)]
    assert [row["peak"] for row in rows] == in_float64(z.amax((0, 2, 3)).tolist())
    assert [row["entropy"] for row in rows] == in_float64(entropy.tolist())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("copied", [False, True])
def test_queries_and_heads_some_at_a_time_are_never_given_a_wrong_head(copied):
    """The memory of a chunk of one head's queries does not show where the next head begins."""

    class Chunked(Looped):
        def forward(self, x):
            q, k, v = (part.contiguous() if copied else part for part in self.parts(x))
            for head in range(HEADS):
                for rows in q[:, head, None].split(2, -2):
                    x = x + self.operation(rows, k[:, head, None], v[:, head, None]).sum()
            return x

    net, x = Chunked(F.scaled_dot_product_attention, ""), torch.randn(BATCH, 2 * HEADS, WIDTH)
    record = watched(net, x)
    q, k, _ = net.parts(x)
    rows = record.to_dicts()
    if copied:
        assert [row["head"] for row in rows] == [0]
        assert "belongs to which head is not known" in str(record.notes)
    else:
        peaks = (q @ k.mT * EACH**-0.5).amax((0, 2, 3)).tolist()
        assert [row["peak"] for row in rows] == in_float64(peaks)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (HEADS, EACH)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


GRAPHS = {
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "jit.trace": lambda model, x: torch.jit.trace(model, x),
}


@pytest.mark.parametrize("trace", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_graph_is_not_claimed_to_be_one_layer(trace):
    x = torch.randn(BATCH, LENGTH, WIDTH)
    graph = trace(nn.Sequential(Layer(), Layer(), Layer()).eval(), x)
    with torch.no_grad():
        for _ in range(2):
            with attemper.watch(graph) as watch:
                graph(x)
            (note,) = watch.record.notes
            assert "a traced graph does not say which module makes a call" in note
    before = [parameter.detach().clone() for parameter in graph.parameters()]
    try:
        attemper.projections(graph, x)
    except NotImplementedError:  # an exported graph has no eval()
        return
    assert "nothing was clipped" in str(attemper.qk_clip(graph, watch.record, tau=1e-3))
    assert all(map(torch.equal, before, graph.parameters()))
