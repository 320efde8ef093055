"""Instrumented models: vitals are added up inside a compiled graph, and a watch reads them. No graph breaks or compiles again."""

import copy
import gc
import itertools
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import attemper
import zoo
from attemper.errors import InputError
from attemper.operation import call_hooks
from attemper.watch import Watch
from attemper.watch.compiled import reading
from close import in_float32
from judge import assert_as_exact
from native import native

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
LENGTH, REAL = 12, 9


@pytest.fixture(autouse=True)
def compile_anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def strict():
    """Compiling a second time is an error; a graph break is one by `fullgraph`."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def tiny(family):
    torch.manual_seed(0)
    subject = zoo.make(family)
    config = copy.deepcopy(subject.model.config)
    config.num_hidden_layers, config.use_cache = 1, False
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return type(subject.model)(config)


def batch():
    ids = torch.randint(3, 90, (2, LENGTH))
    keep = torch.ones(2, LENGTH, dtype=torch.long)
    keep[1, REAL:] = 0
    return {"input_ids": ids, "attention_mask": keep}


def loss_of(model, inputs):
    return model(**inputs)[0].square().mean()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_compiled_model_has_the_record_of_an_eager_one(family, strict):
    model, inputs = tiny(family), batch()
    with attemper.watch(model, replace=True) as expected:
        loss_of(model, inputs).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    keys = list(model.state_dict())
    instruments = attemper.instrument(model)
    assert instruments.layers == expected.record.layers
    assert list(model.state_dict()) == keys
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(action="error", category=UserWarning), attemper.watch(compiled, every=2) as watch:
        for step in range(5):
            loss_of(compiled, inputs).backward()
            if step == 0:
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    assert torch.equal(parameter.grad, gradient)
            watch.step()
    loss_of(compiled, inputs).backward()  # no watch is open
    with attemper.watch(model, replace=True) as again:
        loss_of(compiled, inputs).backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert watch.record.steps == [0, 2, 4]
    assert watch.record.notes == []
    rows = expected.record.to_dicts()
    assert {row["rows"] for row in rows} == {LENGTH + REAL}  # padding is left out
    for record in (watch.record.filter(steps=0), again.record):
        assert record.to_dicts() == rows
        assert record.info == expected.record.info
    assert [row | {"step": 0} for row in watch.record.filter(steps=4).to_dicts()] == rows
    instruments.remove()
    assert type(attemper.watch(model)) is Watch
    assert model.config._attn_implementation == "sdpa"


def test_an_unwatched_instrumented_model_computes_the_same():
    model, inputs = tiny("gpt2"), batch()
    del inputs["attention_mask"]  # of which the rows at the end are undefined
    model.eval()
    with torch.no_grad():
        before = model(**inputs)[0]
        attemper.instrument(model)
        exact = copy.deepcopy(model).double()(**inputs)[0]
        assert_as_exact("output", model(**inputs)[0], [before], exact)


class Encoder(nn.Module):
    """Two attentions: attemper's module, and a module that calls attemper.attention."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.self_attn = attemper.MultiHeadAttention(16, 2, batch_first=True, **options)
        self.own = Own()

    def forward(self, x, hidden=None):
        x = x + self.self_attn(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return x + self.own(x)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return attemper.attention(q, k, v, causal=True, signs=()).output.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("rule", ["sqrt_dk", "qk_norm"])
def test_models_built_on_attemper(rule, strict):
    model, x = Encoder(rule=rule), torch.randn(2, 10, 16)
    hidden = torch.zeros(2, 10, dtype=torch.bool)
    hidden[1, 7:] = True
    with attemper.watch(model) as expected:
        model(x, hidden).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    assert attemper.instrument(model).layers == ["self_attn", "own"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with attemper.watch(compiled) as watch:
        compiled(x, hidden).sum().backward()
        watch.step()
        compiled(x, hidden).sum().backward()
    assert [row["rows"] for row in expected.record.to_dicts()] == [17.0, 17.0, 20.0, 20.0, 20.0, 20.0]
    assert watch.record.filter(steps=0).to_dicts() == expected.record.to_dicts()
    assert watch.record.info == expected.record.info
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)


def test_what_was_compiled_before_is_compiled_again():
    model, x = Encoder().eval(), torch.randn(1, 4, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = compiled(x)
        instruments = attemper.instrument(model)
        with attemper.watch(compiled) as watch:
            assert torch.equal(compiled(x), expected)
        assert len(watch.record.to_dicts()) == 6
        instruments.remove()
        assert torch.equal(compiled(x), expected)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*_prims_common.check:FutureWarning")  # Inductor's own
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_by_inductor(family, strict):
    model, inputs = tiny(family), batch()
    with attemper.watch(model, replace=True) as expected:
        loss_of(model, inputs).backward()
    attemper.instrument(model)
    compiled = torch.compile(model, fullgraph=True)
    with attemper.watch(compiled, every=2) as watch:
        for _ in range(100):
            loss_of(compiled, inputs).backward()
            watch.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for record in (watch.record.filter(steps=0), watch.record.filter(steps=98)):
        for row, other in zip(record.to_dicts(), expected.record.to_dicts(), strict=True):
            found = {name: value for name, value in row.items() if name not in ("step", "saturated")}
            logit = abs(other["peak"])
            assert found == {
                name: in_float32(other[name], terms=LENGTH * zoo.WIDTH, size=1 + logit, logit=logit)
                if isinstance(other[name], float)
                else other[name]
                for name in found
            }


def test_calls_of_a_step_add_up_and_evaluation_does_not_count():
    model, inputs = tiny("llama"), batch()
    first, second = batch(), batch()
    with attemper.watch(model, replace=True) as expected:
        for inputs in (first, second):
            loss_of(model, inputs).backward()
    attemper.instrument(model)
    with attemper.watch(model) as watch:
        for inputs in (first, second):
            loss_of(model, inputs).backward()
        with torch.no_grad():
            model(**first)
        model.eval()(**first)
    assert watch.record.to_dicts() == expected.record.to_dicts()
    (note,) = watch.record.notes
    assert "passes='all'" in note
    with attemper.watch(model, passes="all", signs=["entropy", "visible"]) as every:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                model(**first)
    row = every.record.to_dicts()[0]
    assert row["rows"] == 2 * (LENGTH + REAL)
    assert not {"peak", "lse"} & set(row)
    with attemper.watch(model) as paused:
        model(**first)
        paused.pause()
        model(**second)
        paused.resume()
    assert paused.record.to_dicts()[0]["rows"] == LENGTH + REAL
    with attemper.watch(model, every=100, start=1) as nothing:
        model(**first)
    assert len(nothing.record) == 0


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.skipif(
    native is None or not native.bound,
    reason="needs the native kernel, and torch's table of DLPack; see `attemper env`",
)
def test_a_compiled_call_runs_no_python_of_ours(training, strict):
    model, inputs, entered = tiny("llama"), batch(), []
    package = str(Path(attemper.__file__).parent)
    attemper.instrument(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def see(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.append(frame.f_code.co_qualname)

    def step():
        with torch.set_grad_enabled(training):
            loss = loss_of(compiled, inputs)
        if training:
            loss.backward()

    for _ in range(2):  # the first call of its kind is described by Python
        step()
    with attemper.watch(compiled, passes="all") as watch:
        sys.setprofile(see)
        try:
            step()
        finally:
            sys.setprofile(None)
    assert not entered
    assert watch.record.to_dicts()[0]["rows"] == LENGTH + REAL


def test_checkpoints_are_counted_once(strict):
    model, inputs = tiny("llama"), batch()
    attemper.instrument(model)
    with attemper.watch(model) as expected:
        loss_of(model, inputs).backward()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with attemper.watch(model) as eager:
        loss_of(model, inputs).backward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with attemper.watch(compiled) as watch:
        loss_of(compiled, inputs).backward()
    assert eager.record.to_dicts() == watch.record.to_dicts() == expected.record.to_dicts()


def test_a_pass_that_raises_is_counted_as_far_as_it_came():
    """The graph has added its calls to the tally by then: docs/watch.md says so."""
    model, inputs = tiny("gpt2"), batch()
    attemper.instrument(model)

    def fail(module, args):
        raise torch.OutOfMemoryError("planted")

    with attemper.watch(model) as watch:
        handle = model.ln_f.register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            model(**inputs)
        handle.remove()
        model(**inputs)
    assert {row["rows"] for row in watch.record.to_dicts()} == {2.0 * (LENGTH + REAL)}


def test_two_forwards_before_one_backward(strict):
    """With checkpoints too: what a backward computes again must not depend on a tally, which the second forward changes."""
    model, inputs = tiny("llama"), batch()
    attemper.instrument(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            torch._dynamo.reset()
        model.zero_grad()
        with attemper.watch(compiled) as watch:
            (loss_of(compiled, inputs) + loss_of(compiled, inputs)).backward()
        assert {row["rows"] for row in watch.record.to_dicts()} == {2.0 * (LENGTH + REAL)}
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_an_exported_model_has_gradients():
    """Export looks through the autograd Function at its ops, which need a rule of their own."""
    model, x = attemper.MultiHeadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    model(x, need_weights=False)[0].sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    attemper.instrument(model)
    exported = torch.export.export(model, (x,), {"need_weights": False}).module()
    exported(x, need_weights=False)[0].sum().backward()
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_torch_func_differentiates_a_compiled_model():
    """Dynamo looks through the autograd Function at its op there."""
    torch.manual_seed(0)
    model, x = Own(), torch.randn(2, 6, 16)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    expected = torch.func.grad(loss)(parameters, x)
    attemper.instrument(model)
    with attemper.watch(model) as watch:
        found = torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)(parameters, x)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    assert {row["rows"] for row in watch.record.to_dicts()} == {12.0}


@pytest.mark.parametrize("options", [{"full": True}, {"gradients": True}], ids=str)
def test_watches_that_read_ops_measure_an_exported_model(options):
    torch.manual_seed(0)
    model, x = Own(), torch.randn(2, 6, 16)
    with attemper.watch(model) as expected:
        model(x)
    attemper.instrument(model)
    exported = torch.export.export(model, (x,)).module()
    with attemper.watch(exported, **options) as watch:
        exported(x).sum().backward()
    (note,) = watch.record.notes
    assert "a traced graph does not say which module makes a call" in note
    rows = expected.record.to_dicts()
    for row, other in zip(watch.record.to_dicts(), rows, strict=True):
        assert row["rows"] == other["rows"] == 12.0
        assert row["entropy"] == other["entropy"]


PLANS = [
    ["train", "train", "train"],
    ["train", "longer", "longer", "train"],
    ["train", "nograd", "nograd", "train"],
    ["nograd", "nograd", "train", "nograd"],
    ["eval", "eval", "train", "train", "eval"],
    ["part", "part", "train", "part"],
    ["train+nograd", "train+nograd", "nograd", "nograd"],
    ["part+nograd", "part+nograd", "train+train", "train+train", "train"],
]


@pytest.mark.parametrize("passes", ["training", "all"])
@pytest.mark.parametrize("plan", PLANS, ids=" ".join)
def test_a_step_like_the_one_before_counts_as_if_it_were_the_first(monkeypatch, plan, passes):
    """What counts of a step is kept for the next one, if that has the same calls."""

    def watched(keeps):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: attemper.MultiHeadAttention(8, 2, batch_first=True) for name in ("a", "b")})
        attemper.instrument(model)
        if not keeps:
            real = reading.Compiled.take_over

            def forgetting(source, found):
                source.chosen = None
                real(source, found)

            monkeypatch.setattr(reading.Compiled, "take_over", forgetting)
        with warnings.catch_warnings(action="ignore"), attemper.watch(model, passes=passes) as watch:
            for step in plan:
                for each in step.split("+"):
                    x = torch.randn(1, 5 if each == "longer" else 3, 8)
                    model.train(each != "eval")
                    with torch.set_grad_enabled(each != "nograd"):
                        for part in list(model.values())[: 1 if each == "part" else None]:
                            part(x, need_weights=False)
                watch.step()
        return watch.record.to_dicts(), watch.record.notes, watch.observer.passes.begun, watch.observer.passes.counted

    found = watched(keeps=True)
    expected = watched(keeps=False)
    assert repr(found) == repr(expected)
    assert found[0]


@pytest.mark.parametrize("every", [1, 2])
def test_pauses_and_steps_in_any_order_count_the_same_passes(every):
    """In an instrumented model, whose tallies go on adding, as in one that is followed."""

    def rows(model, plan):
        with warnings.catch_warnings(action="ignore"), attemper.watch(model, every=every) as watch:
            does = {"s": watch.step, "p": watch.pause, "r": watch.resume}
            for letter in plan:
                does.get(letter, lambda: model(x, need_weights=False))()
        return {row["step"]: row["rows"] for row in watch.record.to_dicts()}

    x, followed = torch.randn(1, 5, 8), attemper.MultiHeadAttention(8, 2, batch_first=True)
    instrumented = copy.deepcopy(followed)
    attemper.instrument(instrumented)
    for between in itertools.product("xprs", repeat=3):
        plan = "".join(("x", *between, "x"))
        assert rows(instrumented, plan) == rows(followed, plan), plan


def test_replace_instruments_a_compiled_model():
    model, inputs = tiny("gpt2").eval(), batch()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), warnings.catch_warnings(action="error", category=UserWarning):
        with attemper.watch(compiled, replace=True) as first:
            compiled(**inputs)
        graphs = counters["stats"]["unique_graphs"]
        with attemper.watch(compiled) as second:
            compiled(**inputs)
    assert counters["stats"]["unique_graphs"] == graphs
    assert first.record.to_dicts() == second.record.to_dicts() != []


def test_what_needs_ops_runs_eagerly_and_it_is_said():
    model, inputs = tiny("gpt2"), batch()
    attemper.instrument(model)
    compiled = torch.compile(model, backend="eager")
    with (
        pytest.warns(UserWarning, match="watched steps run eagerly"),
        attemper.watch(compiled, gradients=True) as watch,
    ):
        loss_of(compiled, inputs).backward()
    assert watch.record.to_dicts()[0]["grad_q_rms"] > 0


def test_errors_say_what_to_do():
    model, inputs = tiny("gpt2"), batch()
    attemper.instrument(model)
    with attemper.watch(model) as watch:
        with pytest.raises(InputError, match="another watch"), attemper.watch(model):
            pass
        with pytest.raises(InputError, match="attention mask"):
            watch.rows(torch.ones(2, LENGTH, dtype=torch.bool))
        model(**inputs)
    with pytest.raises(InputError, match="was not called inside the block"), attemper.watch(model):
        pass
    with pytest.raises(InputError, match="found no attention"):
        attemper.instrument(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module"):
        attemper.instrument(3)
    own = Own()
    own.num_heads = 2
    attemper.instrument(own)
    with pytest.raises(RuntimeError, match="num_heads"):  # Dynamo's, around ours
        torch.compile(own, backend="eager", fullgraph=True)(torch.randn(1, 3, 16))
    with pytest.raises(InputError, match="num_heads"):
        own(torch.randn(1, 3, 16))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.ours, self.plain = Own(), Plain()

    def forward(self, x):
        return self.ours(x) + self.plain(x)


class Plain(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_what_is_not_measured_is_said_and_copies_are_their_own():
    model = Mixed()
    with pytest.warns(UserWarning, match="plain will not be measured"):
        attemper.instrument(model)
    copied, x = copy.deepcopy(model), torch.randn(1, 5, 16)
    with attemper.watch(copied) as watch:
        model(x)
        copied(x)
        with pytest.raises(RuntimeError):
            copied(torch.randn(1, 5, 7))
        attemper.attention(*torch.randn(3, 1, 4, 5, 4))  # of no module, after an error in one
    assert [row["rows"] for row in watch.record.to_dicts()] == [5.0] * 4
    del watch
    gc.collect()


def test_a_watch_whose_instruments_were_removed_says_so():
    model = attemper.MultiHeadAttention(16, 2, batch_first=True)
    instruments = attemper.instrument(model)
    watch = attemper.watch(model)
    instruments.remove()
    with pytest.raises(InputError, match=r"is not any more\. Make another one with attemper\.watch\(model\)"), watch:
        pass


def test_a_module_that_runs_in_one_thread_takes_no_call_that_is_traced_in_another():
    target = call_hooks.TallyTarget(torch.zeros(3), False, "attemper", "self")
    traced = call_hooks.traced_tallying.targets
    call_hooks.begin_target(target)
    try:
        assert call_hooks.current_target() is target
        assert call_hooks.traced_tallying.targets is traced  # Dynamo reads what all threads share
    finally:
        call_hooks.end_target(target.tally)
    assert call_hooks.current_target() is None
