"""After a clip the largest logit of a head is min(S, tau), whatever the architecture; other heads and weights keep their bits."""

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss

import attemper
from close import in_float32, in_float64
from treat.architectures import BIASED, BY_LAYER, OTHER, PER_HEAD
from treat.clipping import first, made, middle, twin, watched

# computed in float32 inside the model, whatever its dtype
FLOAT32 = {"gpt_neo", "codegen", "gptj", "cohere", "cohere, norm", "gemma3", "gemma3n", "persimmon"}


def exact(name, tau):
    return in_float32(tau, 16, 2 * abs(tau)) if name in FLOAT32 else in_float64(tau)


def clipped(build):
    model, inputs = made(build)
    attemper.projections(model, inputs)
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    record = watched(model, inputs)
    place, peaks = first(record)
    tau = middle(peaks)
    clip = attemper.qk_clip(model, record, tau)
    after = first(watched(model, inputs))[1]
    return model, place, peaks, tau, clip, after, before


# built like another one in the list: only with the full grids
ALIKE = {
    "mistral",
    "mixtral",
    "gpt_bigcode",
    "stablelm",
    "starcoder2",
    "opt",
    "roberta",
    "olmo",
    "cohere",
    "attemper, grouped",
}
EACH = [pytest.param(name, marks=pytest.mark.exhaustive) if name in ALIKE else name for name in PER_HEAD]


def test_enough_architectures_are_tested():
    assert len(PER_HEAD) + len(BY_LAYER) + len(BIASED) + len(OTHER) - len(ALIKE) > 40
    assert set(PER_HEAD) >= ALIKE


@pytest.mark.parametrize("name", EACH)
def test_each_head_by_itself(name):
    model, place, peaks, tau, clip, after, before = clipped(PER_HEAD[name])
    above = peaks > tau
    assert above.any()
    assert after[above].tolist() == [exact(name, tau)] * int(above.sum())
    assert torch.equal(after[~above], peaks[~above])  # to the bit
    here = [one for one in clip if (one.layer, one.kind) == place]
    assert [one.head for one in here] == above.nonzero().flatten().tolist()
    assert [one.factor for one in here] == [tau / one.before for one in here]
    assert [one.before for one in here] == peaks[above].tolist()
    assert not clip.skipped
    assert attemper.treat.last_projections(model)[place].how == "per head"
    touched = {row.parameter for found in clip for row in _rows(model, found)}
    for parameter, now in model.state_dict().items():
        if parameter not in touched:
            assert torch.equal(now, before[parameter]), parameter


def _rows(model, one):
    return attemper.treat.last_projections(model)[one.layer, one.kind].of_head(one.head)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gpt_neox", "deepseek_v3", "olmo2", "odd"])
def test_rows_of_other_heads_keep_their_bits(name):
    model, place, _peaks, _tau, clip, _, before = clipped(PER_HEAD[name])
    layer = attemper.treat.last_projections(model)[place]
    changed = {one.head for one in clip if (one.layer, one.kind) == place}
    kept = set(range(layer.heads)) - changed
    assert changed
    assert kept
    now = model.state_dict()
    for head in range(layer.heads):
        for part in layer.of_head(head):
            if part.side == "k" and layer.key_heads != layer.heads:
                continue
            rows = torch.tensor(part.rows)
            old, new = (state[part.parameter].index_select(part.dim, rows) for state in (before, now))
            assert torch.equal(old, new) == (head in kept), (head, part)
    used = {part.parameter for head in changed for part in layer.of_head(head)}
    for parameter in used:  # rows that belong to no head of q or k: those of v
        mine = torch.zeros(before[parameter].shape, dtype=torch.bool)
        for head in range(layer.heads):
            for part in layer.of_head(head):
                if part.parameter == parameter:
                    mine.index_fill_(part.dim, torch.tensor(part.rows), True)
        assert torch.equal(before[parameter][~mine], now[parameter][~mine])


@pytest.mark.parametrize("name", BY_LAYER)
def test_one_gain_for_all_heads(name):
    model, place, peaks, tau, clip, after, _ = clipped(BY_LAYER[name])
    gamma = tau / float(peaks.max())
    expected = [exact(name, gamma * float(peak)) for peak in peaks]
    assert after.tolist() == expected
    assert {one.how for one in clip if one.layer == place[0]} == {"by layer"}
    assert [one.head for one in clip if one.layer == place[0]] == list(range(len(peaks)))
    assert "one gain serves all heads" in str(attemper.treat.last_projections(model))


def test_a_gain_of_1_plus_w():
    model, _, peaks, tau, _, _, before = clipped(BY_LAYER["gemma3"])
    name = "layers.0.self_attn.q_norm.weight"
    gamma = tau / float(peaks.max())
    assert model.state_dict()[name].tolist() == [in_float64(x) for x in (gamma * (1 + before[name]) - 1).tolist()]


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_is_not_scaled(name):
    """What is added to the scores stays, and the scores themselves are clipped exactly."""
    model, inputs = made(BIASED[name])
    record = watched(model, inputs)
    place, peaks = first(record)
    assert attemper.projections(model, inputs)[place].biased
    scores = first(record, "score_peak")[1]
    assert not torch.equal(scores, peaks)
    tau = middle(scores)
    above = scores > tau
    clip = attemper.qk_clip(model, record, tau)
    after = first(watched(model, inputs), "score_peak")[1]
    size = float(peaks.abs().max())  # of the sums, which the softmax of BLOOM and MPT gets in float32
    expected = in_float32(tau, 2, size) if name in ("bloom", "mpt") else in_float64(tau, size)
    assert after[above].tolist() == [expected] * int(above.sum())
    assert torch.equal(after[~above], scores[~above])  # to the bit
    assert [one.head for one in clip if (one.layer, one.kind) == place] == above.nonzero().flatten().tolist()
    assert not clip.skipped
    assert not clip.notes


def test_a_softcap_is_undone():
    model, inputs = made(OTHER["gemma2"])
    attemper.projections(model, inputs)
    record, cap = watched(model, inputs), 50.0
    peaks = first(record)[1]
    scores = cap * (peaks / cap).atanh()
    tau = middle(scores)
    assert attemper.qk_clip(model, record, tau)
    after = first(watched(model, inputs))[1]
    expected = cap * (scores.clamp(max=tau) / cap).tanh()
    assert after.tolist() == [in_float32(float(one), 16, 2 * tau) for one in expected]


def test_a_softcap_that_is_reached_hides_the_scores():
    model, inputs = made(OTHER["gemma2"])
    attemper.projections(model, inputs)
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.weight.mul_(1e3)
    before = model.layers[0].self_attn.q_proj.weight.clone()
    clip = attemper.qk_clip(model, watched(model, inputs), 100.0)
    assert len(clip) == 0
    assert [(skipped_head.head, "softcap of 50" in skipped_head.reason) for skipped_head in clip.skipped] == [
        (None, True)
    ]
    assert torch.equal(before, model.layers[0].self_attn.q_proj.weight)


class WithSinks(nn.Module):
    """A logit of its own beside those of the keys, one per head."""

    def __init__(self, shifts):
        super().__init__()
        self.qkv, self.sinks, self.shifts = nn.Linear(16, 48), nn.Parameter(torch.zeros(4)), shifts

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        sinks = self.sinks.view(1, 4, 1, 1).expand(len(x), 4, x.shape[1], 1)
        logits = torch.cat([q @ k.mT / 2, sinks], -1)
        logits = logits - logits.max(-1, keepdim=True).values if self.shifts else logits
        return (logits.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("shifts", [False, True])
def test_a_sink_is_no_score(shifts):
    """Its logit is left out of S, whether it is larger than every q·k or not, and is not changed."""
    model, inputs = made(lambda: (WithSinks(shifts), {"x": torch.randn(2, 9, 16)}))
    found = attemper.projections(model, inputs)
    with torch.no_grad():
        model.sinks.copy_(torch.tensor([1e3, 0.0, 1e3, -1e3]))
        q, k, _ = model.qkv(inputs["x"]).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / 2).amax((0, 2, 3))  # by hand
    place, peaks = first(watched(model, inputs))
    assert peaks.tolist() == [in_float64(float(score), size=2e3) for score in scores]
    assert not found[place].biased
    tau = middle(scores)
    clip = attemper.qk_clip(model, watched(model, inputs), tau)
    assert [one.head for one in clip] == (scores > tau).nonzero().flatten().tolist()
    assert not clip.skipped
    assert first(watched(model, inputs))[1].tolist() == [
        in_float64(float(one), size=2e3) for one in scores.clamp(max=tau)
    ]
    assert model.sinks.tolist() == [1e3, 0.0, 1e3, -1e3]


def test_rows_that_the_model_shifts_show_their_scores(monkeypatch):
    """gpt-oss subtracts the largest logit of each row, its sink among them."""
    model, inputs = made(OTHER["gpt_oss"], dtype=torch.float32)
    scores, inner = [], modeling_gpt_oss.eager_attention_forward

    def by_hand(module, query, key, value, mask, scaling, **options):
        keys = key.repeat_interleave(2, 1)
        scores.append((query.double() @ keys.double().mT * scaling + mask.double()).amax((0, 2, 3)))
        return inner(module, query, key, value, mask, scaling=scaling, **options)

    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", by_hand)
    record = watched(model, inputs)
    place, peaks = first(record)
    largest = float(scores[0].max())
    assert peaks.tolist() == [in_float32(x, 8, largest) for x in scores[0].tolist()]
    assert attemper.projections(model, inputs)[place].how == "per head"
    tau = middle(peaks)
    assert [one.head for one in attemper.qk_clip(model, record, tau)] == (peaks > tau).nonzero().flatten().tolist()
    watched(model, inputs)
    assert scores[-1].tolist() == [in_float32(x, 16, 2 * tau) for x in scores[0].clamp(max=tau).tolist()]


class Shifted(nn.Module):
    """The largest logit of each row is subtracted as a whole matrix."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / 2
        shifted = scores - scores.amax(-1, keepdim=True).expand_as(scores)
        return (shifted.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_rows_that_are_shifted_as_a_matrix_show_their_scores():
    model, inputs = made(lambda: (Shifted(), {"x": torch.randn(2, 9, 16)}))
    attemper.projections(model, inputs)
    record = watched(model, inputs)
    assert first(record)[1].tolist() == [0.0] * 4
    scores = first(record, "score_peak")[1]
    tau = middle(scores)
    assert len(attemper.qk_clip(model, record, tau)) == 2
    after = first(watched(model, inputs), "score_peak")[1]
    assert after.tolist() == [in_float64(float(one), size=50) for one in scores.clamp(max=tau)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gpt_neox", "deepseek_v3", "olmo2", "bert", "falcon, new"])
def test_half_weights_are_rounded_once(name):
    """Measured by a twin that computes in float64 with the weights as they are stored: within 1 % of tau."""
    model, inputs = made(PER_HEAD[name], dtype=torch.bfloat16)
    wide = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in inputs.items()}
    found = attemper.projections(model, inputs)
    record = watched(twin(model), wide)
    place, peaks = first(record)
    tau = middle(peaks)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    assert attemper.qk_clip(model, record, tau)
    after = first(watched(twin(model), wide))[1]
    assert float((after - peaks.clamp(max=tau)).abs().max()) <= 0.01 * tau
    assert torch.equal(after[peaks <= tau], peaks[peaks <= tau])
    layer = found[place]
    gamma = tau / peaks.clamp(min=tau)
    part = layer.parts[0]
    power = torch.where(part.whole, 1.0, 0.5) if layer.splits and layer.heads == layer.key_heads else torch.ones(1)
    factor = torch.where(part.owner >= 0, gamma[part.owner.clamp(min=0)] ** power, 1.0).float()
    shape = [-1 if dim == part.dim else 1 for dim in range(before[part.parameter].dim())]
    once = (before[part.parameter].float() * factor.view(shape)).bfloat16()
    if part.side == "q" and not any(other.parameter == part.parameter for other in layer.parts[1:]):
        assert torch.equal(model.state_dict()[part.parameter], once)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "deepseek_v3", "olmo2", "nn.MultiheadAttention"])
def test_in_float32(name):
    """The weights are float32, and so is what the model computes: within 1e-5 of tau."""
    model, inputs = made(PER_HEAD[name], dtype=torch.float32)
    attemper.projections(model, inputs)
    record = watched(model, inputs)
    peaks = first(record)[1]
    tau = middle(peaks)
    assert attemper.qk_clip(model, record, tau)
    after = first(watched(model, inputs))[1]
    assert float((after - peaks.clamp(max=tau)).abs().max()) <= 1e-5 * tau
    assert torch.equal(after[peaks <= tau], peaks[peaks <= tau])
