"""The stacked language model: equal to a plain one, run by run, with its treatments; and what its probe measures."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attemper
from close import assert_float64, in_float64
from research.stacked import language, text, treatments
from research.stacked.language import Dimensions, LanguageStack
from research.stacked.probe import SIGNS
from research.stacked.text import sources, starts

SIZE = Dimensions(width=8, head_dim=4, layers=2, length=12, batch=3, steps=6, warm_up=2, probed=2)
CELLS = [
    {"rule": "none", "lr": 0.03, "seed": 0},
    {"rule": "sqrt_dk", "lr": 0.01, "seed": 1},
    {"rule": "qk_norm", "lr": 0.1, "seed": 0},
]


def stacked(cells, size=SIZE, steps=None, every=2):
    stack = LanguageStack(size, cells, "cpu", torch.float64, torch.float64, every)
    for _ in range(size.steps if steps is None else steps):
        stack.train()
    return stack


class Plain(nn.Module):
    """One run, written as such models are."""

    def __init__(self, cell):
        super().__init__()
        self.rule = cell["rule"]
        for name, value in language.initial(SIZE, cell["seed"], "cpu", torch.float64).items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, tokens):
        x = self.token[tokens[:, :-1]]
        for layer in range(SIZE.layers):
            weights = {name: getattr(self, f"{name}{layer}") for name in ("qkv", "out", "up", "down", "gain")}
            q, k, v = (
                part.unflatten(-1, (SIZE.heads, -1)).transpose(1, 2)
                for part in (F.layer_norm(x, (SIZE.width,)) @ weights["qkv"]).chunk(3, -1)
            )
            q, k = self.rotated(q), self.rotated(k)
            if self.rule == "qk_norm":
                q = F.rms_norm(q, q.shape[-1:], eps=language.EPSILON) * weights["gain"][:, None, None]
                k = F.rms_norm(k, k.shape[-1:], eps=language.EPSILON)
            scale = 1.0 if self.rule == "none" else SIZE.head_dim**-0.5
            logits = q @ k.mT * scale
            logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -math.inf)
            x = x + (logits.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights["out"]
            x = x + F.gelu(F.layer_norm(x, (SIZE.width,)) @ weights["up"]) @ weights["down"]
        logits = F.layer_norm(x, (SIZE.width,)) @ self.read
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + language.Z_LOSS * logits.logsumexp(-1).square().mean()

    @staticmethod
    def rotated(x):
        half = SIZE.head_dim // 2
        angle = torch.arange(x.shape[-2])[:, None] * 10_000.0 ** (-2.0 * torch.arange(half).double() / SIZE.head_dim)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
        return torch.stack(turned, -1).flatten(-2)


def alone(cell):
    """One run by torch's AdamW, whose decay is the rate times a factor: here the factor is made to give the stack's."""
    model = Plain(cell)
    gains = [p for name, p in model.named_parameters() if name.startswith("gain")]
    others = [p for name, p in model.named_parameters() if not name.startswith("gain")]
    optimizer = torch.optim.AdamW(
        [{"params": others}, {"params": gains, "weight_decay": 0.0}], 1.0, betas=language.BETAS
    )
    drawn = starts("train", (SIZE.steps, SIZE.batch), SIZE.length, SIZE.length, SIZE.batch, cell["seed"])
    losses = []
    for step in range(SIZE.steps):
        tokens = sources()[0].long()[drawn[step][:, None] + torch.arange(SIZE.length + 1)]
        loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        part = (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 4))
        rate = max(cell["lr"] * part, 1e-5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.param_groups[0]["weight_decay"] = SIZE.decay * part / rate
        optimizer.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)


@pytest.mark.parametrize("cells", [CELLS, CELLS[:2]], ids=["with norms", "without"])
def test_a_stack_of_language_models_is_its_runs(cells):
    stack = stacked(cells)
    for run, cell in enumerate(cells):
        model, losses = alone(cell)
        assert_float64(stack.losses[run], losses, cell["rule"])
        for name, expected in model.named_parameters():
            if name.startswith("gain") and cell["rule"] != "qk_norm":
                continue
            assert_float64(stack.parameters.views[name][run].detach(), expected.detach(), f"{cell['rule']} {name}")


TREATED = [
    {"rule": "none", "lr": 0.1, "seed": 0, "treatment": treatment, "start": start, "fault": "temperature"}
    for treatment, start in (("", 0), ("clip30", 2), ("floor", 0), ("quack", 0), ("third", 3))
] + [
    {"rule": "sqrt_dk", "lr": 0.1, "seed": 1, "fault": fault, "fault_step": 3} for fault in ("temperature", "rate", "bfloat16")
]  # fmt: skip


def test_a_treatment_changes_its_own_run_only():
    together = stacked(TREATED)
    for run, cell in enumerate(TREATED):
        assert_float64(together.parameters.flat[run], stacked([cell]).parameters.flat[0], str(cell))
    for run in range(1, 5):
        assert not torch.equal(together.parameters.flat[run], together.parameters.flat[0]), TREATED[run]["treatment"]


def test_the_clip_brings_the_largest_logit_to_its_limit():
    cells = [{"rule": "none", "lr": 0.0, "seed": 0, "treatment": name} for name in ("", "clip1")]
    size = Dimensions(width=8, head_dim=4, layers=1, length=12, batch=2, steps=2, warm_up=1, decay=0.0, probed=2)
    stack = LanguageStack(size, cells, "cpu", torch.float64, torch.float64, every=1)
    stack.starts[:, 1] = stack.starts[:, 0]  # the same text twice
    stack.train()
    stack.train()
    first, second = stack.probe.found[:, SIGNS.index("peak"), 0]
    assert torch.equal(first[0], first[1])
    assert (first[0] > 1.0).any()
    expected = torch.where(first[1] > 1.0, torch.ones_like(first[1]), first[1])
    assert_float64(second[1], expected)
    assert_float64(second[0], first[0])


def test_the_floor_is_the_mean_over_layers_where_attempers_adds_them(monkeypatch):
    """docs/treat.md: the floor of the studies is that of `attemper.floor` with a weight divided by the number of layers."""
    cell = {"rule": "none", "lr": 0.1, "seed": 0, "treatment": "floor"}
    stack = LanguageStack(SIZE, [cell], "cpu", torch.float64, torch.float64)
    stack.parameters.flat.data.mul_(8.0)  # sharp enough to be below the floor
    calls, penalty = [], stack._penalty
    monkeypatch.setattr(stack, "_penalty", lambda *given: calls.append(given) or penalty(*given))
    tokens = stack.text[stack.starts[:, 0, :, None] + stack.offsets].long()
    _, found, _ = stack.forward(tokens, torch.zeros(1, dtype=torch.long), floor=True)
    terms = [
        attemper.entropy_floor(
            attemper.attention(query[0], key[0], key[0], causal=True, scale=1.0).vitals, treatments.FLOOR
        )
        for query, key in calls
    ]
    assert len(terms) == SIZE.layers
    assert all(term > 0 for term in terms)
    assert_float64(found[0].detach(), (sum(terms) / SIZE.layers).detach())


def test_a_logit_that_is_no_number_clips_nothing():
    stack = LanguageStack(SIZE, CELLS[:2], "cpu", torch.float64, torch.float64)
    before = stack.parameters.flat.clone()
    peaks = torch.tensor([math.nan, -3.0], dtype=torch.float64).expand(SIZE.layers, 2, 2)
    treatments.clip(stack.parameters, SIZE, peaks, torch.tensor([1.0, math.inf], dtype=torch.float64))
    assert torch.equal(stack.parameters.flat, before)
    treatments.clip(stack.parameters, SIZE, peaks * 0 + math.inf, torch.tensor([1.0, math.inf], dtype=torch.float64))
    assert stack.parameters.flat.isfinite().all()


def test_the_probe_measures_what_attemper_measures(monkeypatch):
    stack = LanguageStack(SIZE, CELLS, "cpu", torch.float64, torch.float64, every=1)
    seen = []
    take = stack.probe.take
    monkeypatch.setattr(stack.probe, "take", lambda layer, q, k: (seen.append((layer, q, k)), take(layer, q, k)))
    stack.train()
    for layer, query, key in seen:
        for run in range(len(CELLS)):
            vitals = attemper.measure(query[run], key[run], causal=True, scale=1.0, kernel="reference")
            far = vitals.each(lambda sign: sign[..., 7:])
            values = {
                "peak": vitals.peak.amax((0, 2)),
                "logit_std": far.variance.mean((0, 2)).sqrt(),
                "logit_mean": far.mean.mean((0, 2)).abs(),
                "lse": far.lse.mean((0, 2)),
                "entropy": far.entropy.mean((0, 2)),
                "effective_keys": far.effective_keys.mean((0, 2)),
                "evenness": far.evenness.mean((0, 2)),
                "sum_p2": far.sum_p2.mean((0, 2)),
                "top_weight": far.top_weight.mean((0, 2)),
                "saturated": (far.top_weight > 0.99).double().mean((0, 2)),
            }
            for sign, expected in values.items():
                assert_float64(stack.probe.found[0, SIGNS.index(sign), layer, run], expected, sign)


def test_the_spectrum_is_that_of_the_product():
    torch.manual_seed(0)
    stack = LanguageStack(SIZE, CELLS, "cpu", torch.float64, torch.float64, every=1)
    spread = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)  # so far apart that twelve rounds are enough
    query, key = (torch.linalg.qr(torch.randn(3, 2, 8, 4).double())[0] * spread for _ in range(2))
    key[..., 1:] += query[..., :3] * 0.01
    stack.probe.weights([(query, key)])
    values = torch.linalg.svdvals(query @ key.mT).square()
    found = stack.probe.found[0, :, 0]
    assert_float64(found[SIGNS.index("spectral_norm")], values[..., 0].sqrt())
    assert_float64(found[SIGNS.index("concentration")], values[..., 0] / values.sum(-1))


def test_the_entropy_of_an_increment_is_that_of_its_spectrum():
    torch.manual_seed(0)
    stack = LanguageStack(SIZE, CELLS, "cpu", torch.float64, torch.float64, every=1)
    before = [torch.randn(3, 2, 8, 4).double() for _ in range(2)]
    now = [one + 1e-3 * torch.randn(3, 2, 8, 4).double() for one in before]
    stack.probe.increments(1, now, before)
    (query, key), change = now, [one - other for one, other in zip(now, before, strict=True)]
    spectrum = torch.linalg.svdvals(change[0] @ key.mT + query @ change[1].mT).square()
    share = spectrum / spectrum.sum(-1, keepdim=True)
    assert_float64(stack.probe.found[0, SIGNS.index("increment_entropy"), 1], -share.square().sum(-1).log())


def test_alignment_is_1_where_all_inputs_are_on_one_side():
    torch.manual_seed(0)
    stack = LanguageStack(SIZE, CELLS, "cpu", torch.float64, torch.float64, every=1)
    left, right = (torch.linalg.qr(torch.randn(3, 8, 8).double())[0] for _ in range(2))
    weight = left @ torch.diag(torch.tensor([1.0] + [0.1] * 7).double()) @ right
    inputs = torch.randn(3, 40, 8).double()
    side = (inputs @ left[..., :1]).sign()
    inputs[1] *= side[1]
    inputs[2, :30] *= side[2, :30]
    inputs[2, 30:] *= -side[2, 30:]
    stack.probe.align(0, inputs, weight)
    found = stack.probe.found[0, SIGNS.index("alignment"), 0]
    assert_float64(found[:, 0], torch.stack([side[0].mean().abs(), torch.tensor(1.0), torch.tensor(0.5)]).double())
    assert torch.equal(found[:, 0], found[:, 1])


def test_stored_scores_are_rounded_from_the_fault_on():
    cells = [{"rule": "none", "lr": 0.01, "seed": 0, "fault": fault, "fault_step": 3} for fault in ("", "bfloat16")]
    stack = stacked(cells)
    assert torch.equal(stack.losses[0, :3], stack.losses[1, :3])
    assert (stack.losses[0, 3:] != stack.losses[1, 3:]).all()
    gap = (stack.losses[0, 3] - stack.losses[1, 3]).abs()
    assert gap < 2**-8 * stack.losses[0, 3]  # a bfloat16 has eight bits
    query, key, value = (torch.randn(2, 1, 2, 12, 4).double() for _ in range(3))
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
    found = stack._rounded(plain, query, key, value, torch.tensor([3]))
    scores = (query @ key.mT).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    weights = scores.to(torch.bfloat16).softmax(-1)
    assert torch.equal(found[0], plain[0])
    assert_float64(found[1], (weights.double() @ value)[1])


def test_the_products_are_the_weights_of_a_head():
    stack = LanguageStack(SIZE, CELLS, "cpu", torch.float64, torch.float64)
    query, key = stack._products()[1]
    assert torch.equal(query[2, 1], stack.parameters.views["qkv1"][2, :, 4:8])
    assert torch.equal(key[2, 1], stack.parameters.views["qkv1"][2, :, 12:16])


def test_held_out_loss_is_without_what_training_adds():
    stack = stacked(CELLS, steps=0)
    found = stack.held_out("test", 4, pieces=2)
    assert len(found) == len(CELLS)
    drawn = starts("test", (4,), SIZE.length, SIZE.length).sort().values
    tokens = sources()[0].long()[drawn[:2, None] + torch.arange(SIZE.length + 1)]
    model = Plain(CELLS[1])
    z_loss, language.Z_LOSS = language.Z_LOSS, 0.0
    try:
        assert found[1][0] == in_float64(float(model(tokens).detach()))
    finally:
        language.Z_LOSS = z_loss


def test_no_file_is_in_two_parts():
    bounds = [text.ends(part) for part in ("train", "validation", "test")]
    assert [low for low, _ in bounds] == [0, *(high for _, high in bounds[:-1])]
    assert bounds[-1][1] == len(sources()[0])
    whole = [0, *itertools.accumulate(map(len, text._files()))]
    assert {high for _, high in bounds} <= set(whole)  # each part ends where a file ends
    assert len(set(text._files())) == len(text._files())
    for part, (low, high) in zip(text.SHARES, bounds, strict=True):
        drawn = starts(part, (2000,), 30, "here")
        assert drawn.min() >= low
        assert drawn.max() + 31 <= high


def test_the_gradient_per_query_is_that_of_a_plain_run():
    stack = stacked(CELLS[:2], steps=1)
    for run, cell in enumerate(CELLS[:2]):
        model, kept = Plain(cell), []
        rotated = model.rotated
        model.rotated = lambda x, kept=kept, rotated=rotated: (kept.append(rotated(x)), kept[-1])[1]
        drawn = starts("train", (SIZE.steps, SIZE.batch), SIZE.length, SIZE.length, SIZE.batch, cell["seed"])
        loss = model(sources()[0].long()[drawn[0][:, None] + torch.arange(SIZE.length + 1)])
        scale = 1.0 if cell["rule"] == "none" else SIZE.head_dim**-0.5
        found = torch.autograd.grad(loss, kept[::2])  # of the queries, which come before the keys
        norms = torch.cat([(one[: SIZE.probed] / scale).norm(dim=-1).flatten() for one in found])
        norms = norms.mul(SIZE.batch * SIZE.length).sort().values
        assert_float64(stack.gradient[run, 0, 0], norms[len(norms) // 2], cell["rule"])
        assert_float64(stack.gradient[run, 0, 1], norms.square().mean().sqrt(), cell["rule"])
        assert stack.gradient[run, 1:].isnan().all()
