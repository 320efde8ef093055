"""attn_implementation="attemper" in models of transformers, judged by eager in float64; weights of chosen rows without eager."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
import transformers

import attemper
import zoo
from attemper.errors import InputError
from attemper.integrations import output_attentions, register_attention
from attemper.watch.routes import registered
from close import assert_float64, assert_reordered
from judge import assert_as_exact

NAME = register_attention()
pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def gpt_oss():
    """A sink in each head, and a window in every other layer."""
    options = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "num_local_experts": 2}
    return zoo.text(transformers.GptOssModel(zoo.config(transformers.GptOssConfig, **options, num_experts_per_tok=1)))


MODELS = {name: zoo.ZOO[name] for name in ("llama", "bert", "gpt2", "mistral", "gemma2", "gemma3", "t5", "opt", "vit")}
MODELS |= {"whisper": zoo.ZOO["whisper"], "gpt_oss": gpt_oss}
HANDED_ON = set(MODELS) - {"gpt2", "opt"}
"""Models that tell their attention functions of ``output_attentions=True``."""


@contextmanager
def softmax_in_its_own_dtype():
    """In a model of float64 too, transformers' eager attention computes its softmax in float32; a row of padding is NaN there."""
    softmax = F.softmax
    F.softmax = lambda logits, dim=None, dtype=None, **rest: softmax(logits, dim=dim, **rest)
    try:
        yield
    finally:
        F.softmax = softmax


def make(name, implementation, dtype=torch.float32):
    """A model with random weights, the same for all implementations and dtypes."""
    torch.manual_seed(0)
    subject = MODELS[name]()
    config = copy.deepcopy(subject.model.config)
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # others have no float64
    model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
    model.load_state_dict(subject.model.state_dict())
    subject.model = model.eval()
    return zoo.in_float64(subject) if dtype == torch.float64 else subject


def results(subject, **options):
    """Outputs of real tokens, all gradients in one vector, and the weights that the model shows."""
    with softmax_in_its_own_dtype():
        shown = subject.model(**subject.inputs, **options)
    keep = subject.keep if subject.targets is None else subject.targets
    output = shown[0] if keep is None else shown[0][keep]
    parameters = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((output * cotangent).sum(), parameters, allow_unused=True)
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    weights = [one for name in names for one in (getattr(shown, name, None) or ())]
    return output, torch.cat([gradient.flatten() for gradient in found if gradient is not None]), weights


def assert_weights(ours, plain, exact):
    """By what a rounding of the largest logit moves, too; of eager, a row of padding that sees no key looks at all."""
    rows = ours.sum(-1) > 0
    exact = exact.detach()[rows]
    spread = -exact[exact > 0].log().min().item()
    assert_as_exact("weights", ours[rows], [plain[rows]], exact, spread * exact.square().mean().sqrt().item())


@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_weights_are_those_of_eager(name):
    found, eager = (results(make(name, way), output_attentions=True) for way in (NAME, "eager"))
    exact = results(make(name, "eager", torch.float64), output_attentions=True)
    for what, ours, plain, true in zip(("output", "gradients"), found, eager, exact, strict=False):
        assert_as_exact(what, ours, [plain], true)
    assert len(found[2]) == len(eager[2]) * (name in HANDED_ON)
    for ours, plain, true in zip(found[2], eager[2], exact[2], strict=False):
        assert_weights(ours.detach(), plain, true)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_attends_by_attemper_and_is_measured(name):
    subject, eager = make(name, NAME), make(name, "eager")
    with torch.no_grad():
        expected = subject.run()
        with attemper.watch(subject.model) as watch:
            for _ in range(2):
                assert torch.equal(subject.run(), expected)
                watch.step()
        with attemper.watch(subject.model, replace=True) as replaced:
            assert torch.equal(subject.run(), expected)
        with attemper.watch(eager.model) as other:
            eager.run()
    assert subject.model.config._attn_implementation == NAME
    for record, route in ((watch.record, "attemper"), (replaced.record, "replaced")):
        assert record.notes == []
        assert record.layers == other.record.layers
        assert {(info.route, info.implementation) for info in record.info.values()} == {(route, NAME)}
    first, second, own = (
        torch.tensor([row["entropy"] for row in record.filter(steps=0).to_dicts()], dtype=torch.float32)
        for record in (watch.record, replaced.record, other.record)
    )
    assert_reordered(first, second, 64)
    assert_as_exact("entropy", first, [own], first.double())


def test_a_model_is_switched_and_back():
    subject = zoo.make("llama")
    expected = subject.run()
    subject.model.set_attn_implementation(NAME)
    with attemper.watch(subject.model) as watch:
        subject.run()
    assert {info.implementation for info in watch.record.info.values()} == {NAME}
    subject.model.set_attn_implementation("sdpa")
    assert torch.equal(subject.run(), expected)


def causal(name, implementation, dtype=torch.float64):
    """A model that generates."""
    torch.manual_seed(0)
    options = {"num_key_value_heads": 2, "sliding_window": 6} if name == "Mistral" else {}
    config = zoo.config(getattr(transformers, f"{name}Config"), **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.to(dtype).eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2"])
def test_tokens_are_generated_as_by_eager(name, cache):
    tokens, options = torch.randint(3, 99, (2, 9)), {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    padded = torch.ones(2, 9, dtype=torch.long)
    padded[0, :4] = 0
    options |= {"attention_mask": padded, "return_dict_in_generate": True, "output_logits": True}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    ways = ((NAME, torch.float64), ("eager", torch.float64), ("eager", torch.float32))
    with softmax_in_its_own_dtype():
        found, expected, plain = (causal(name, *way).generate(tokens, **options) for way in ways)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, true, theirs in zip(found.logits, expected.logits, plain.logits, strict=True):
        assert_as_exact("logits", ours.float(), [theirs], true)


def test_a_static_cache_that_is_filled_slices_the_position_bias_too():
    inputs = {"input_ids": zoo.tokens(5), "decoder_input_ids": zoo.tokens(4), "use_cache": True}
    found = {}
    for implementation in (NAME, "sdpa"):
        torch.manual_seed(0)
        model = zoo.t5().model.double().eval()
        model.set_attn_implementation(implementation)
        caches = [transformers.StaticCache(config=model.config, max_cache_len=size) for size in (8, 5)]
        cache = transformers.EncoderDecoderCache(*caches)
        with torch.no_grad():
            found[implementation] = model(**inputs, past_key_values=cache)[0]
    assert_float64(found[NAME], found["sdpa"])


@pytest.mark.parametrize("offsets", [True, False])
def test_packed_sequences_stay_apart(offsets):
    """By their offsets, or by positions that restart, of which transformers makes a mask."""
    model = causal("Llama", NAME)
    parts = [torch.randint(3, 99, (1, length)) for length in (3, 6, 2)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=offsets)
    batch = collate([{"input_ids": part[0].tolist()} for part in parts])
    assert ("cu_seq_lens_q" in batch) == offsets
    labels = batch.pop("labels")
    with torch.no_grad():
        found = model(**batch, use_cache=False).logits
        alone = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    assert labels.shape == found.shape[:2]
    assert_as_exact("logits", found.float(), [alone.float()], alone)


def test_dropout_is_that_of_the_operation():
    """One layer draws one seed for its call; with the same seed the operation itself drops the same weights."""
    config = zoo.config(
        transformers.LlamaConfig, drop=("num_hidden_layers",), num_hidden_layers=1, attention_dropout=0.5
    )
    model = transformers.AutoModel.from_config(config, attn_implementation=NAME).train()
    layer, inner, tokens = model.layers[0].self_attn, [], zoo.tokens()
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: inner.append(inputs[0]))
    found = {}
    for implementation in (NAME, "sdpa"):
        model.set_attn_implementation(implementation)
        with attemper.watch(model, examiners=[Calls(found.setdefault(implementation, []))]):
            torch.manual_seed(5)
            model(tokens)[0].sum().backward()
    call = found[NAME][0]
    torch.manual_seed(5)
    expected = attemper.sdpa(call.query, call.key, call.value, dropout_p=0.5, is_causal=True, scale=layer.scaling)
    assert torch.equal(inner[0].unflatten(-1, (zoo.HEADS, -1)).transpose(1, 2), expected)
    assert not torch.equal(inner[0], inner[1])
    assert layer.q_proj.weight.grad.abs().sum() > 0


class Calls:
    """An examiner that keeps the calls."""

    def __init__(self, calls):
        self.calls = calls

    def look(self, call, vitals, rows):
        self.calls.append(call)

    def keep(self, name, call, found):
        pass


@pytest.mark.parametrize(
    "name", ["opt", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama", "gemma2", "gpt_oss"))]
)
def test_a_graph_is_compiled_once_and_whole(name):
    """Whatever else is replaced meanwhile."""
    subject, other = make(name, NAME), zoo.make("gpt2")
    expected, exact = subject.run(), make(name, "eager", torch.float64).run()
    compiled = torch.compile(subject.model, backend="eager" if name == "opt" else "aot_eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(**subject.inputs)[0]
        with torch.compiler.set_stance("fail_on_recompile"):
            for place in (attemper.watch(other.model, replace=True), attemper.floor(other.model)):
                with place:
                    other.run()
                    assert torch.equal(compiled(**subject.inputs)[0], found)
    keep = subject.keep
    assert_as_exact("output", found[keep], [expected[keep]], exact[keep])


def test_its_tallies_are_read():
    subject = make("llama", NAME)
    with torch.no_grad():
        with attemper.watch(subject.model) as watch:
            subject.run()
        instruments = attemper.instrument(subject.model)
        with attemper.watch(subject.model) as tallied:
            subject.run()
        instruments.remove()
    assert subject.model.config._attn_implementation == NAME
    places = [[(row["layer"], row["head"], row["rows"]) for row in one.record.to_dicts()] for one in (watch, tallied)]
    assert places[0] == places[1]


def test_a_floor_is_put_under_it():
    subject = make("gpt2", NAME)
    with attemper.floor(subject.model.train(), floor=0.9) as floor:
        subject.run().square().sum().backward()
    assert floor.calls == 2


def test_what_it_cannot_compute_is_refused_with_a_way_out():
    layer, query = make("llama", NAME).model.layers[0].self_attn, torch.randn(1, 2, 5, 8)
    attend = transformers.AttentionInterface._global_mapping[NAME]
    says = r"^attn_implementation='attemper' cannot compute LlamaAttention with a paged cache\. Use attn_implementation='sdpa'"
    with pytest.raises(InputError, match=says):
        attend(layer, query, query, query, None, cache=object())


def test_an_error_of_attempers_own_does_not_end_a_training(monkeypatch):
    subject = make("llama", NAME)
    expected = make("llama", "sdpa").run()

    def broken(*args, **options):
        raise RuntimeError("planted")

    monkeypatch.setenv("ATTEMPER_STRICT", "0")
    monkeypatch.setattr(registered, "attend_by_attemper", broken)
    with pytest.warns(UserWarning, match="LlamaAttention: .*planted.*transformers' own attention runs"):
        assert torch.equal(subject.run(), expected)


PAIRS = [(name, way) for name in ("llama", "gpt2", "t5", "gpt_oss") for way in (NAME, "sdpa", "eager")]


@pytest.mark.parametrize(("name", "implementation"), [pair for pair in PAIRS if pair != ("gpt_oss", "sdpa")])
def test_weights_of_chosen_rows_of_chosen_layers(name, implementation):
    subject, eager = (make(name, way) for way in (implementation, "eager"))
    exact = results(make(name, "eager", torch.float64), output_attentions=True)[2]
    with torch.no_grad():
        plain, expected = results_of_weights(eager), subject.run()
        with output_attentions(subject.model) as every:
            assert torch.equal(subject.run(), expected)
        layer = list(every)[-1]
        with output_attentions(subject.model, layers=[layer], rows=[0, -1]) as some:
            assert torch.equal(subject.run(), expected)
    assert list(some) == [layer]
    order = ORDER.get(name, range(len(exact)))
    ends = [(some[layer][0], *(of[order[-1]][:, :, [0, -1]] for of in (plain, exact)))]
    of_all = zip(
        (calls[0] for calls in every.values()), *([of[n] for n in order] for of in (plain, exact)), strict=True
    )
    for ours, theirs, true in (*of_all, *ends):
        assert_weights(ours, theirs, true)


def results_of_weights(subject):
    with torch.enable_grad():
        return results(subject, output_attentions=True)[2]


ORDER = {"t5": [0, 1, 2, 4, 3, 5]}
"""transformers shows weights by their kind; layers run one after the other."""


def test_weights_while_tokens_are_generated():
    model, tokens = causal("Llama", NAME), torch.randint(3, 99, (1, 7))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with output_attentions(model, layers="model.layers.1", rows=-1) as weights:
        model.generate(tokens, **options)
    assert {name: [tuple(call.shape) for call in calls] for name, calls in weights.items()} == {
        "model.layers.1.self_attn": [(1, 4, 1, keys) for keys in (7, 8, 9, 10)]
    }
    for one in weights["model.layers.1.self_attn"]:
        assert_reordered(one.sum(-1), torch.ones(1, 4, 1), one.shape[-1])


def test_weights_of_each_document():
    model = causal("Llama", NAME)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": torch.randint(3, 99, (length,)).tolist()} for length in (3, 6)])
    batch.pop("labels")
    with output_attentions(model, rows=[-1]) as weights:
        model(**batch, use_cache=False)
    assert [tuple(weight.shape) for weight in weights["model.layers.0.self_attn"]] == [(1, 4, 1, 3), (1, 4, 1, 6)]


def test_rows_and_layers_that_are_not_there_are_said():
    model, x = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), torch.randn(1, 5, 16)
    with pytest.raises(InputError, match=r"`layers` must be names of modules of the model; got 'attn'\. Did you mean"):
        output_attentions(model, layers="attn")
    with pytest.raises(InputError, match=r"`rows` must be whole numbers, such as \[0, -1\]; got \[0\.5\]"):
        output_attentions(model, rows=[0.5])
    for options in ({"rows": [7]}, {"layers": "linear1"}):
        with (
            pytest.raises(InputError, match=r"gave no weights: .* had the rows"),
            output_attentions(model, **options),
        ):
            model(x)
