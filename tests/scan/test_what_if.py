"""The scale replaced while a model runs, against models whose scale is truly another; and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import attemper
import zoo
from attemper.scan.document import SIGNS
from attemper.scan.what_if import layer_numbers, what_if
from close import ROUNDING, assert_float64

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
HEAD_DIM = zoo.WIDTH // zoo.HEADS
SQRT_DK = HEAD_DIM**-0.5
THIRD = slice(0, zoo.WIDTH)


def first_third(name):
    """A packed projection: its first rows, or columns, are the queries."""

    def scale(part, ratio):
        packed = getattr(part, name)
        weight = (
            packed.weight[:, THIRD] if isinstance(packed, transformers.pytorch_utils.Conv1D) else packed.weight[THIRD]
        )
        weight.mul_(ratio)
        packed.bias[THIRD].mul_(ratio)

    return scale


def linear(*names):
    def scale(part, ratio):
        for name in names:
            for parameter in getattr(part, name).parameters():
                parameter.mul_(ratio)

    return scale


def packed_parameters(part, ratio):
    part.in_proj_weight[THIRD].mul_(ratio)
    part.in_proj_bias[THIRD].mul_(ratio)


def interleaved(part, ratio):
    packed = part.query_key_value
    packed.weight.unflatten(0, (zoo.HEADS, 3, -1))[:, 0].mul_(ratio)
    packed.bias.unflatten(0, (zoo.HEADS, 3, -1))[:, 0].mul_(ratio)


def attribute(part, ratio):
    part.scaling *= ratio


# model: the layers' class, how its queries become larger by a ratio, and the scale applied where no op shows it
KINDS = {
    "bert": ("BertSelfAttention", linear("query"), None),
    "gpt2": ("GPT2Attention", first_third("c_attn"), None),
    "llama": ("LlamaAttention", linear("q_proj"), None),
    "mistral": ("MistralAttention", attribute, None),
    "t5": ("T5Attention", linear("q"), 1.0),
    "gemma2": ("Gemma2Attention", linear("q_proj"), None),
    "gemma3": ("Gemma3Attention", attribute, None),
    "gpt_neo": ("GPTNeoSelfAttention", linear("q_proj"), 1.0),
    "opt": ("OPTAttention", linear("q_proj"), SQRT_DK),
    "bloom": ("BloomAttention", interleaved, None),
    "deberta": ("DisentangledSelfAttention", linear("query_proj", "pos_query_proj"), (3 * HEAD_DIM) ** -0.5),
    "vit": ("ViTAttention", linear("q_proj"), None),
    "whisper": ("WhisperAttention", linear("q_proj"), SQRT_DK),
    "torch_transformer": ("MultiheadAttention", packed_parameters, None),
    "torch_encoder": ("MultiheadAttention", packed_parameters, None),
    "torch_encoder_norm_first": ("MultiheadAttention", packed_parameters, None),
    "by_hand": ("HandWritten", first_third("packed"), None),
}


class Everywhere(dict):
    """One applied scale for whichever layer."""

    def get(self, place, default=None):
        return self["all"]


def read(subject):
    """Rows of heads by a plain watch of the model as it is, and its info."""
    with torch.no_grad(), attemper.watch(subject.model) as watch:
        subject.run()
    return watch.record


def compare(found, expected, rel):
    assert len(found) == len(expected) > 0
    for row, wanted in zip(found, expected, strict=True):
        assert (row["layer"], row["kind"], row["head"], row["rows"]) == tuple(
            wanted[name] for name in ("layer", "kind", "head", "rows")
        )
        for name in SIGNS[3:]:
            assert row[name] == pytest.approx(wanted[name], rel=rel, abs=rel, nan_ok=True), (row["layer"], name)


def truly(subject, cls, scale, ratio_of):
    """A copy of a model whose queries are larger: its logits are what the scale would make of them."""
    other = copy.deepcopy(subject)
    layers = [(name, part) for name, part in other.model.named_modules() if type(part).__name__ == cls]
    numbers = layer_numbers([name for name, _ in layers])
    assert layers
    with torch.no_grad():
        for name, part in layers:
            scale(part, ratio_of(numbers[name]))
    return other


RATIOS = {
    "0.7": lambda layer: 0.7,
    "dk": lambda layer: 1 / HEAD_DIM,
    "sqrt_dmodel": lambda layer: zoo.WIDTH**-0.5,
    "layer": lambda layer: SQRT_DK / (layer + 1),
}
# they cast to float32 inside, whatever they are given
SINGLE = ("gpt_neo", "gemma2", "bloom", "t5")


@pytest.mark.parametrize("rule", RATIOS)
@pytest.mark.parametrize("name", KINDS)
def test_as_a_model_whose_scale_is_another(name, rule, float64, nothing_is_left_behind):
    cls, scale, applied = KINDS[name]
    subject = zoo.make(name)
    now = applied or next(iter(read(subject).info.values())).scale
    other = truly(subject, cls, scale, lambda layer: RATIOS[rule](layer) / now)
    before, outputs = subject.run().detach(), []
    (found,) = what_if(
        subject.model,
        lambda: outputs.append(subject.run()),
        [rule],
        Everywhere(all=applied) if applied else {},
    )
    rel = 2e-4 if name in SINGLE else ROUNDING
    compare(found.heads, read(other).to_dicts(), rel)
    assert torch.allclose(outputs[1], other.run(), rtol=rel, atol=rel)
    assert not torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)
    assert torch.equal(subject.run(), before)


@pytest.mark.parametrize("name", KINDS)
def test_the_scale_it_has_changes_no_bit(name):
    subject, applied, outputs = zoo.make(name), KINDS[name][2], []
    now = applied or next(iter(read(subject).info.values())).scale
    run = lambda: outputs.append(subject.run())  # noqa: E731
    (found,) = what_if(subject.model, run, [repr(now)], Everywhere(all=applied) if applied else {})
    assert torch.equal(outputs[0], outputs[1])
    assert found.rule == repr(now)


class Projected(nn.Module):
    """q, k and v of two sequences; how they meet is for the test to say."""

    def __init__(self, meet):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.meet, self.num_heads = meet, 1

    def forward(self, x, y):
        return self.meet(self.q(x), self.k(y), self.v(y))


# as q·k times s: what the model computes when its scale is s
FORMS = {
    "sdpa": lambda s: lambda q, k, v: F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], scale=s)[:, 0],
    "torch's own math": lambda s: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, scale=s),
    "one head, bmm": lambda s: lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q, k.mT) * s, -1), v),
    "in place": lambda s: lambda q, k, v: (q @ k.mT).mul_(s).add_(0.5).softmax(-1) @ v,
    "baddbmm": lambda s: lambda q, k, v: torch.baddbmm(torch.ones(1, 1, 6), q, k.mT, alpha=s).softmax(-1) @ v,
    "mm, with a bias": lambda s: lambda q, k, v: torch.addmm(torch.ones(6), q[0], k[0].T, alpha=s).softmax(-1) @ v[0],
    "einsum": lambda s: lambda q, k, v: torch.einsum("bqd,bkd->bqk", q * s, k).softmax(-1) @ v,
    "keys first": lambda s: lambda q, k, v: ((k @ q.mT) * s).softmax(-2).mT @ v,
    "a bound": lambda s: lambda q, k, v: (2 * torch.tanh(q @ k.mT * s / 2)).softmax(-1) @ v,
    "two terms": lambda s: lambda q, k, v: ((q @ k.mT + q @ v.mT) * s).softmax(-1) @ v,
    "two terms, in one op": lambda s: lambda q, k, v: torch.baddbmm(q @ v.mT, q, k.mT, beta=s, alpha=s).softmax(-1) @ v,
    "a difference": lambda s: lambda q, k, v: ((q @ k.mT * s).softmax(-1) - 0.3 * (q @ v.mT * s).softmax(-1)) @ v,
    "a router beside it": lambda s: lambda q, k, v: (q @ k.mT * s).softmax(-1) @ v * (v @ q.mT @ k),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_it(form, mode, float64, nothing_is_left_behind):
    torch.manual_seed(0)
    model, x = Projected(FORMS[form](0.25)), torch.randn(1, 6, 16)
    other = copy.deepcopy(model)
    other.meet = FORMS[form](0.6)
    outputs = []

    def run():
        with mode():
            outputs.append(model(x, x))

    with mode():
        torch.manual_seed(1)
        expected = other(x, x)
        torch.manual_seed(1)
        record = read(zoo.Subject(other, {"x": x, "y": x}))
    torch.manual_seed(1)
    (found,) = what_if(model, run, ["0.6"], Everywhere(all=0.25))
    compare(found.heads, record.to_dicts(), ROUNDING)
    assert_float64(outputs[1], expected)
    assert not torch.allclose(outputs[0], expected, rtol=1e-2)
