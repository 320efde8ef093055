"""The experiments that train: their contract on tiny settings, and fairness between rules."""

import json
import math

import pytest
import torch

import attemper
from attemper import _files
from attemper.errors import InputError
from attemper_lab import NAMES, experiment
from attemper_lab.engine.experiment import pick
from attemper_lab.maths.stats import over_seeds
from attemper_lab.training import charlm, language, layers, loop, recall
from attemper_lab.training.runs import at_best, best_lr, end, fastest_lr, first_step, survived
from close import assert_float64, in_float32, in_float64

RULES = next(parameter.choices for parameter in experiment("recall").parameters if parameter.name == "rule")
TINY = {
    "recall": {"d": (16,), "steps": (3,), "seed": (0, 1), "batch": (4,), "lr": (1e-3,), "rule": RULES},
    "charlm": {"steps": (3,), "seed": (0, 1), "batch": (2,), "lr": (1e-3,), "length": (8,), "d_model": (16,)},
    "depth": {"steps": (3,), "seed": (0, 1), "batch": (2,), "layers": (1, 2), "length": (8,), "d_model": (16,)},
    "fold": {
        "steps": (3,),
        "seed": (0,),
        "batch": (4,),
        "lr": (1e-3,),
        "d": (16,),
        "optimizer": ("adam", "sgd", "adafactor"),
    },
    "transplant": {
        "steps": (3,),
        "seed": (0,),
        "batch": (2,),
        "kappa": (1.0, 1e3, 1e4),
        "length": (8,),
        "d_model": (16,),
    },
    "scores": {"steps": (3,), "seed": (0,), "batch": (4,), "d": (16, 32)},
}
LOGGED = {"step", "loss", "entropy", "effective_keys", "logit_std", "top_weight", "peak", "grad_q_rms", "grad_q_median"}


@pytest.fixture(scope="module")
def rows():
    return {name: experiment(name).run(**settings) for name, settings in TINY.items()}


@pytest.mark.parametrize("name", [name for name in NAMES if experiment(name).trains])
def test_a_run_logs_loss_and_vital_signs_and_has_a_figure(name, rows):
    pytest.importorskip("altair")
    from attemper_lab.engine import output

    subject = experiment(name)
    assert subject.trains
    assert set(rows[name][0]) >= LOGGED
    assert all(math.isfinite(row["loss"]) for row in rows[name])
    assert [row["step"] for row in rows[name]][:4] == [0, 1, 2, 3]
    chart = subject.chart(rows[name]).to_dict()
    assert " ".join(chart["title"]["text"]) == subject.finding(rows[name])
    drawn = json.dumps(chart)
    assert output.render(drawn, ".svg").startswith(b"<svg")
    assert isinstance(subject.verdict(rows[name]).agrees, bool)
    for axis in (
        "entropy, nats",
        "largest logit",
        "|dL/dq|",
        "held-out loss" if "held_out" in rows[name][0] else "loss, nats",
    ):
        assert f'"title": "{axis}"' in drawn


def _points(chart):
    """Every row of inline data under a chart that has a cost."""
    parts = chart.values() if isinstance(chart, dict) else chart if isinstance(chart, list) else ()
    found = [chart] if isinstance(chart, dict) and "cost" in chart else []
    return found + [point for part in parts for point in _points(part)]


def test_the_figure_of_the_language_model_shows_every_cell_of_its_title(rows):
    """The title speaks of initialisations and learning rates; curves are of the best rates alone."""
    pytest.importorskip("altair")
    wider = [{**row, "lr": lr} for row in rows["charlm"] for lr in (1e-3, 1e-2)]
    drawn = charlm.draw(wider, "").to_dict()
    for (_, lr), cost in charlm.cells(wider).items():
        shown = [point["cost"] for point in _points(drawn["vconcat"][0]) if point["lr"] == lr]
        assert any(one == in_float64(cost.mean) for one in shown)
    assert "before the end is measured on fewer windows" in " ".join(drawn["title"]["subtitle"])
    assert (
        "vconcat" in charlm.draw(pick(wider, rule="none"), "").to_dict()["hconcat"][0]
    )  # nothing to compare: curves alone


def test_the_full_preset_is_known():
    for name in TINY:
        assert experiment(name).settings(preset="full") != experiment(name).settings()


def test_runs_repeat(rows):
    again = experiment("recall").run(**{**TINY["recall"], "rule": ("sqrt_dk",)})
    assert again == pick(rows["recall"], rule="sqrt_dk")


def test_rules_share_data_and_initialisation():
    """Everything but the scale is the same: 1/√d_k and softcap differ in nothing while logits are small."""
    streams = [recall.generator("cpu", "x") for _ in range(2)]
    first, second = (recall.Recall(16, rule, stream) for rule, stream in zip(("none", "dk"), streams, strict=True))
    assert torch.equal(first.w_q, second.w_q)
    assert torch.equal(first.key, second.key)


def test_folding_is_the_same_function_at_step_0(rows):
    subject = experiment("fold").expect(rows["fold"])
    assert subject
    assert all(one.agrees for one in subject)


@pytest.mark.usefixtures("float64")
def test_projected_tables_are_projected_tokens():
    model = recall.Recall(8, "none", recall.generator("cpu", "x"))
    keys, values, asked, _ = recall._sequences(3, 4, recall.generator("cpu", "y"))
    tokens = (model.key[keys] + model.value[values]) / math.sqrt(2)  # (B, pairs, d)
    p = torch.softmax((model.key[asked] @ model.w_q)[:, None] @ (tokens @ model.w_k).transpose(1, 2), -1)
    expected = (p @ (tokens @ model.w_v))[:, 0] @ model.read
    assert_float64(model(keys, values, asked), expected)


def test_sequences_ask_for_a_key_that_is_there():
    keys, values, asked, answer = recall._sequences(50, 8, recall.generator("cpu", "z"))
    assert all(len(set(row.tolist())) == 8 for row in keys)
    place = (keys == asked[:, None]).int().argmax(-1)
    assert torch.equal(values[torch.arange(50), place], answer)


def test_the_text_is_hashed_into_every_row(rows):
    _, name = language.corpus()
    assert {row["text_sha256"] for row in rows["charlm"]} == {name}


def test_a_rule_is_judged_at_its_own_best_learning_rate():
    def run(rule, lr, seed, last, loss=1.0):
        return [
            {"rule": rule, "lr": lr, "seed": seed, "step": s, "accuracy": a, "loss": loss}
            for s, a in ((0, 0.0), (9, last))
        ]

    rows = run("a", 0.1, 0, 0.5) + run("a", 0.1, 1, 0.7) + run("a", 0.2, 0, 0.9) + run("a", 0.2, 1, 0.1, math.nan)
    assert best_lr(rows, "accuracy", True) == 0.1  # a run that diverged counts as the worst
    assert first_step(rows[:2], "accuracy", 0.5) == 9
    assert first_step(rows[:2], "accuracy", 0.6) == math.inf


def test_scores_cover_every_way_to_compare():
    q = torch.randn(1, 2, 3, 4)
    for name in (*RULES, *layers.OTHERS, "sqrt_dmodel", "layer"):
        assert layers.AttentionLayer(name, 2, 4)(q, q, q).shape == q.shape


def judged(name, scores, q, k, v, causal):
    """The same attention by attemper's own functions: what the layer must compute, and what must be seen of it."""
    if name == "additive":
        return attemper.additive_attention(q, k, v, scores.gain, causal=causal)
    if name == "cosine":
        return attemper.cosine_attention(q, k, v, scale=scores.gain, causal=causal)
    if name == "kappa":  # q and k at an RMS of √κ, divided by √d
        q, k = (math.sqrt(3.0) * x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
        return attemper.attention(q, k, v, causal=causal)
    rule = attemper.rule(name)
    scale = rule.scale(head_dim=q.shape[-1], heads=q.shape[1], layer=0, keys=k.shape[-2], gain=scores.gain)
    if rule.unit:
        return attemper.cosine_attention(q, k, v, scale=scale, causal=causal)
    return attemper.attention(q, k, v, scale=scale, softcap=rule.softcap, causal=causal)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*RULES, *layers.OTHERS])
def test_what_is_seen_of_a_layer_is_what_it_computes(name, causal):
    """Through `watch`, or for additive scores by the layer itself: signs and gradients against a direct computation."""
    stream = torch.Generator().manual_seed(0)
    q, k, v, upstream = torch.randn(4, 3, 2, 9, 8, generator=stream)
    scores = layers.AttentionLayer(name, 2, 8, kappa=3.0)
    q.requires_grad_()
    with loop.measured_heads(scores) as heads:
        output = scores(q, k, v, causal)
        (output * upstream).sum().backward()
    expected, vitals = judged(name, scores, q, k, v, causal)
    assert_float64(output, expected)
    found = loop.over_heads(heads)
    assert len(heads) == 2
    assert found["entropy"] == in_float64(vitals.entropy.mean().item())
    assert found["effective_keys"] == in_float64(vitals.effective_keys.mean().item())
    assert found["top_weight"] == in_float64(vitals.top_weight.mean().item())
    assert found["peak"] == in_float64(vitals.peak.max().item())
    assert found["logit_std"] == in_float64(vitals.variance.mean().sqrt().item())
    if name in (
        "sqrt_dk",
        "none",
        "dk",
        "softcap",
        "additive",
    ):  # where the query that was given is the one that enters
        size = q.grad.abs().movedim(1, 0).flatten(1)
        assert found["grad_q_rms"] == in_float64(size.square().mean().sqrt().item())
        assert found["grad_q_median"] == in_float64(size.median(-1).values.mean().item())
    assert found["grad_q_rms"] > 0


def test_a_layer_that_looked_at_itself_looks_no_longer():
    scores = layers.AttentionLayer("additive", 1, 4)
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="stop"), loop.measured_heads(scores):
        raise RuntimeError("stop")
    assert scores.measured is None
    assert not scores(q, q, q)._backward_hooks


def test_evaluation_is_not_in_the_signs(rows):
    """Recall's batch has 4 sequences and its evaluation 256: a peak over both would be the evaluation's."""
    first = pick(rows["recall"], rule="sqrt_dk", seed=0, step=0)[0]
    model = recall.Recall(16, "sqrt_dk", recall.generator("cpu", "recall", 16, 32, 0))
    keys, values, asked, _ = recall._sequences(4, 32, recall.generator("cpu", "recall data", 32, 0))
    with attemper.watch(model) as watch:
        model(keys, values, asked)
    assert first["peak"] == in_float32(watch.record.to_dicts()[0]["peak"], terms=16)


def test_of_equal_learning_rates_the_better_on_the_way_is_taken():
    def run(lr, middle):
        steps = ((0, 0.0), (5, middle), (9, 1.0))
        return [{"rule": "a", "lr": lr, "seed": 0, "step": s, "accuracy": a, "loss": 1.0} for s, a in steps]

    rows = run(0.1, 0.2) + run(0.2, 0.9)
    assert best_lr(rows, "accuracy", True) == 0.2
    assert {row["lr"] for row in at_best(rows, "rule", "accuracy", True)} == {0.2}


# each of these once was, or could be, wrong without any other test noticing


def model_of(score="sqrt_dk", **more):
    cell = {"d_model": 16, "heads": 2, "length": 8, "layers": 2, "init": "unit", **more}
    return language.LanguageModel(cell, score, recall.generator("cpu", "model"))


def test_the_language_model_does_not_see_the_future():
    model, tokens = model_of(), torch.arange(8)[None] * 7 % 128
    changed = tokens.clone()
    changed[0, 5] += 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_the_texts_do_not_overlap(monkeypatch):
    """Training, validation and held-out windows come from stretches of the text that have no character in common."""
    asked = {}
    draw = language.windows

    def spy(start, stop, count, length, stream):
        found = draw(start, stop, count, length, stream)
        stretch = language.corpus()[0][start:stop].unfold(0, length + 1, 1)
        assert (stretch == found[0]).all(-1).any()
        asked.setdefault((start, stop), 0)
        asked[start, stop] += count
        return found

    monkeypatch.setattr(language, "windows", spy)
    experiment("charlm").run(**{**TINY["charlm"], "seed": (0,), "rule": ("none",), "init": ("unit",), "text": (6000,)})
    ends = sorted(asked)
    assert ends == [(0, 6000), (language.TRAINING, language.VALIDATION), (language.VALIDATION, language.TEXT)]
    assert asked[ends[2]] >= 512
    assert len(language.corpus()[0]) == language.TEXT


@pytest.mark.usefixtures("float64")
def test_kappa_is_the_size_of_the_logits():
    """By hand: q and k at an RMS of √κ each, divided by √d; an aligned pair has a logit of κ √d."""
    q = torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(0)) * 5
    k = torch.cat([q, -q, torch.zeros_like(q) + 1e-9], 2)
    k[0, 0, 2, 0] = 1.0
    value = torch.eye(3)[None, None]
    kappa = 0.25
    p = layers.AttentionLayer("kappa", 1, 16, kappa=kappa)(q, k, value)[0, 0, 0]
    assert math.log(p[0] / p[1]) == in_float64(2 * kappa * math.sqrt(16))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_one_step_by_hand(name):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    gradient = torch.tensor([0.5, -4.0])
    optim = loop.optimizers(name)([weight], 0.1)
    weight.grad = gradient.clone()
    optim.step()
    moved = torch.tensor([1.0, -2.0]) - weight.detach()
    # Adam's first step has one size, but for the 1e-8 that keeps it from dividing by zero
    expected = 0.1 * gradient if name == "sgd" else 0.1 * gradient / (gradient.abs() + 1e-8)
    assert_float64(moved, expected)


def test_adafactor_steps_are_relative_to_the_weight():
    moves = []
    for size in (1.0, 10.0):
        weight = torch.nn.Parameter(torch.full((4, 4), size))
        weight.grad = torch.ones(4, 4)
        loop.optimizers("adafactor")([weight], 0.1).step()
        moves.append(float(size - weight.detach()[0, 0]))
    assert moves[1] == pytest.approx(10 * moves[0], rel=1e-3)


@pytest.mark.usefixtures("float64")
def test_signs_are_the_mean_over_layers():
    model, tokens = model_of(), torch.arange(8)[None] * 5 % 128
    with loop.measured_heads(model) as heads:
        model(tokens).sum().backward()
    found = loop.over_heads(heads)
    assert len(heads) == 4  # two layers of two heads
    of_layer = [sum(head["entropy"] for head in heads[place : place + 2]) / 2 for place in (0, 2)]
    assert of_layer[0] != in_float64(of_layer[1])
    assert found["entropy"] == in_float64(sum(of_layer) / 2)
    assert found["peak"] == max(head["peak"] for head in heads)


def test_a_model_without_attention_has_no_signs_and_sees_one_character():
    model, tokens = model_of(language.NO_ATTENTION), torch.arange(8)[None]
    with loop.measured_heads(model) as heads:
        before = model(tokens)
    assert math.isnan(loop.over_heads(heads)["entropy"])
    changed = tokens.clone()
    changed[0, 2] += 1
    different = (before != model(changed)).any(-1)[0]
    assert different.tolist() == [index == 2 for index in range(8)]


def test_the_last_row_has_the_loss_of_every_part(rows):
    last = pick(rows["charlm"], rule="none", init="unit", seed=0, step=3)[0]
    parts = [last[f"held_out_{index}"] for index in range(1, 9)]
    assert len(set(parts)) == 8
    assert sum(parts) / 8 == pytest.approx(last["held_out"], rel=0.1)


def test_speed_has_its_own_learning_rate():
    def run(lr, values):
        return [
            {"rule": "a", "d": 4, "lr": lr, "seed": 0, "step": s, "accuracy": 0.0, "validation": a, "loss": 1.0}
            for s, a in enumerate(values)
        ]

    rows = run(0.1, (0.0, 0.0, 0.95, 1.0)) + run(0.2, (0.0, 0.95, 0.95, 0.95))
    assert best_lr(rows, "accuracy", True) == 0.1  # the validation set chooses, not what is reported
    assert fastest_lr(rows, "accuracy", 0.9) == 0.2


@pytest.mark.parametrize(
    ("name", "option"),
    [("charlm", "layers"), ("depth", "steps"), ("transplant", "batch"), ("recall", "pairs"), ("fold", "d")],
)
def test_what_summaries_would_mix_takes_one_value(name, option):
    with pytest.raises(InputError, match=f"--{option} takes one value in one run.*Type --{option} 4, then run again"):
        experiment(name).settings({option: "4,8"})


@pytest.mark.parametrize("name", TINY)
def test_runs_that_diverge_are_counted_and_drawn(name):
    """A learning rate of 1e30 leaves no numbers; there is a sentence, a figure and a table all the same."""
    pytest.importorskip("altair")
    from attemper_lab.engine import output

    subject = experiment(name)
    few = {"seed": (0,), "lr": (1e30,), "steps": (6,), **({"optimizer": ("adam",)} if name == "fold" else {})}
    rows = subject.run(**{**TINY[name], **few})
    sentence = subject.finding(rows)
    assert "runs diverged" in sentence
    assert "nan" not in sentence
    assert "better than counting" not in sentence
    assert output.render(subject.chart(rows).to_json(), ".svg").startswith(b"<svg")
    json.loads(_files.json_text(output.document(subject, rows)), parse_constant=pytest.fail)


def test_a_seed_that_diverged_counts_as_the_worst():
    good, bad = ([{"seed": s, "step": 1, "loss": x, "held_out": x}] for s, x in ((0, 2.0), (1, math.nan)))
    assert end(bad, "held_out") == math.inf
    assert over_seeds("x", [end(run, "held_out") for run in (good, bad, bad)])["x"] == math.inf
    assert survived([*good, *bad], "seed") == "; 1 of 2 runs diverged"
