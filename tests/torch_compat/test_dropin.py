"""sdpa() in the place of torch's: a stock TransformerEncoder, and Hugging Face's BERT and Llama, forward and backward."""

import copy

import pytest
import torch
import torch.nn.functional as F

import attemper
from close import assert_float64
from judge import assert_as_exact

SDPA = F.scaled_dot_product_attention


@pytest.fixture
def swap(monkeypatch):
    """Run a function of a model and its inputs with torch's SDPA, with ours, and with torch's in float64 to judge by.

    Ours is counted, so that nothing passes by not being called.
    """

    def run(model, inputs):
        def function(model=model, inputs=inputs):
            return outputs_and_gradients(model, lambda: model(**inputs))

        expected = function()
        calls = []

        def ours(*args, **kwargs):
            calls.append(kwargs)
            return attemper.sdpa(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
        actual = function()
        monkeypatch.undo()
        assert calls, "the model never called scaled_dot_product_attention"
        wide = {name: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for name, t in inputs.items()}
        assert_as_exact_as(expected, actual, function(copy.deepcopy(model).double(), wide))

    return run


def outputs_and_gradients(model, forward):
    model.zero_grad()
    output = forward()
    output = output if isinstance(output, torch.Tensor) else output.last_hidden_state
    output.square().mean().backward()
    return {"output": output.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_as_exact_as(expected, actual, exact):
    assert len(expected) > 5
    assert expected.keys() == actual.keys() == exact.keys()
    # gradients that cancel to almost nothing are compared on the scale of the others
    scale = max(t.square().mean().sqrt().item() for name, t in exact.items() if name != "output")
    for name, truth in exact.items():
        assert_as_exact(name, actual[name], [expected[name]], truth, scale)


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_transformer_encoder(swap, mask):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    options = {"src": torch.randn(3, 11, 32)}
    if mask == "causal":
        options |= {"mask": torch.nn.Transformer.generate_square_subsequent_mask(11), "is_causal": True}
    if mask == "padding":
        options |= {"src_key_padding_mask": torch.arange(11) >= torch.tensor([11, 7, 1])[:, None]}
    swap(model, options)


def padded_batch(vocabulary):
    ids = torch.randint(5, vocabulary, (3, 13))
    keep = (torch.arange(13) < torch.tensor([13, 9, 2])[:, None]).long()
    return {"input_ids": ids, "attention_mask": keep}


def test_hugging_face_bert(swap):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    model = transformers.BertModel(config).train()
    batch = padded_batch(99)
    swap(model, batch)


@pytest.mark.parametrize("padded", [True, False])
def test_hugging_face_llama_with_grouped_heads(swap, padded):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaModel(config).train()
    batch = padded_batch(99)
    if not padded:
        del batch["attention_mask"]
    swap(model, batch)


SHAPES = {
    "2d": ((5, 8), (6, 8), (6, 4)),
    "3d": ((3, 5, 8), (3, 6, 8), (3, 6, 4)),
    "5d": ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 4)),
    "one batch of keys": ((2, 4, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8)),
    "one batch of queries": ((1, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "one key head": ((2, 4, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    "one query head": ((2, 1, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "one value head": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 1, 6, 8)),
    "fewer dimensions": ((2, 4, 5, 8), (4, 6, 8), (4, 6, 8)),
    "grouped": ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
    "grouped, one value head": ((2, 4, 5, 8), (2, 2, 6, 8), (2, 1, 6, 8)),
    "grouped, keys and values apart": ((2, 6, 5, 8), (2, 3, 6, 8), (2, 2, 6, 8)),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8)),
    "no queries": ((2, 4, 0, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "no batch": ((0, 4, 5, 8), (0, 4, 6, 8), (0, 4, 6, 8)),
    "no head dim": ((2, 4, 5, 0), (2, 4, 6, 0), (2, 4, 6, 8)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("gqa", [False, True])
def test_sdpa_takes_every_shape_that_torch_takes(shapes, gqa):
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    try:
        expected = SDPA(*tensors, enable_gqa=gqa)
    except (IndexError, RuntimeError):
        return  # what torch refuses is ours to take or leave
    assert_float64(attemper.sdpa(*tensors, enable_gqa=gqa), expected)


MASKS = {
    "bool": lambda: torch.rand(5, 6) > 0.3,
    "per batch": lambda: torch.rand(2, 1, 1, 6) > 0.3,
    "per head": lambda: torch.randn(4, 5, 6),
    "one column": lambda: torch.randn(2, 1, 5, 1),
    "all hidden": lambda: torch.zeros(5, 6, dtype=torch.bool),
    "-inf": lambda: torch.full((5, 6), float("-inf")),
    "finfo.min": lambda: torch.full((5, 6), torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_masks_and_their_gradients(mask, causal):
    mask = mask()
    mask = mask if mask.dtype == torch.bool else mask.double()
    tensors = [torch.randn(2, 4, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 6, 6)]
    leaves = tensors + ([mask.requires_grad_()] if mask.is_floating_point() and mask.isfinite().all() else [])
    band = torch.ones(5, 6, dtype=torch.bool).tril() if causal else torch.ones(5, 6, dtype=torch.bool)
    both = mask & band if mask.dtype == torch.bool else mask.masked_fill(~band, float("-inf"))
    expected = SDPA(*tensors, attn_mask=both)  # torch itself takes only one of the two when the mask has a gradient
    actual = attemper.sdpa(*tensors, attn_mask=mask, is_causal=causal)
    assert_float64(actual, expected)
    cotangent = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(actual, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent), strict=True
    ):
        assert a.isfinite().all()
        assert_float64(a, b)
