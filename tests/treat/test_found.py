"""projections(): what it finds and prints, and what it says where nothing can be scaled."""

import copy

import pytest
import torch
import transformers
from torch import nn

import attemper
from attemper.errors import InputError
from close import in_float64
from treat.architectures import BIASED, BY_LAYER, OTHER, PER_HEAD, WIDTH, Odd, small
from treat.clipping import as_dtype, first, made, middle, watched

ALL = {**PER_HEAD, **BY_LAYER, **BIASED, **OTHER}


def attend(q, k, v):
    q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """Two layers of one class may be wired differently."""

    def __init__(self, crossed=False):
        super().__init__()
        self.crossed = crossed
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q, k = (self.b(x), self.a(x)) if self.crossed else (self.a(x), self.b(x))
        return x + attend(q, k, self.c(x))


def test_layers_of_one_class_that_are_wired_differently():
    model = nn.Sequential(Layer(), Layer(), Layer(crossed=True), Layer())
    found = attemper.projections(model, torch.randn(1, 5, WIDTH))
    sides = [{part.parameter: part.side for part in layer.parts} for layer in found.values()]
    assert [side[f"{index}.a.weight"] for index, side in enumerate(sides)] == ["q", "q", "k", "q"]
    assert [side[f"{index}.b.bias"] for index, side in enumerate(sides)] == ["k", "k", "q", "k"]


def test_it_prints_a_line_per_layer():
    model, inputs = made(PER_HEAD["llama, grouped keys"])
    found = attemper.projections(model, inputs)
    assert str(found) == (
        "layers.0.self_attn: 4 heads, 2 for keys; per head: "
        "q from q_proj.weight (rows 0–3, …), k from k_proj.weight (rows 0–3, …)"
    )
    assert repr(found) == "Projections(layers: 1, found: 1)"
    rows = found["layers.0.self_attn", "self"].of_head(3)
    assert [(part.side, part.rows) for part in rows] == [("q", (12, 13, 14, 15)), ("k", (4, 5, 6, 7))]


def test_a_layout_that_no_list_names():
    found = attemper.projections(Odd(), torch.randn(2, 6, WIDTH))["", "self"]
    assert [(part.parameter, part.dim, part.rows) for part in found.of_head(2)] == [
        ("wq", 2, (2,)),
        ("offset", 0, (2,)),
        ("wk.2", 0, (0, 1, 2, 3)),
    ]


class Cosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (nn.functional.normalize(part.unflatten(-1, (4, 4)), dim=-1).flatten(-2) for part in (q, k))
        return attend(q, k, v)


class Mixed(nn.Module):
    """Heads are mixed after their projection, so no row belongs to a single head."""

    def __init__(self):
        super().__init__()
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q = torch.einsum("blhe,hg->blge", q.unflatten(-1, (4, 4)), self.mix).flatten(-2)
        return attend(q, k, v)


class OneForAll(nn.Module):
    """One projection for q, k and v."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.qkv(x)
        return attend(q, torch.cat([q], -1), q + 0)


class Added(nn.Module):
    """The input is added to q, and two query heads share each key head: neither side can be scaled for one head."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        k, v = (part.unflatten(-1, (2, 4)).repeat_interleave(2, -2).flatten(-2) for part in self.kv(x).chunk(2, -1))
        return attend(self.q(x) + x, k, v)


class Zero(Layer):
    def __init__(self):
        super().__init__()
        for parameter in self.a.parameters():
            nn.init.zeros_(parameter)


class Detached(Layer):
    def forward(self, x):
        with torch.no_grad():
            q, k = self.a(x), self.b(x)
        return attend(q, k, self.c(x))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Cosine, "q is normalised and has no gain, so that its logits are bounded by construction"),
        (OneForAll, "weights that heads share, or that q shares with k or v, cannot be scaled for one head"),
        (Added, "scaling the parameters of Added that make q does not scale q by the same factor"),
        (Detached, "no gradient leads from q to a parameter"),
        (Zero, "q is 0 everywhere, as before the first step of weights that begin at 0"),
    ],
)
def test_why_nothing_can_be_scaled(model, words):
    built, x = model().double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    assert words in str(attemper.projections(built, x))
    with torch.no_grad(), attemper.watch(built) as watch:
        built(x)
    before = copy.deepcopy(built.state_dict())
    clip = attemper.qk_clip(built, watch.record, 1e-3)
    assert not clip.heads
    assert words in str(clip) or model is Zero  # its logits are 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in built.state_dict().items())


def test_heads_that_are_mixed_are_scaled_by_the_mixture():
    found = attemper.projections(Mixed().double(), torch.randn(2, 6, WIDTH, dtype=torch.float64))["", "self"]
    assert [(part.parameter, part.dim) for part in found.parts if part.side == "q"] == [("mix", 1)]


@pytest.mark.parametrize("way", ["plain", "checkpoint", "autocast"])
def test_found_in_a_training_step_by_an_examiner(way):
    """As a callback does it: in training mode, without an extra pass, and without changing a bit of the gradients."""
    model, inputs = made(small(transformers.LlamaForCausalLM, transformers.LlamaConfig, keys=2, num_hidden_layers=2))
    model = model.float().train()
    expected = attemper.projections(model, inputs)
    if way == "checkpoint":
        model.gradient_checkpointing_enable()

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    gradients = step()
    examiners = []  # read at every pass, so the finder can be taken out once it is done
    finder = attemper.treat.Finder(model)
    with finder, attemper.watch(model, examiners=examiners) as watch:
        examiners.append(finder)
        with torch.no_grad():
            model(**inputs)  # evaluation shows no graph, and is not searched
        for index, (searched, plain) in enumerate(zip(step(), gradients, strict=True)):
            assert searched is plain is None or torch.equal(searched, plain), index
        watch.step()
        examiners.clear()
        step()
    assert str(finder.projections) == str(expected)
    assert attemper.treat.last_projections(model) is finder.projections
    assert len(watch.record.steps) == 2


def test_a_pass_that_the_model_itself_never_ends():
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(1, 5, WIDTH)
    finder = attemper.treat.Finder(model)
    with finder, attemper.watch(model, examiners=[finder]):
        model[1](model[0](x)).sum().backward()
        assert finder.projections is None
        with torch.no_grad():
            finder.finish()
    assert list(finder.projections) == [("0", "self"), ("1", "self")]


SAME = ["llama, biased", "gpt2", "deepseek_v3", "olmo2", "falcon, new", "odd"]


@pytest.mark.parametrize(
    "name", [*SAME, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ALL if one not in SAME)]
)
def test_the_same_in_every_dtype_and_at_initialisation(name):
    """At initialisation biases are 0 and gains 1, and half precision rounds; the rows of a head stay the same."""
    model, inputs = made(ALL[name])
    expected = str(attemper.projections(model, inputs)).replace(" (cross)", "")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model, inputs = made(ALL[name], dtype=dtype)
        assert str(attemper.projections(model, inputs)).replace(" (cross)", "") == expected, dtype
    torch.manual_seed(0)
    model, inputs = ALL[name]()
    assert str(attemper.projections(as_dtype(model, torch.float32), inputs)).replace(" (cross)", "") == expected


@pytest.mark.parametrize(
    "outside", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_found_wherever_it_is_called(outside):
    model, inputs = made(PER_HEAD["llama"], dtype=torch.float32)
    model.requires_grad_(False)
    expected = str(attemper.projections(model, inputs))
    with outside():
        assert str(attemper.projections(model, inputs)) == expected
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_hugging_face_model_that_was_never_searched_runs_its_own_sample():
    model, inputs = made(PER_HEAD["gpt2"])
    record = watched(model, inputs)
    peaks = first(record)[1]
    tau = middle(peaks)
    assert attemper.qk_clip(model, record, tau)
    after = first(watched(model, inputs))[1]
    assert after.tolist() == [in_float64(x) for x in peaks.clamp(max=tau).tolist()]


class Wrapper(nn.Module):
    """As torch.compile wraps a model."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def forward(self, **inputs):
        return self._orig_mod(**inputs)


def test_a_wrapped_model_and_the_model_inside_have_the_same_names():
    model, inputs = made(PER_HEAD["llama"])
    found = attemper.projections(Wrapper(model), inputs)
    assert list(found) == [("layers.0.self_attn", "self")]
    assert attemper.treat.last_projections(model) is found


def test_named_projections_clip_alike():
    model, inputs = made(PER_HEAD["llama"])
    other = copy.deepcopy(model)
    record = watched(model, inputs)
    tau = middle(first(record)[1])
    attemper.projections(model, inputs)
    named = attemper.Projections.named(other, heads=4, q="*.q_proj.weight", k="*.k_proj.weight")
    attemper.qk_clip(model, record, tau)
    attemper.qk_clip(other, record, tau, projections=named)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, other.state_dict()[name]), name


@pytest.mark.parametrize("given", [{"q": "*.nothing"}, {"q": "*.q_proj.weight", "heads": 3}])
def test_named_projections_that_do_not_fit(given):
    model, _ = made(PER_HEAD["llama"])
    with pytest.raises(InputError, match=r"^Projections.named\(\): "):
        attemper.Projections.named(model, **{"heads": 4, **given})
