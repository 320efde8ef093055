"""An error in attemper's own code never ends, changes or poisons a pass: one is planted at each place where it may be raised."""

import itertools
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.watch.examine import Examiner
from close import assert_float64, in_float32
from planted import Plant, Planted, planted
from serving import SEED
from watched import Block, state

pytestmark = pytest.mark.filterwarnings("ignore")
APART = 97
"""`make test` tries one place in so many, others with each seed; `make test-all` tries all of them."""


@pytest.fixture(autouse=True)
def lenient(monkeypatch, float64):
    """As users run it. In float64, where attemper's kernels and transformers' own differ by its rounding alone."""
    monkeypatch.setenv("ATTEMPER_STRICT", "0")


class ByHand(Block):
    def forward(self, x):
        q, k, v = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Own(Block):
    def forward(self, x):
        q, k, v = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + attemper.attention(q, k, v, signs=()).output.transpose(1, 2).flatten(2)


class Again(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Text(nn.Module):
    def __init__(self, implementation, family="Llama", **more):
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2} | more
        config = getattr(transformers, f"{family}Config")(vocab_size=16, attn_implementation=implementation, **sizes)
        self.text = getattr(transformers, f"{family}Model")(config)

    def forward(self, x):
        return self.text(inputs_embeds=x, use_cache=False).last_hidden_state


def opaque(module, query, key, value, attention_mask, **options):
    """An attention function that shows no op that a watch follows."""
    scores = (query[..., None, :] * key[..., None, :, :]).sum(-1) * options["scaling"]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = (scores - scores.amax(-1, keepdim=True)).masked_fill(hidden, -torch.inf).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights[..., None] * value[..., None, :, :]).sum(-2).transpose(1, 2).contiguous(), None


class Summing(Examiner):
    """Needs what q and k were multiplied by, as the audit does."""

    traces = True

    def look(self, call, vitals, rows):
        return float(vitals.peak.sum())


def stack(cls):
    return nn.Sequential(cls(), cls())


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def instrumented():
    model = Text("sdpa")
    attemper.instrument(model.text)
    return model


ROUTES = {
    "sdpa": partial(stack, Block),
    "by hand": partial(stack, ByHand),
    "attemper": partial(stack, Own),
    "checkpoint": partial(stack, Again),
    "encoder": encoder,
    "interface": partial(Text, "sdpa"),
    "eager": partial(Text, "eager"),
    "opaque": partial(Text, "opaque"),
    "instrumented": instrumented,
}
WATCHES = {
    "intercepted": {},
    "full": {"full": True},
    "gradients": {"gradients": True},
    "traced": {"examiners": [Summing()]},
}


@pytest.fixture(autouse=True)
def with_opaque(monkeypatch):
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "opaque", opaque)
    mask = transformers.AttentionMaskInterface._global_mapping["sdpa"]
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "opaque", mask)


def run(model, x):
    """The output and all gradients."""
    model.zero_grad()
    output = model(x)
    if torch.is_grad_enabled():
        output.square().mean().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [output.detach().clone(), *(grad.clone() for grad in grads if grad is not None)]


def places(request, apart=APART):
    """The numbers of the places to plant an error at."""
    apart = 1 if request.node.get_closest_marker("exhaustive") else apart
    torch.manual_seed(SEED + len(request.node.name))
    return itertools.count(1 + int(torch.randint(apart, ())), apart)


def same(found, expected):
    return all(map(torch.equal, found, expected))


AMOUNTS = [pytest.param("some"), pytest.param("all", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("way", WATCHES)
@pytest.mark.parametrize("route", ROUTES)
def test_an_error_in_a_pass_is_noted(route, way, amount, request):
    if route == "instrumented" and way != "intercepted":
        pytest.skip("does not apply: a watch of its ops takes the route of the interface")
    torch.manual_seed(SEED)
    model, x, steps = ROUTES[route](), torch.randn(2, 5, 16), [0]
    with torch.set_grad_enabled(way != "intercepted" or route == "checkpoint"):
        expected, before = run(model, x), state()
        with attemper.watch(model, **WATCHES[way]) as watch:
            # an instrumented pass has few places, of which at least two are tried
            for number in places(request, APART // 2 if route == "instrumented" else APART):
                assert same(run(model, x), expected)  # a full pass, after which the next may be intercepted
                watch.step(steps[-1])
                plant = Plant(number)
                with planted(plant):
                    found = run(model, x)
                    watch.step(steps[-1] + 1)
                if plant.place is None:
                    break
                assert same(found, expected), plant.place
                steps.append(steps[-1] + 2)
                watch.pause()
                assert state() == before, plant.place
                watch.resume()
                assert any("Planted: planted" in note for note in watch.record.notes), plant.place
                watch.record.notes.clear()
    assert len(steps) > 2
    rows: dict[int, list[float]] = {}
    for row in watch.record.to_dicts():
        rows.setdefault(row["step"], []).append(row["rows"])
    # the end of a step takes over the tallies of the one before
    missing = {*steps} - {*rows}
    assert not missing or route == "instrumented"
    assert all(rows[step] == rows[0] for step in steps if step in rows)
    assert state() == before


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("phase", ["opens", "closes"])
@pytest.mark.parametrize("replace", [False, True])
def test_an_error_where_a_watch_opens_or_closes_is_noted(phase, replace, amount, request):
    torch.manual_seed(SEED)
    model, x = Text("sdpa").text, torch.randn(2, 5, 16)
    with attemper.watch(model, replace=replace):
        model(inputs_embeds=x)  # the name of a replaced attention stays registered
    before, tried = state(), 0
    for number in places(request, APART // 3):  # closing has fewer places than APART
        watch, plant = attemper.watch(model, replace=replace), Plant(number)
        with planted(plant) if phase == "opens" else nullcontext():
            watch.__enter__()
        model(inputs_embeds=x)
        with planted(plant) if phase == "closes" else nullcontext():
            watch.__exit__(None, None, None)
        if plant.place is None:
            break
        assert state() == before, plant.place
        assert any("Planted: planted" in note for note in watch.record.notes), plant.place
        tried += 1
    assert tried


def in_rounding(family, found, expected):
    """transformers' eager attention has its softmax in float32."""
    for one, other in zip(found, expected, strict=True):
        if family == "Llama":
            assert_float64(one, other)
        else:
            assert one.flatten().tolist() == in_float32(
                other.flatten().tolist(), other.numel(), size=float(other.abs().max())
            )


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("way", ["intercepted", "full", "off", "floor"])
def test_after_an_error_transformers_attends_itself(way, family, amount, request):
    """Gemma 2 has a softcap, which SDPA has not."""
    torch.manual_seed(SEED)
    sizes = {"head_dim": 8, "num_key_value_heads": 1} if family == "Gemma2" else {}
    model, x = Text("sdpa" if family == "Llama" else "eager", family, **sizes).text, torch.randn(2, 5, 16)
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])

    def both():
        one, other = (model(inputs_embeds=x, attention_mask=mask, use_cache=False)[0] for mask in (None, padding))
        return [one, other[0], other[1, :3]]

    expected, before, tried = [tensor.detach() for tensor in both()], model.config._attn_implementation, 0
    watching = partial(attemper.watch, replace=True, full=way == "full")
    with (attemper.floor if way == "floor" else watching)(model) as watch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in places(request, 11):
            in_rounding(family, both(), expected)
            said.clear()
            if way in ("intercepted", "full"):
                watch.step()
                watch.record.notes.clear()
            if way == "off":
                watch.pause()
            plant = Plant(number)
            with planted(plant):
                found = both()
            if plant.place is None:
                break
            tried += 1
            in_rounding(family, found, expected)
            assert any("Planted: planted" in str(one.message) for one in said), plant.place
    assert tried
    assert model.config._attn_implementation == before


def test_an_error_where_a_tally_is_added_to_is_noted(monkeypatch):
    torch.manual_seed(SEED)
    model, x = attemper.MultiHeadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    attemper.instrument(model)
    call = partial(torch.compile(model, backend="aot_eager", fullgraph=True), x, need_weights=False)
    expected = call()[0].detach()
    for number in itertools.count(1):
        plant = Plant(number)
        with attemper.watch(model) as watch:
            call()
            watch.step()
            with planted(plant):
                found = call()[0]
            watch.step()
            call()
        assert torch.equal(found, expected), plant.place
        if plant.place is None:
            break
        assert any("Planted: planted" in note for note in watch.record.notes), plant.place
        assert {row["step"] for row in watch.record.to_dicts()} >= {0, 2}
    assert number > 2


def test_the_tests_of_attemper_see_its_errors(monkeypatch):
    monkeypatch.setenv("ATTEMPER_STRICT", "1")
    model, x = ROUTES["sdpa"](), torch.randn(2, 5, 16)
    before = state()
    for number in range(1, 400, 40):
        with pytest.raises(Planted), attemper.watch(model), planted(Plant(number)):
            model(x)
        assert state() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, ValueError])
@pytest.mark.parametrize("way", WATCHES)
def test_the_models_own_errors_pass(way, error):
    class Raises(Block):
        def forward(self, x):
            super().forward(x)
            raise error("of the model")

    model, x = nn.Sequential(Block(), Raises()), torch.randn(2, 5, 16)
    before = state()
    with pytest.raises(error, match="of the model"), attemper.watch(model, **WATCHES[way]):
        model(x)
    assert state() == before


def test_an_examiner_that_fails_takes_nothing_from_the_others():
    class Fails(Examiner):
        def look(self, call, vitals, rows):
            raise LookupError("of the examiner")

    class Sees(Examiner):
        def __init__(self):
            self.seen = []

        def keep(self, name, call, found):
            self.seen.append(name)

    sees = Sees()
    with attemper.watch(ROUTES["sdpa"](), examiners=[Fails(), sees]) as watch:
        watch.model(torch.randn(2, 5, 16))
    assert sees.seen == ["0", "1"] == watch.record.layers
    assert all("Fails found nothing: an error inside attemper, LookupError" in note for note in watch.record.notes)


def test_where_warnings_are_errors_every_watch_has_its_note(recwarn):
    class Nested(nn.Module):
        def forward(self, x):
            packed = torch.nested.nested_tensor([x[0], x[1, :3]])
            return torch.softmax(packed, -1).to_padded_tensor(0.0)

    model, x = nn.Sequential(Block(), Nested()), torch.randn(2, 5, 16)
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*nested tensors.*")
        with attemper.watch(model) as first, attemper.watch(model) as second:
            assert torch.equal(model(x), expected)
    assert first.record.notes == second.record.notes
    assert len(first.record.notes) == 1
    assert "inside attemper" not in first.record.notes[0]


def test_memory_that_is_not_enough_is_said():
    class Hungry(Examiner):
        def look(self, call, vitals, rows):
            raise MemoryError

    model = ROUTES["sdpa"]()
    with attemper.watch(model, examiners=[Hungry()]) as watch:
        model(torch.randn(2, 5, 16))
    assert all("there was not enough memory" in note for note in watch.record.notes)
    assert watch.record.notes
