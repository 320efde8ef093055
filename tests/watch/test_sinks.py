"""Attention sinks that an attention function is given, as gpt-oss gives them, measured and computed like those beside scores."""

import pytest
import torch
import transformers
from transformers.models.gpt_oss import modeling_gpt_oss

import attemper
from attemper.watch.examine import examine, weights_of_rows
from close import assert_float64, assert_reordered, in_float64

LENGTH = 11


def gpt_oss(implementation="eager"):
    torch.manual_seed(1)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {
        "intermediate_size": 64,
        "vocab_size": 99,
        "max_position_embeddings": 64,
        "head_dim": 8,
        "sliding_window": 5,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope)
    model = transformers.GptOssModel(config).double()
    model.set_experts_implementation("eager")  # the other is not for float64
    for layer in model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    model.set_attn_implementation(implementation)
    return model.eval(), {"input_ids": torch.randint(3, 90, (2, LENGTH))}


@pytest.fixture
def foreign(monkeypatch):
    """A function whose ops show nothing: what it is given is measured."""

    def attend(module, query, key, value, mask, **options):
        with torch._C._DisableTorchDispatch():
            return modeling_gpt_oss.eager_attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "foreign", attend)
    masks = transformers.AttentionMaskInterface
    monkeypatch.setitem(masks._global_mapping, "foreign", masks._global_mapping["eager"])


def run(implementation="eager", **options):
    """The rows of a record, the output, and the gradients of all parameters."""
    model, inputs = gpt_oss(implementation)
    with attemper.watch(model, **options) as watch:
        output = model(**inputs).last_hidden_state
        output.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return watch.record, output, {name: grad for name, grad in grads.items() if grad is not None}


def assert_same_record(found, expected):
    for ours, theirs in zip(found.to_dicts(), expected.to_dicts(), strict=True):
        for name, value in theirs.items():
            if isinstance(value, float):
                assert ours[name] == in_float64(value), name
            elif name not in ("route", "score_peak"):
                assert ours[name] == value, name
    for place, info in expected.info.items():
        assert found.info[place].keys == info.keys == LENGTH + 1


def test_replaced_it_computes_and_measures_what_the_model_does():
    (record, output, grads), (expected, wanted, theirs) = run(replace=True), run()
    assert_float64(output, wanted)
    assert grads.keys() == theirs.keys()
    assert any("sinks" in name for name in grads)
    for name, grad in theirs.items():
        assert_float64(grads[name], grad, name)
    assert_same_record(record, expected)


def test_declared_it_is_measured_as_its_scores_show(foreign):
    found, expected = run("foreign")[0], run()[0]
    assert {info.route for info in found.info.values()} == {"interface"}
    assert_same_record(found, expected)


def test_an_examiner_sees_the_same_weights(foreign):
    class Looks:
        def __init__(self):
            self.found = []

        def look(self, call, vitals, rows):
            every = torch.arange(LENGTH)
            self.found.append((call.sink_columns, call.info.keys, weights_of_rows(call, vitals, every)))

        def keep(self, name, call, found):
            pass

    seen = []
    for implementation in ("foreign", "eager"):
        model, inputs = gpt_oss(implementation)
        looks = Looks()
        with torch.no_grad(), examine(model, [looks]):
            model(**inputs)
        seen.append(looks.found)
    for one, other in zip(*seen, strict=True):
        assert one[:2] == other[:2] == ((0, 1), LENGTH + 1)
        assert_reordered(one[2], other[2], LENGTH)


def test_a_floor_keeps_sinks():
    model, inputs = gpt_oss()
    expected = model(**inputs).last_hidden_state
    with attemper.floor(model):
        assert_float64(model(**inputs).last_hidden_state, expected)


def test_a_packed_batch_with_sinks_is_computed_document_by_document():
    model, inputs = gpt_oss()
    tokens, lengths = inputs["input_ids"][:1], (4, 0, 7)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    given["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        alone = [model(input_ids=part).last_hidden_state for part in tokens.split(lengths, 1) if part.numel()]
        with attemper.watch(model, replace=True) as watch:
            output = model(input_ids=tokens, **given).last_hidden_state
    assert_float64(output, torch.cat(alone, 1))
    assert {(info.batch, info.queries, info.keys) for info in watch.record.info.values()} == {(2, 7, 8)}
