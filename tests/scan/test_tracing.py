"""The audit in every mode a model is run in: its numbers hold, it changes nothing, and nobody else pays for it."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import attemper
from attemper.scan.audit.audit import Audit
from attemper.scan.document import plain
from attemper.watch.attach import attachment as attach
from close import in_float32, in_float64
from scan.faults import EACH, FAULTY, HEADS, LENGTH, ROOT, SIZES, Layer, by_hand, llama, numbers, stack, tokens
from scan.innocents import INNOCENT


def audited(model, run):
    audit = Audit()
    watch = attemper.watch(model, examiners=[audit])
    with watch:
        run()
    return audit.layers()


MODES = {
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
SUBJECTS = {
    **{
        name: INNOCENT[name]
        for name in ("GPT-2", "Llama", "Llama, eager", "Gemma 3: QK-norm", "GPT-NeoX: partly rotated")
    },
    **{
        name: INNOCENT[name]
        for name in ("Falcon: one key head", "QK-norm by hand, scale 1", "Swin v2: cosines", "sinks")
    },
    **{name: INNOCENT[name] for name in ("nn.MultiheadAttention with weights", "attemper, rule learned")},
    **{
        name: FAULTY[name]
        for name in ("twice: q, then SDPA", "twice in a Llama", "after softmax, by hand", "√d_model by hand")
    },
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_scale_is_the_same_in_every_mode(name, mode):
    torch.manual_seed(0)
    case = SUBJECTS[name]()
    case.model.eval()
    with mode():
        layers = audited(case.model, case.run)
    for layer in layers:
        assert layer.fault == getattr(case, "fault", None), layer.message
        assert layer.applied == pytest.approx(case.applied(0) if callable(case.applied) else case.applied, rel=5e-3)
        assert "could not be followed" not in layer.message


@pytest.mark.parametrize("name", ["Llama", "Llama, eager", "GPT-2", "ESM: scaled before it is rotated"])
def test_half_precision(name):
    torch.manual_seed(0)
    case = INNOCENT[name]()
    case.model.eval().to(torch.bfloat16)
    with torch.no_grad():
        layers = audited(case.model, case.run)
    assert [layer.fault for layer in layers] == [None, None]
    # the number itself may be a bfloat16
    assert [layer.applied for layer in layers] == pytest.approx([ROOT] * 2, rel=2**-8)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["growing", "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_generating_with_a_cache(implementation, cache):
    sizes = {**SIZES, "num_key_value_heads": 2, "attn_implementation": implementation}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    layers = audited(
        model, lambda: model.generate(**tokens(), attention_mask=mask, max_new_tokens=3, do_sample=False, **cache)
    )
    assert [(layer.applied, layer.fault) for layer in layers] == [(in_float32(ROOT, terms=8), None)] * 2
    assert not any("could not be followed" in layer.message for layer in layers)


def test_keys_that_come_from_a_cache_alone_are_said_not_to_be_followed():
    class Cached(Layer):
        def forward(self, x):
            q = self.q(x).unflatten(-1, (HEADS, EACH)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, self.keys, self.keys)

    model = Cached(None)
    model.keys = torch.randn(2, HEADS, 5, EACH)
    (layer,) = audited(model, lambda: model(numbers()))
    assert (layer.applied, layer.fault) == (in_float32(ROOT, terms=8), None)
    assert "could not be followed" in layer.message


@pytest.mark.parametrize("name", ["Llama", "sinks", "twice by hand", "Gemma 2's scalar"])
def test_no_bit_changes_and_no_random_number_is_drawn(name):
    torch.manual_seed(0)
    case = {**INNOCENT, **FAULTY}[name]()
    case.model.eval()
    with torch.no_grad():
        expected = case.run()
        state = torch.get_rng_state()
        found = []
        audited(case.model, lambda: found.append(case.run()))
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (out if isinstance(out, torch.Tensor) else out[0] for out in (expected, found[0]))
    assert torch.equal(first, second)


def test_a_watch_that_does_not_ask_has_no_trace(monkeypatch):
    made = []
    monkeypatch.setattr(attach, "Trace", lambda chain: made.append(chain))
    monkeypatch.setattr(attach, "TracingMode", lambda *given: pytest.fail("traced without being asked"))
    model = llama()
    with torch.no_grad(), attemper.watch(model):
        model(**tokens())
    assert made == []


@pytest.mark.usefixtures("float64")
def test_a_padded_batch():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, initializer_range=0.3)).eval()
    keep = torch.ones(2, LENGTH, dtype=torch.long)
    keep[1, 9:] = 0
    with torch.no_grad():
        padded = audited(model, lambda: model(**tokens(), attention_mask=keep))
        one = {"input_ids": tokens()["input_ids"][1:, :9]}
        alone = audited(model, lambda: model(**one))
        first = audited(model, lambda: model(input_ids=tokens()["input_ids"][:1]))
    for both, a, b in zip(padded, alone, first, strict=True):
        assert both.applied == a.applied == b.applied == in_float32(ROOT, terms=8)
        # rows weigh alike: 9 of the one, 17 of the other
        assert both.logit_std**2 == in_float64((9 * a.logit_std**2 + 17 * b.logit_std**2) / 26)
        assert (
            min(a.predicted_std, b.predicted_std) <= both.predicted_std <= max(a.predicted_std, b.predicted_std) * 1.05
        )


def test_the_predicted_spread_is_that_of_lengths_alone():
    """Directions that have nothing to do with one another: what is foretold is what is found."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 512, 64) * 1.7, torch.randn(1, 4, 512, 64) * 0.6 + 3.0

    class Given(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(q, k, k)

    model = Given()
    (layer,) = audited(model, lambda: model(None))
    by_hand = 64**-0.5 * 1.7 * 0.6 * 64 / 64**0.5  # |q| = 1.7 √64, |k − k̄| = 0.6 √64
    assert layer.predicted_std == pytest.approx(by_hand, rel=0.01)
    assert layer.logit_std == pytest.approx(layer.predicted_std, rel=0.01)


def bias():
    return torch.randn(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) * 3


def heads_last(q, k, v):
    return torch.einsum("bhqd,bhkd->bqkh", q, k).mul(0.21).softmax(2).permute(0, 3, 1, 2) @ v


def folded(q, k, v):
    parts = [part.flatten(0, 1) for part in (q, k, v)]
    scores = torch.baddbmm(torch.zeros(1), parts[0], parts[1].mT, beta=0, alpha=0.21)
    return (scores.softmax(-1) @ parts[2]).unflatten(0, (-1, HEADS))


def tensors(q, k, v):
    return ((q * torch.full_like(q, 0.3)) @ (k / torch.tensor(1 / 0.7)).mT).softmax(-1) @ v


# how 0.21 gets in front of q·k, and how the audit finds it
WRITTEN = {
    "plain": (by_hand(0.21), "regression"),
    "a bias": (lambda q, k, v: (q @ k.mT * 0.21 + bias()).softmax(-1) @ v, "numbers"),
    "a bias before": (lambda q, k, v: (bias() + q @ k.mT * 0.21).softmax(-1) @ v, "numbers"),
    "per head, and a bias": (
        lambda q, k, v: (q @ k.mT * torch.full((HEADS, 1, 1), 0.21) + bias()).softmax(-1) @ v,
        "numbers",
    ),
    "keys first": (lambda q, k, v: (k @ q.mT * 0.21).softmax(-2).mT @ v, "regression"),
    "heads last": (heads_last, "regression"),
    "a cap": (lambda q, k, v: (5 * torch.tanh(q @ k.mT * 0.21 / 5)).softmax(-1) @ v, "regression"),
    "log_softmax": (lambda q, k, v: F.log_softmax(q @ k.mT * 0.21, -1).exp() @ v, "regression"),
    "baddbmm": (folded, "regression"),
    "q and k": (lambda q, k, v: ((q * 0.3) @ (k * 0.7).mT).softmax(-1) @ v, "regression"),
    "tensors": (tensors, "regression"),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("meet", "measured_by"), WRITTEN.values(), ids=WRITTEN)
def test_ways_to_write_it_by_hand(request, meet, measured_by):
    torch.manual_seed(0)
    case = stack(meet, 0.21, None)
    capped = "a cap" in request.node.callspec.id
    with torch.no_grad():
        layers = audited(case.model, case.run)
    for layer in layers:
        assert layer.measured_by == measured_by
        assert layer.applied == in_float64(0.21)
        assert layer.fault == (None if capped else "unknown")  # a cap keeps logits small whatever the scale is


PIECES, MANY = 2, 16  # of so many tokens: landmarks
FOURTH = EACH**-0.25
FOLLOWED = {  # linear over the tokens: what multiplied q and k multiplies their landmarks
    "mean": lambda x: x.unflatten(-2, (PIECES, -1)).mean(-2),
    "sum, divided": lambda x: x.unflatten(-2, (PIECES, -1)).sum(-2) / (MANY // PIECES),
    "permuted": lambda x: x.mT.unflatten(-1, (PIECES, -1)).sum(-1).mT / (MANY // PIECES),
    "all": lambda x: x.mean(-2, keepdim=True),
    "pool": lambda x: F.avg_pool1d(x.mT.flatten(0, 1), PIECES).unflatten(0, (-1, HEADS)).mT,
    "largest": lambda x: F.max_pool1d(x.mT.flatten(0, 1), PIECES).unflatten(0, (-1, HEADS)).mT,
}
LOST = {
    "by its own sum": lambda x: x / x.sum(-2, keepdim=True),
    "running sum": lambda x: x.cumsum(-2),
    "transform": lambda x: torch.fft.fft(x, dim=-2).real,
    "product": lambda x: torch.ones(3, x.shape[-2]).type_as(x) @ x,
    "sines": lambda x: x.sin(),
}


def landmarks(way, call, root):
    def meet(q, k, v):
        q, k, v = (part[..., :MANY, :] for part in (q, k, v))
        q, k, v = (way(part * root if root else part) for part in (q, k, v))
        return call(q, k, v).mean(-2, keepdim=True).expand(-1, -1, LENGTH, -1)

    return meet


CALLS = {
    "by hand": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("way", FOLLOWED.values(), ids=FOLLOWED)
def test_averages_of_tokens_keep_their_factors(way, call):
    case = stack(landmarks(way, call, FOURTH), ROOT, None)
    with torch.no_grad():
        layers = audited(case.model, case.run)
    for layer in layers:
        assert (layer.rule, layer.fault) == ("sqrt_dk", None)
        assert layer.applied == in_float64(ROOT)
        assert "could not be followed" not in layer.message


@pytest.mark.parametrize("root", [FOURTH, None], ids=["scaled before", "no scale"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("way", LOST.values(), ids=LOST)
def test_a_scale_that_could_not_be_followed_is_not_1(way, call, root):
    case = stack(landmarks(way, call, root), ROOT, None)
    with torch.no_grad():
        layers = audited(case.model, case.run)
    for layer in layers:
        assert (layer.rule, layer.applied) == (None, None)
        assert "could not be followed" in layer.message


def angles(length=LENGTH):
    return torch.outer(torch.arange(length) + 1.0, 10.0 ** -torch.arange(EACH // 2))  # (L, E / 2)


def by_halves(x):
    cos, sin = (torch.cat([table, table], -1) for table in (angles().cos(), angles().sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def by_pairs(x):
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = angles().cos(), angles().sin()
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


def by_complex_numbers(x):
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones(1), angles())
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def in_a_buffer(x):
    out = torch.empty_like(x)
    cos, sin = angles().cos(), angles().sin()
    first, second = x[..., : EACH // 2], x[..., EACH // 2 :]
    out[..., : EACH // 2] = first * cos - second * sin
    out[..., EACH // 2 :] = second * cos + first * sin
    return out


def a_third(x):
    part = EACH // 3
    cos, sin = angles().cos()[:, :2].repeat(1, 2), angles().sin()[:, :2].repeat(1, 2)
    turning, passing = x[..., :part], x[..., part:]
    first, second = turning.chunk(2, -1)
    return torch.cat([turning * cos + torch.cat([-second, first], -1) * sin, passing], -1)


ROTATIONS = (by_halves, by_pairs, by_complex_numbers, in_a_buffer, a_third)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("stretch", [1.0, 1.2])
@pytest.mark.parametrize("turn", ROTATIONS, ids=lambda turn: turn.__name__)
def test_a_rotation_is_no_factor_but_its_stretch_is(turn, stretch):
    """The lengths themselves are the judge: of q and k before and behind."""
    lengths = {}

    def meet(q, k, v):
        turned = [turn(part) * stretch for part in (q, k)]
        lengths["all"] = turned[0].norm() * turned[1].norm() / (q.norm() * k.norm())
        return F.scaled_dot_product_attention(*turned, v)

    case = stack(meet, ROOT, None)
    with torch.no_grad():
        layers = audited(case.model, case.run)
    for layer in layers:
        assert layer.applied == in_float32(ROOT * stretch**2, terms=layer.head_dim)
        assert layer.applied == in_float32(ROOT * lengths["all"].item(), terms=layer.head_dim)
        assert layer.fault is None
        assert "could not be followed" not in layer.message


def test_scores_of_heads_that_talk_have_no_one_scale():
    class Talking(Layer):
        def __init__(self):
            super().__init__(self.mixed)
            self.mix = nn.Linear(HEADS, HEADS, bias=False)

        def mixed(self, q, k, v):
            scores = self.mix((q @ k.mT * ROOT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return scores.softmax(-1) @ v

    model = Talking()
    (layer,) = audited(model, lambda: model(numbers()))
    assert (layer.applied, layer.rule, layer.fault) == (None, None, None)
    assert "could not be measured" in layer.message


def test_the_numbers_of_a_document():
    case = FAULTY["twice: q, then SDPA"]()
    with torch.no_grad():
        layer = audited(case.model, case.run)[0]
    found = plain(layer.part())
    assert found["factors"] == [
        {"what": "q: multiplied by a number", "number": ROOT},
        {"what": "scaled_dot_product_attention's own 1/√d_k", "number": ROOT},
    ]
    assert (found["verdict"], found["rule"], found["formula"]) == ("fault", "dk", "q·k / d_k")
    assert (found["declared"], found["qk_norm"], found["after_softmax"]) == (in_float32(ROOT, terms=8), False, None)


def test_every_fault_says_what_is_wrong_and_what_to_do():
    for name, make in FAULTY.items():
        case = make()
        case.model.eval()
        with torch.no_grad():
            layer = audited(case.model, case.run)[-1]
        assert 40 < len(layer.message) < 300, name
        assert layer.advice.endswith("."), name
        assert "nan" not in layer.message, name


@pytest.mark.parametrize("number", [-1, -7])
def test_a_layer_number_that_stands_for_no_layer(number):
    """Zamba2's attention is shared by several layers, and says layer_idx = -1."""
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    layer.self_attn.layer_idx = number
    assert [one["scale"]["rule"] for one in attemper.scan(layer, torch.randn(1, 12, 32)).layers] == ["sqrt_dk"]


@pytest.mark.parametrize("each", ["a norm", "its gradient", "a projection"])
def test_modules_that_a_transform_runs_are_not_read(each):
    """Under vmap or grad the tensors of a module have no numbers to read; titans' memory is such a model."""

    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            of_one = {
                "a norm": self.norm,
                "its gradient": torch.func.grad(lambda row: self.norm(row).square().sum()),
                "a projection": lambda row: self.norm(self.linear(row)),
            }[each]
            return self.attention(*3 * [x + torch.vmap(torch.vmap(of_one))(x)], need_weights=False)[0]

    layers = attemper.scan(Memory().eval(), torch.randn(2, 12, 32)).layers
    assert [layer["scale"]["rule"] for layer in layers] == ["sqrt_dk"]
