"""A clip in a loop: a head that does not come down is named and left alone; one that training raises again is clipped again."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import parametrize

import attemper
from attemper.integrations import monitor
from forked import run as run_forked

WIDTH, HEADS, EACH, LENGTH, WORDS = 32, 4, 8, 12, 16


class Attention(nn.Module):
    num_heads = HEADS

    def __init__(self, key_heads=HEADS, norm=False):
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * EACH) for _ in range(2))
        self.before, self.norm = nn.LayerNorm(WIDTH), nn.RMSNorm(EACH) if norm else nn.Identity()

    def forward(self, x):
        y = self.before(x)
        q, k, v = (side(y).unflatten(-1, (-1, EACH)).transpose(1, 2) for side in (self.q, self.k, self.v))
        out = scaled_dot_product_attention(self.norm(q), k, v, enable_gqa=True)
        return x + self.o(out.transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.Sequential(Attention(**options), Attention(**options))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens) + self.places))


def optimizers_of(model, kind, rate):
    if kind != "Muon":
        return [getattr(torch.optim, kind)(model.parameters(), lr=rate)]
    matrices = [parameter for parameter in model.layers.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in matrices)]
    return [torch.optim.Muon(matrices, lr=rate), torch.optim.Adam(rest, lr=0.01)]


@pytest.mark.parametrize(
    ("kind", "rate", "tau", "every", "steps", "options"),
    [
        ("Muon", 0.2, 0.5, 1, 200, {}),  # every head is clipped nearly every step
        ("Muon", 0.2, 2.0, 5, 60, {"norm": True}),
        ("Adam", 0.03, 0.5, 1, 60, {"key_heads": 2}),
        ("Adam", 0.2, 0.5, 5, 60, {}),  # logits grow a hundredfold between two clips
        ("Adam", 0.2, 0.5, 1, 60, {}),
        ("SGD", 0.3, 0.5, 1, 60, {"norm": True}),
    ],
)
def test_heads_that_training_raises_are_clipped_again_and_again(kind, rate, tau, every, steps, options):
    torch.manual_seed(0)
    model = Language(**options)
    optimizers = optimizers_of(model, kind, rate)
    found = attemper.projections(model, torch.randint(WORDS, (2, LENGTH)))
    counts = []
    with attemper.watch(model, every=every) as watch:
        for step in range(steps):
            tokens = torch.randint(WORDS, (4, LENGTH))
            cross_entropy(model(tokens).flatten(0, 1), (tokens.cumsum(1) % WORDS).flatten()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            watch.step()
            if step % every == 0:
                clip = attemper.qk_clip(model, watch.record, tau, projections=found)
                assert not clip.skipped
                counts.append(len(clip))
    assert sum(map(bool, counts)) > len(counts) / 3


class Plain(nn.Module):
    """One layer whose logits are large."""

    num_heads = HEADS

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        with torch.no_grad():
            self.q.weight.mul_(6), self.k.weight.mul_(6)

    def sized(self, q):
        return q

    def forward(self, x):
        q, k, v = (side(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in (self.q, self.k, self.v))
        return scaled_dot_product_attention(self.sized(q), k, v).transpose(1, 2).flatten(2)

    def clipped(self):
        """What runs after each clip."""


class Again(torch.autograd.Function):
    """Gives each head of q and k the size back that it had at first; straight through for autograd."""

    @staticmethod
    def forward(ctx, x, size):
        return x * (size / torch.linalg.vector_norm(x, dim=(0, 2, 3), keepdim=True))

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Renormalised(Plain):
    size = None

    def forward(self, x):
        q, k, v = (side(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in (self.q, self.k, self.v))
        if self.size is None:
            self.size = [torch.linalg.vector_norm(one.detach(), dim=(0, 2, 3), keepdim=True) for one in (q, k)]
        q, k = Again.apply(q, self.size[0]), Again.apply(k, self.size[1])
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Master(Plain):
    """The weights are written from copies that nobody named, as a trainer's own float32 masters are."""

    def __init__(self):
        super().__init__()
        self.masters = [parameter.detach().clone() for parameter in self.parameters()]

    def clipped(self):
        with torch.no_grad():
            for one, master in zip(self.parameters(), self.masters, strict=True):
                one.copy_(master)


class Fixed(nn.Module):
    """A parametrization that goes on with the first value of its weight."""

    def forward(self, weight):
        self.first = getattr(self, "first", weight.detach().clone())
        return weight + (self.first - weight).detach()


class Parametrized(Plain):
    def __init__(self):
        super().__init__()
        for side in (self.q, self.k):
            side.bias = None
            parametrize.register_parametrization(side, "weight", Fixed())


def tokens_of(seed=1):
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def built(kind):
    """A model whose projections are known, and the largest logits of its heads."""
    torch.manual_seed(3)
    model = kind().double()
    model.masters = [parameter.detach().clone() for parameter in model.parameters()]
    attemper.projections(model, tokens_of())
    with torch.no_grad(), attemper.watch(model) as watch:
        model(tokens_of())
    return model, [row["peak"] for row in watch.record.to_dicts()]


def clips_of(model, tau, count, rate=0.0):
    """Clips of a loop, of the same input, with a step of an optimizer before each."""
    optimizer, clips = torch.optim.SGD(model.parameters(), lr=rate), []
    with attemper.watch(model) as watch:
        for _ in range(count):
            model(tokens_of()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
            clips.append(attemper.qk_clip(model, watch.record, tau))
            model.clipped()
    return clips


@pytest.mark.parametrize("rate", [0.0, 1e-3])
@pytest.mark.parametrize("kind", [Renormalised, Master, Parametrized])
def test_a_clip_without_effect_is_named_at_the_next_step(kind, rate):
    model, peaks = built(kind)
    tau = max(peaks) / 8
    heads = {head for head, peak in enumerate(peaks) if peak > 4 * tau}
    once, *later = clips_of(model, tau, 3, rate)
    assert heads
    assert {one.head for one in once} >= heads
    assert not once.skipped
    for clip in later:
        assert {skipped_head.head for skipped_head in clip.skipped} >= heads
        assert all("its largest logit did not fall" in skipped_head.reason for skipped_head in clip.skipped)
        assert not {one.head for one in clip} & heads
    if kind is Master:  # the others are seen by a derivative now
        attemper.projections(model, tokens_of())
        assert {one.head for one in clips_of(model, tau, 1)[0]} >= heads


def test_a_small_clip_without_effect_does_not_take_the_weights_away():
    model, peaks = built(Renormalised)
    highest = peaks.index(max(peaks))
    before = model.q.weight.detach().norm()
    clips = clips_of(model, max(peaks) / 1.3, 20)
    named = [highest in {skipped_head.head for skipped_head in clip.skipped} for clip in clips]
    assert 1 < named.index(True) < 6
    assert all(named[named.index(True) :])
    assert not any(highest in {one.head for one in clip} for clip in clips[named.index(True) :])
    assert model.q.weight.detach().norm() > before / 2


def test_a_clip_with_effect_keeps_nothing():
    """Nothing is in its state, and a model is freed with what was kept of it."""
    model, peaks = built(Plain)
    first, *rest = clips_of(model, max(peaks) / 8, 5)
    assert first
    assert not any(clip.skipped for clip in rest)
    again = copy.deepcopy(model)
    assert list(again.state_dict()) == list(model.state_dict())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_monitor_names_it_once(caplog):
    model, peaks = built(Master)
    seen = {}
    with monitor(
        model, every=1, clip=max(peaks) / 8, pictures=0, log=lambda metrics, step: seen.update({step: metrics})
    ) as watching:
        for _ in range(5):
            model(tokens_of()).sum().backward()
            watching.step()
            model.clipped()
    said = [record.message for record in caplog.records if "was not clipped" in record.message]
    assert len(said) == 1
    assert "at step 1: it was clipped before" in said[0]
    assert seen[0]["attemper/clipped"] == HEADS > seen[4]["attemper/clipped"]


class Regrouped(Plain):
    heads = HEADS

    def forward(self, x):
        q, k, v = (side(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for side in (self.q, self.k, self.v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_model_that_changes_ends_the_clip_and_not_the_training(caplog):
    model, peaks = built(Regrouped)
    seen = {}
    with monitor(
        model, every=1, clip=max(peaks) / 8, pictures=0, log=lambda metrics, step: seen.update({step: metrics})
    ) as watching:
        for step in range(4):
            with torch.no_grad():
                model.q.weight.mul_(5)
            model.heads = HEADS if step < 2 else 2
            model(tokens_of()).sum().backward()
            watching.step()
    said = [record.message for record in caplog.records if "no head is clipped" in record.message]
    assert len(said) == 1
    assert "from step 2 on" in said[0]
    assert "the record has 2 heads in '', and the model's projections have 4" in said[0]
    assert [seen[step]["attemper/clipped"] for step in range(4)] == [HEADS, HEADS, 0, 0]


RANK = """
import torch, attemper
from torch import distributed, nn

rank, world, folder, case = int(argv[0]), int(argv[1]), argv[2], argv[3]
HEADS, EACH, WIDTH = 5, 6, 30
torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    "Five heads of six channels: 30 rows on 2 ranks cut a head."

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        q = 9 * self.q(x).unflatten(-1, (HEADS, EACH)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, HEADS, EACH)).permute(2, 0, 3, 1, 4)
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def loop(module, mine):
    "Weights of q are written back after the first clip, and those of the first layer alone."
    found, told = attemper.projections(module, x[:1]), []
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    before = [one.detach().clone() for one in module[0].parameters()]
    import warnings

    warnings.simplefilter("ignore")
    with attemper.watch(module) as watch:
        for step in range(3):
            module(mine).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
            clip = attemper.qk_clip(module, watch.record, 0.1)
            told.append(([(one.layer, one.head) for one in clip], [(one.layer, one.head) for one in clip.skipped]))
            with torch.no_grad():
                for one, old in zip(module[0].parameters(), before, strict=True):
                    one.copy_(old)
    return told


x = torch.randn(2 * world, 7, WIDTH, generator=torch.Generator().manual_seed(5)) * torch.arange(1, 2 * world + 1).view(-1, 1, 1)
torch.manual_seed(0)
alone = nn.Sequential(Block(), Block())
torch.manual_seed(0)
module = nn.Sequential(Block(), Block())
expected = loop(alone, x)
assert any(named for _, named in expected[1:]) and expected[2][0], expected
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
from torch.distributed.fsdp import fully_shard

for block in module:
    fully_shard(block)
fully_shard(module)
assert loop(module, x[2 * rank : 2 * rank + 2]) == expected
distributed.destroy_process_group()
"""


def test_ranks_that_hold_parts_of_heads_agree(tmp_path):
    run_forked(RANK, [(rank, 2, tmp_path, "") for rank in range(2)], tmp_path)
