"""What may be attention and was not measured is in the notes, also when other calls were."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._pytree import tree_map_only

import attemper
from attemper.watch.attach import measuring
from attemper.watch.routes.handwritten.chain import UNTRACED

WIDTH, HEADS = 32, 4


class Good(nn.Module):
    num_heads = HEADS

    def forward(self, x):
        part = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(part, part, part).transpose(1, 2).flatten(2)


class Beside(nn.Module):
    """Something, and then an attention that is seen."""

    def __init__(self, first):
        super().__init__()
        self.first, self.good = first, Good()

    def forward(self, x):
        return self.good(self.first(x))


def notes_of(model, *inputs, **named):
    with torch.no_grad(), attemper.watch(model) as watch:
        model(*inputs, **named)
    assert watch.record.entries
    return watch.record.notes


def layer(forward, name="Layer"):
    def run(self, x):
        return forward(self.q(x), x)

    made = type(name, (nn.Module,), {"forward": run})()
    made.q = nn.Linear(WIDTH, WIDTH)
    return made


def exp_and_sum(q, x):
    z = (q @ x.mT).exp()
    return (z / z.sum(-1, keepdim=True)) @ x


MISSED = {
    "exp and a sum": (exp_and_sum, ["first: scores are multiplied by values after exp(), not a softmax."]),
    "sigmoid": (
        lambda q, x: (q @ x.mT).sigmoid() @ x,
        ["first: scores are multiplied by values after sigmoid(), not a softmax."],
    ),
    "scores by a sum of products": (
        lambda q, x: (q[:, :, None] * x[:, None]).sum(-1).softmax(-1) @ x,
        [f"first: {UNTRACED}."],
    ),
    "scores by a distance": (lambda q, x: (-torch.cdist(q, x)).softmax(-1) @ x, [f"first: {UNTRACED}."]),
    "no attention": (lambda q, x: q.relu() + x, []),
    "a gate": (lambda q, x: q.softmax(-1) * x, []),
    "linear attention": (lambda q, x: q @ (x.mT @ x), []),
}


@pytest.mark.parametrize(("forward", "expected"), MISSED.values(), ids=MISSED)
def test_a_form_that_is_not_followed_is_noted(forward, expected):
    assert notes_of(Beside(layer(forward)), torch.randn(2, 6, WIDTH)) == expected


def test_an_attention_module_in_which_nothing_was_seen_is_noted():
    first = layer(lambda q, x: q * x, name="FancyAttention")
    assert notes_of(Beside(nn.Sequential(first)), torch.randn(2, 6, WIDTH)) == [
        "first.0: FancyAttention ran, but no attention call was found in it."
    ]


class Router(nn.Module):
    """A linear attention, and experts that are chosen by a softmax of what it made."""

    def __init__(self, heads, between):
        super().__init__()
        self.heads, self.between = heads, between
        self.gate = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x):
        part = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        x = x + self.between(((part @ part.mT) @ part).transpose(1, 2).flatten(2))
        weights = F.linear(x, self.gate).softmax(-1)
        return x + weights @ self.gate + (weights[..., None] * x[..., None, :]).sum(-2)


BETWEEN = {
    "nothing": nn.Identity(),
    "a projection": nn.Linear(WIDTH, WIDTH),
    "a norm": nn.LayerNorm(WIDTH),
    "a gated norm": nn.Sequential(nn.RMSNorm(WIDTH), nn.SiLU()),
}


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_a_router_behind_a_linear_attention_is_not_attention(heads, between):
    net = Beside(Router(heads, between))
    with torch.no_grad(), attemper.watch(net) as watch:
        net(torch.randn(2, 7, WIDTH))
    assert watch.record.layers == ["good"]


def test_the_experts_of_minimax_are_not_attention():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "intermediate_size": 48, "vocab_size": 99, "num_local_experts": 4, "pad_token_id": 0}
    model = transformers.MiniMaxModel(transformers.MiniMaxConfig(**sizes)).eval()
    with torch.no_grad(), attemper.watch(model) as watch:
        model(input_ids=torch.randint(3, 99, (1, 24)))
    assert list(watch.record.info) == [("layers.0.self_attn", "self")]
    assert watch.record.notes == [
        "layers.1.self_attn: MiniMaxLightningAttention ran, but no attention call was found in it."
    ]


@pytest.mark.parametrize("heads", [HEADS, 2 * HEADS])
def test_scores_whose_heads_are_mixed_by_a_projection_are_still_scores(heads):
    class Talking(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(HEADS, heads, bias=False)

        def forward(self, x):
            part = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            scores = self.mix((part @ part.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return scores.softmax(-1) @ part.repeat(1, heads // HEADS, 1, 1)

    with torch.no_grad(), attemper.watch(net := Talking()) as watch:
        net(torch.randn(2, 7, WIDTH))
    assert [info.heads for info in watch.record.info.values()] == [heads]


def test_modules_that_share_an_attention_between_them_are_not_noted():
    class ScoreAttention(nn.Module):
        def forward(self, q, k):
            return q @ k.mT

    class WeightAttention(nn.Module):
        def forward(self, scores):
            return scores.softmax(-1)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.weights = ScoreAttention(), WeightAttention()

        def forward(self, x):
            return self.weights(self.scores(x, x)) @ x

    assert notes_of(Whole(), torch.randn(2, 6, WIDTH)) == []


def test_a_model_with_an_encoder_that_is_not_followed():
    sizes = {
        f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in (("layers", 1), ("ffn_dim", 64))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    limits = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 4}
    model = transformers.LEDModel(transformers.LEDConfig(d_model=32, vocab_size=99, **sizes, **heads, **limits)).eval()
    notes = notes_of(model, input_ids=torch.randint(3, 90, (2, 12)))
    assert len(notes) == 1
    assert notes[0].startswith("encoder.layers.0.self_attn.longformer_self_attn: LEDEncoderSelfAttention ran, but no")


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_nested_tensors_by_hand_are_noted():
    def forward(q, x):
        packed = torch.nested.nested_tensor([x[0], x[1, :3]])
        packed = (packed @ packed.transpose(-1, -2)).softmax(-1) @ packed
        return packed.to_padded_tensor(0.0)

    notes = notes_of(Beside(layer(forward)), torch.randn(2, 6, WIDTH))
    assert notes == ["first: a softmax of nested tensors, which are not followed."]


def test_an_attention_op_from_outside_torch_is_said():
    @torch.library.custom_op("attempertest::_flash_attn_forward", mutates_args=())
    def flash(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    net = Beside(layer(lambda q, x: flash(q[:, None])[:, 0]))
    with pytest.warns(UserWarning, match=r"first: not measured: a attempertest\._flash_attn_forward\.default call"):
        assert len(notes_of(net, torch.randn(2, 6, WIDTH))) == 1


class Wrapped(torch.Tensor):
    """A tensor inside of another, as DTensor is: what lies at its own address is nobody's."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map_only(cls, lambda tensor: tensor.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*plain[0], **plain[1]))


WAYS = {
    "sdpa": (F.scaled_dot_product_attention, r"a aten\._scaled_dot_product_flash_attention_for_cpu.default call on"),
    "by hand": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, "a softmax, which may be attention, of"),
    "attemper": (lambda q, k, v: attemper.attention(q, k, v).output, r"a attemper\.forward\.default call on"),
}


@pytest.mark.parametrize(("attend", "words"), WAYS.values(), ids=WAYS)
def test_attention_on_wrapped_tensors_is_said_and_nothing_is_read_at_their_address(attend, words):
    net = type("Net", (nn.Module,), {"forward": lambda self, *given: attend(*given)})()
    given = [Wrapped(torch.randn(1, 2, 6, 8)) for _ in range(3)]
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match=rf"Net: not measured: {words} Wrapped objects\.$"),
        attemper.watch(net) as watch,
    ):
        net(*given)
    assert (len(watch.record), watch.unmeasured) == (0, 1)


def test_a_measurement_inside_a_model_is_no_attention():
    class Measures(nn.Module):
        def forward(self, x):
            attemper.measure(x[:, None], x[:, None])
            return x

    assert notes_of(Beside(Measures()), torch.randn(2, 6, WIDTH)) == []


@pytest.mark.parametrize("gradients", [False, True])
def test_a_gradient_of_q_and_k_in_one_is_noted(gradients):
    net = Beside(nn.Linear(WIDTH, WIDTH))
    with attemper.watch(net, gradients=gradients) as watch:
        net(torch.randn(2, 6, WIDTH)).sum().backward()
    expected = ["good: q and k are one tensor: |dq| and |dk| are both its whole gradient."]
    assert watch.record.notes == (expected if gradients else [])


def test_a_capture_is_no_measurement(monkeypatch):
    """What a CUDA graph computes is there after a replay; what a watch would read before that is uninitialised memory."""
    monkeypatch.setattr(measuring, "is_captured", lambda tensor: True)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="not measured: a CUDA graph is being captured"),
        attemper.watch(Good()) as watch,
    ):
        watch.model(torch.randn(1, 5, WIDTH))
    assert watch.unmeasured == 1
    assert not watch.record.entries


@pytest.mark.filterwarnings("ignore:watch")
@pytest.mark.parametrize("order", [("empty", "whole", "whole"), ("whole", "whole", "empty", "whole")], ids=" ".join)
@pytest.mark.parametrize("shape", [(0, 5, WIDTH), (2, 0, WIDTH)], ids=str)
def test_a_batch_without_items_or_tokens_is_noted_and_ends_nothing(order, shape):
    """torch runs no op of attention for it, whether the pass is followed or intercepted."""
    model = Good()
    with torch.no_grad(), attemper.watch(model) as watch:
        for step in order:
            model(torch.randn(shape if step == "empty" else (2, 5, WIDTH)))
            watch.step()
    assert watch.record.steps == [number for number, step in enumerate(order) if step == "whole"]
    assert watch.record.notes == ["Good: not measured: attention on empty tensors."]
