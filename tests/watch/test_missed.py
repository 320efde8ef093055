"""What may be attention and was not measured is in the notes, also when other calls were."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import attemper

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


UNTRACED = "first: a softmax meets values, but the scores it was taken of could not be traced to queries and keys."
MISSED = {
    "exp and a sum": (exp_and_sum, ["first: scores meet values through exp(), not a softmax."]),
    "sigmoid": (
        lambda q, x: (q @ x.mT).sigmoid() @ x,
        ["first: scores meet values through sigmoid(), not a softmax."],
    ),
    "scores by a sum of products": (
        lambda q, x: (q[:, :, None] * x[:, None]).sum(-1).softmax(-1) @ x,
        [UNTRACED],
    ),
    "scores by a distance": (lambda q, x: (-torch.cdist(q, x)).softmax(-1) @ x, [UNTRACED]),
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
        "first.0: FancyAttention ran, but no attention call was seen in it."
    ]


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


@pytest.mark.parametrize("gradients", [False, True])
def test_a_gradient_of_q_and_k_in_one_is_noted(gradients):
    net = Beside(nn.Linear(WIDTH, WIDTH))
    with attemper.watch(net, gradients=gradients) as watch:
        net(torch.randn(2, 6, WIDTH)).sum().backward()
    expected = ["good: q and k are one tensor: |dq| and |dk| are both its whole gradient."]
    assert watch.record.notes == (expected if gradients else [])
