"""What the panels "heads" and "flow" read: the model's own numbers."""

import base64
import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.errors import InputError
from attemper.kernels.reference import define
from attemper.operation.call import prepare
from attemper.scan.input.batch import call, make
from attemper.scan.input.model import Loaded
from attemper.scan.run import evaluating
from attemper.vitals import Vitals
from attemper.watch.examine import AttentionCall, Examiner, examine
from attemper_lab.page.data import embedded
from attemper_lab.page.data.flow import COLUMNS, read_flow
from attemper_lab.page.data.heads import packed, read_heads
from close import in_float32
from judge import assert_within
from rounding import sign_mass

pytest.importorskip("transformers")
TEXT = "The dog chased the ball because it was fast."


def minilm() -> Loaded:
    return embedded._model()


def floats(part: dict[str, object]) -> Tensor:
    raw = np.frombuffer(base64.b64decode(str(part["data"])), "<f4").copy()
    shape = part["shape"] if "columns" not in part else [part["shape"][0], part["columns"]]  # type: ignore[index]
    return torch.from_numpy(raw).reshape(shape)


def signs(logits: Tensor) -> dict[str, float]:
    """The library's signs of a matrix of logits: queries on the unit vectors."""
    keep = logits.isfinite()
    query = logits.masked_fill(~keep, 0.0).double()[None]
    found = attemper.measure(query, torch.eye(query.shape[-1]).double()[None], mask=keep, scale=1.0)
    return found.by_head().to_dicts()[0]


class KeptCalls(Examiner):
    """The q, k and options of every call of a model, as the scan measured it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, dict[str, object]]] = []

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> None:
        self.calls.append((call.query.clone(), call.key.clone(), call.options()))


def rounding_of_head(query: Tensor, key: Tensor, options: dict[str, object]) -> dict[str, float]:
    """What the rounding of float32 logits leaves in the signs of a head, given in float64."""
    problem = prepare("judge", query, key, None, **options).problem
    found = define(problem)
    mass = sign_mass(problem, found._asdict())
    mass["top_weight"] = found.weights.max().item() * (mass["peak"] + mass["lse"])
    mass["effective_keys"] = found.entropy.exp().max().item() * mass["entropy"]
    return {name: torch.finfo(torch.float32).eps * size for name, size in mass.items()}


def test_logits_give_the_signs_of_the_scan():
    model, kept = minilm(), KeptCalls()
    heads = read_heads(model, TEXT)
    (one,) = make(model, texts=[TEXT])
    with evaluating(model.model), examine(model.model, [kept]):
        call(model.model, one.batch)
    rows = heads.scan["heads"]
    assert len(heads.layers) == len(kept.calls) == 6
    assert len(rows) == 72
    for index, row in enumerate(rows):
        logits = torch.from_numpy(heads.logits(index // 12, index % 12))
        assert logits.dtype == torch.float32
        assert logits.shape == (12, 12)
        query, key, options = kept.calls[index // 12]
        head = slice(index % 12, index % 12 + 1)
        own, wide = ((query[:, head].to(dtype), key[:, head].to(dtype)) for dtype in (torch.float32, torch.float64))
        plain, exact = (
            attemper.measure(*pair, **options, kernel="reference").by_head().to_dicts()[0] for pair in (own, wide)
        )
        rounding, shown = rounding_of_head(*wide, options), signs(logits)
        for name in ("entropy", "peak", "variance", "top_weight", "effective_keys"):
            yard = torch.tensor(exact[name], dtype=torch.float64), torch.tensor(plain[name], dtype=torch.float64)
            for way, found in (("scan", row), ("logits", shown)):
                where = f"{row['layer']} {row['head']} {name} of the {way}"
                assert_within(where, torch.tensor(found[name], dtype=torch.float32), *yard, rounding[name])


def test_document_is_plain_and_has_the_scale_applied():
    document = read_heads(minilm(), TEXT).document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["tokens"][7] == "it"
    assert document["special"] == [True, *[False] * 10, True]
    assert [one["applied"] for one in document["layers"]] == [32**-0.5] * 6
    assert all(one["plain"] and one["rule"] == "sqrt_dk" for one in document["layers"])


class Causal(nn.Module):
    """Two heads with a causal mask and an added bias: a factor on its logits is not a factor on its scale."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.qkv, self.out, self.words = nn.Linear(8, 24), nn.Linear(8, 8), nn.Embedding(50, 8)
        self.bias = bias

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        n = x.shape[1]
        mask = torch.full((n, n), float("-inf")).triu(1) + self.bias * torch.arange(n)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(-2))


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str, **options: object) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) % 50 for letter in text]])}

    all_special_ids: tuple[int, ...] = ()

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(97 + number % 26) for number in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_hidden_keys_are_minus_infinity_and_a_bias_is_told(bias):
    torch.manual_seed(0)
    loaded = Loaded(Causal(bias), "Causal", "object", tokenizer=Letters())
    heads = read_heads(loaded, "abcdef")
    logits = torch.from_numpy(heads.logits(0, 1))
    assert torch.equal(logits == float("-inf"), torch.ones(6, 6).triu(1).bool())
    assert heads.document()["layers"][0]["plain"] is (bias == 0.0)


def test_flow_is_the_arithmetic_of_the_model():
    flow = read_flow(minilm(), TEXT, 4, 3)
    query, key, value, logits = (floats(flow[name]) for name in ("Q", "K", "V", "logits"))
    given = floats(flow["X"])
    for name, part in (("W_Q", query[3]), ("W_K", key[3]), ("W_V", value[3])):
        bias = torch.from_numpy(np.frombuffer(base64.b64decode(flow[name]["bias"]), "<f4").copy())
        exact = given.double() @ floats(flow[name]).double() + bias.double()
        size = float((given.abs() @ floats(flow[name]).abs()).max())
        assert part[:, :COLUMNS].flatten().tolist() == in_float32(exact.flatten().tolist(), 384, size), name
    scores = query[3].double() @ key[3].double().T * flow["scale"]
    size = float((query[3].abs() @ key[3].abs().T).max())
    assert logits[3].flatten().tolist() == in_float32(scores.flatten().tolist(), 32, size)
    concat = (logits.double().softmax(-1) @ value.double()).transpose(0, 1).flatten(1)
    bias = torch.from_numpy(np.frombuffer(base64.b64decode(flow["W_O"]["bias"]), "<f4").copy())
    exact = concat @ floats(flow["W_O"]).double() + bias.double()
    size = float((concat.abs() @ floats(flow["W_O"]).double().abs()).max())
    peak = float(logits.abs().max())
    found = floats(flow["Y"])[:, :COLUMNS]
    assert found.flatten().tolist() == in_float32(exact.flatten().tolist(), 384, size, logit=peak)
    assert flow["without"] is None
    assert (flow["d_model"], flow["d_k"], flow["heads"]) == (384, 32, 12)


def test_flow_finds_the_columns_of_a_joint_projection():
    torch.manual_seed(0)
    model = Causal(0.0)
    flow = read_flow(Loaded(model, "Causal", "object", tokenizer=Letters()), "abcdef", 0, 1)
    assert torch.equal(floats(flow["W_K"]), model.qkv.weight.T[:, 12:16])
    assert torch.equal(floats(flow["W_O"]), model.out.weight.T)


def test_a_decoder_has_tokens_of_its_own_and_cross_attention_has_no_flow():
    transformers = pytest.importorskip("transformers")
    sizes = {"num_layers": 1, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 16, "vocab_size": 60}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    loaded = Loaded(model, "T5", "object", tokenizer=Letters())
    document = read_heads(loaded, "abcdef").document()
    assert [(one["kind"], one["queries"], one["keys"]) for one in document["layers"]] == [
        ("self", 6, 6),
        ("self", 7, 7),
        ("cross", 7, 6),
    ]
    assert document["layers"][0]["plain"] is False  # a bias by distance is added
    assert read_flow(loaded, "abcdef", 1, 0)["tokens"] == [f"#{index}" for index in range(7)]
    with pytest.raises(InputError, match="is cross-attention"):
        read_flow(loaded, "abcdef", 2, 0)


@pytest.mark.parametrize(("layer", "head"), [(6, 0), (0, 12), (-1, 0)])
def test_a_head_that_is_not_there_is_refused(layer, head):
    with pytest.raises(InputError, match="must be from 0 to"):
        read_heads(minilm(), "Love Apple phones").logits(layer, head)
    with pytest.raises(InputError, match="must be from 0 to"):
        read_flow(minilm(), "Love Apple phones", layer, head)


def test_what_the_page_carries_is_small():
    parts = {"heads": embedded.heads(), "flow": embedded.flow()}
    assert len(json.dumps(parts, allow_nan=False)) < 1_000_000
    assert [part["text"] for part in parts["heads"]["texts"]] == list(embedded.TEXTS)
    assert packed([1.0, -2.5]) == "AACAPwAAIMA="


def test_a_shared_layer_has_logits_for_every_depth():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.AlbertConfig(vocab_size=30522, num_hidden_layers=3, initializer_range=0.5, **sizes)
    heads = read_heads(Loaded(transformers.AlbertModel(config).eval(), "albert", "demo", minilm().folder), TEXT)
    names = [layer["layer"] for layer in heads.scan["layers"]]
    assert [layer.layer for layer in heads.layers] == names
    assert len(names) == 3


def test_a_long_text_has_a_thumbnail_of_every_head_instead_of_its_logits(monkeypatch):
    torch.manual_seed(0)
    loaded = Loaded(Causal(0.5), "Causal", "object", tokenizer=Letters())
    heads = read_heads(loaded, "abcdefghijklmnopqrstu")
    assert "thumbnail" not in heads.document()["layers"][0]
    monkeypatch.setattr("attemper_lab.page.data.heads.WHOLE", 100)
    document = heads.document()
    assert document["logits"] is None
    found = document["layers"][0]["thumbnail"]
    assert (found["rows"], found["columns"]) == (16, 16)
    shares = np.frombuffer(base64.b64decode(found["data"]), np.uint8).reshape(2, 16, 16) / 255
    line = [i * 16 // 21 for i in range(21)]
    for head in range(2):
        weights = torch.from_numpy(heads.logits(0, head)).double().softmax(-1).numpy()
        for row, column in np.ndindex(16, 16):
            block = weights[
                np.ix_([i for i in range(21) if line[i] == row], [j for j in range(21) if line[j] == column])
            ]
            assert abs(shares[head, row, column] - block.sum(-1).mean()) < 0.51 / 255  # rounded to a byte
