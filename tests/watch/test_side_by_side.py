"""Keys of several products before one softmax: signs of all of them, by float64 loggers in models of ours and of transformers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import attemper
from close import in_float32, in_float64

WIDTH, HEADS, LENGTH, MEMORY = 32, 4, 10, 3


class Parts(nn.Module):
    """Attention over tokens and over memory, with a learned sink."""

    num_heads = HEADS

    def __init__(self, meet):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.sink, self.memory = nn.Parameter(torch.full((HEADS, 1, 1), 40.0)), nn.Parameter(torch.randn(MEMORY, WIDTH))
        self.meet = meet

    def forward(self, x):
        cut = lambda part: part.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = (cut(part(x)) for part in (self.q, self.k, self.v))
        memory = self.memory.expand(len(x), -1, -1) * 5
        self.scores = q @ k.mT, q @ cut(self.k(memory)).mT
        self.z, self.scored = self.meet(*self.scores, self.sink.expand(len(x), -1, LENGTH, 1))
        weights, values = self.z.softmax(-1), {LENGTH: v, MEMORY: cut(self.v(memory))}
        parts = weights.split([LENGTH if w == LENGTH else MEMORY if w == MEMORY else 1 for w in self.widths()], -1)
        return sum(part @ values[part.shape[-1]] for part in parts if part.shape[-1] > 1)

    def widths(self):
        return [stop - start for start, stop in self.scored]


def hidden_early(z, m, s):
    """A mask that is added to one part: a score above 0 lifts it above −1e4, and it hides all the same."""
    causal = torch.ones(LENGTH, LENGTH).triu(1) * -1e4
    return torch.cat([m, z + causal], -1), [(0, MEMORY), (MEMORY, MEMORY + LENGTH)]


A, B = (0, LENGTH), (LENGTH, LENGTH + MEMORY)
MEETINGS = {
    "tokens, memory": lambda z, m, s: (torch.cat([z, m], -1), [A, B]),
    "memory, tokens": lambda z, m, s: (torch.cat([m, z], -1), [(0, MEMORY), (MEMORY, MEMORY + LENGTH)]),
    "scaled after": lambda z, m, s: (torch.cat([z, m], -1) * 8**-0.5, [A, B]),
    "scaled before": lambda z, m, s: (torch.cat([z * 8**-0.5, m * 8**-0.5], -1), [A, B]),
    "a sink at the end": lambda z, m, s: (torch.cat([z, m, s], -1), [A, B, (13, 14)]),
    "a sink between": lambda z, m, s: (torch.cat([z, s, m], -1), [A, (10, 11), (11, 14)]),
    "a sink beside both": lambda z, m, s: (torch.cat([torch.cat([s, z], -1), m], -1), [(0, 1), (1, 11), (11, 14)]),
    "a zero beside both": lambda z, m, s: (F.pad(torch.cat([z, m], -1), (0, 1)), [A, B, (13, 14)]),
    "hidden early": hidden_early,
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("meet", MEETINGS.values(), ids=MEETINGS)
def test_the_signs_are_those_of_all_keys(meet, training):
    net, x = Parts(meet), torch.randn(2, LENGTH, WIDTH)
    with torch.set_grad_enabled(training), attemper.watch(net, gradients=training) as watch:
        output = net(x)
        if training:
            output.sum().backward()
    z = net.z.detach()
    if meet is hidden_early:
        z = torch.where(z > -5e3, z, -torch.inf)
    places = [index for start, stop in net.scored if stop - start > 1 for index in range(start, stop)]
    p = z.softmax(-1)
    entropy = torch.special.entr(p).sum(-1).mean((0, 2))
    seen = z.isfinite()
    mean = (z.where(seen, 0).sum(-1) / seen.sum(-1)).mean((0, 2))
    rows = watch.record.to_dicts()
    assert [row["kind"] for row in rows] == ["self"] * HEADS
    assert [row["peak"] for row in rows] == in_float64(z[..., places].amax((0, 2, 3)).tolist(), 100)
    assert [row["entropy"] for row in rows] == in_float64(entropy.tolist())
    assert [row["mean"] for row in rows] == in_float64(mean.tolist(), 100)
    assert rows[0]["visible"] == in_float64(seen.sum(-1).double().mean().item())
    said = [": 2 products share one softmax: |dq| and |dk| are those of one of them."] if training else []
    assert [note.removeprefix("Parts") for note in watch.record.notes] == said


LEARNED = {
    "as it is": lambda q, keys: q @ keys.mT,
    "expanded": lambda q, keys: q @ keys.expand(len(q), -1, -1, -1).mT,
    "repeated": lambda q, keys: q @ keys.repeat(len(q), 1, 1, 1).mT,
    "scaled": lambda q, keys: (q @ keys.mT) * 8**-0.5,
    "one for all heads": lambda q, keys: F.linear(q, keys[0]),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scores", LEARNED.values(), ids=LEARNED)
@pytest.mark.parametrize("first", [False, True])
def test_learned_keys_are_keys(scores, first):
    """Beside the scores of tokens, those of a parameter are no sink."""

    class Learned(Parts):
        def forward(self, x):
            q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
            parts = [q @ k.mT, scores(q, self.keys)]
            self.z = torch.cat(parts[::-1] if first else parts, -1)
            weights = self.z.softmax(-1)
            return (weights[..., MEMORY:] if first else weights[..., :LENGTH]) @ v

    net, x = Learned(None), torch.randn(2, LENGTH, WIDTH)
    net.keys = nn.Parameter(9 * torch.randn(HEADS, MEMORY, WIDTH // HEADS))
    with torch.no_grad(), attemper.watch(net) as watch:
        net(x)
    assert [row["peak"] for row in watch.record.to_dicts()] == in_float64(net.z.amax((0, 2, 3)).tolist(), 100)
    assert watch.record.notes == []


def test_padding_among_them_is_left_out():
    hidden = torch.zeros(2, LENGTH, dtype=torch.bool)
    hidden[1, 7:] = True
    net = Parts(lambda z, m, s: (torch.cat([m, z.masked_fill(hidden[:, None, None], -1e9)], -1), [(0, 3), (3, 13)]))
    with torch.no_grad(), attemper.watch(net) as watch:
        net(torch.randn(2, LENGTH, WIDTH))
    assert [row["rows"] for row in watch.record.to_dicts()] == [LENGTH + 7] * HEADS


SIZES = {"vocab_size": 99, "max_position_embeddings": 128}
ENCODER = {**SIZES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BOTH = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4}
BOTH |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
LED_POSITIONS = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
SPARSE = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2}


def some_global(count):
    chosen = torch.zeros(2, 24, dtype=torch.long)
    chosen[:, :count] = 1
    return {"input_ids": torch.randint(3, 90, (2, 24)), "global_attention_mask": chosen}


def decoded(inputs):
    return {**inputs, "decoder_input_ids": torch.randint(3, 90, (2, 6))}


def blocks():
    return {"input_ids": torch.randint(3, 90, (2, 64))}


T = transformers
MODELS = {
    "Longformer": lambda: (
        T.LongformerModel(T.LongformerConfig(**ENCODER, attention_window=[4, 4], pad_token_id=1)),
        some_global(3),
    ),
    "LED": lambda: (T.LEDModel(T.LEDConfig(**BOTH, **LED_POSITIONS, attention_window=4)), decoded(some_global(2))),
    "PEGASUS-X": lambda: (
        T.PegasusXModel(T.PegasusXConfig(**BOTH, num_global_tokens=5, block_size=8, stagger_local_blocks=False)),
        decoded({"input_ids": torch.randint(3, 90, (2, 24))}),
    ),
    "BigBird": lambda: (T.BigBirdModel(T.BigBirdConfig(**ENCODER, **SPARSE)), blocks()),
    "BigBird-PEGASUS": lambda: (
        T.BigBirdPegasusModel(T.BigBirdPegasusConfig(**BOTH, **SPARSE, max_position_embeddings=128)),
        decoded(blocks()),
    ),
}


def by_head(logits):
    """(H, everything): heads are the second dimension, the third in Longformer's own, or joined with the batch."""
    if logits.dim() == 3:
        logits = logits.unflatten(0, (-1, HEADS))
    return logits.movedim(1 if logits.shape[1] == HEADS else 2, 0).flatten(1, -2)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_real_models_by_a_logger_of_our_own(make, monkeypatch):
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    names, running, seen = {module: name for name, module in model.named_modules()}, [], {}
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: running.append(module))
        module.register_forward_hook(lambda module, args, output: running.pop() and None)
    softmax = F.softmax

    def logged(logits, dim=-1, **options):
        seen.setdefault(names[running[-1]], []).append(by_head(logits.detach().clone()))
        return softmax(logits, dim=dim, **options)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(F, "softmax", logged)
        model(**inputs)
    with torch.no_grad(), attemper.watch(model) as watch:
        model(**inputs)
    found = {}
    for row in watch.record.to_dicts():
        found.setdefault(row["layer"], []).append(row)
    assert watch.record.notes == []
    assert set(found) == set(seen)
    for layer, logits in seen.items():
        peaks = torch.stack([one.flatten(1).amax(1) for one in logits]).amax(0)
        entropy = torch.cat([torch.special.entr(one.softmax(-1)).sum(-1) for one in logits], 1).mean(1)
        close = in_float64
        if "longformer" in f"{type(model).__name__}.{layer}".lower():  # its softmax is float32
            close = partial(in_float32, terms=64)
        assert [row["peak"] for row in found[layer]] == close(peaks.tolist())
        assert [row["entropy"] for row in found[layer]] == close(entropy.tolist())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("after", [False, True])
def test_a_bias_of_one_product_is_left_out_of_the_largest_score(after):
    bias = torch.arange(LENGTH).double() * 9

    def meet(z, m, s):
        if after:
            return torch.cat([m, z, s], -1) + F.pad(bias, (MEMORY, 1)), [(0, 3), (3, 13), (13, 14)]
        return torch.cat([m, z + bias, s], -1), [(0, 3), (3, 13), (13, 14)]

    net = Parts(meet)
    with torch.no_grad(), attemper.watch(net) as watch:
        net(torch.randn(2, LENGTH, WIDTH))
    peaks = torch.cat(net.scores, -1).amax((0, 2, 3))
    assert [row["score_peak"] for row in watch.record.to_dicts()] == in_float64(peaks.tolist(), 100)
    assert [row["peak"] for row in watch.record.to_dicts()] == in_float64(net.z[..., :-1].amax((0, 2, 3)).tolist(), 100)
