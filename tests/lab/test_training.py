"""The experiments that train: their contract on tiny settings, fairness between rules, and verdicts that follow their rows."""

import copy
import json
import math

import pytest
import torch

import attemper
from attemper.lab import NAMES, charlm, claims, experiment, layers, recall, seen, training_verdicts
from attemper.lab.experiment import pick
from attemper.lab.training import best_lr, first_step
from attemper.lab.verdicts import CONDITION, FALSE, HOLDS

TINY = {
    "recall": {"d": (16,), "steps": (3,), "seed": (0, 1), "batch": (4,), "lr": (1e-3,), "rule": recall.RULES},
    "charlm": {"steps": (3,), "seed": (0, 1), "batch": (2,), "lr": (1e-3,), "length": (8,), "d_model": (16,)},
    "depth": {"steps": (3,), "seed": (0,), "batch": (2,), "layers": (1, 2), "length": (8,), "d_model": (16,)},
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


@pytest.mark.parametrize("name", TINY)
def test_a_run_logs_loss_and_vital_signs_and_has_a_figure(name, rows):
    pytest.importorskip("altair")
    from attemper import figures
    from attemper.lab import output

    found = experiment(name)
    assert found.trains
    assert set(rows[name][0]) >= LOGGED
    assert all(math.isfinite(row["loss"]) for row in rows[name])
    assert [row["step"] for row in rows[name]][:4] == [0, 1, 2, 3]
    chart = figures.chart(name, rows[name], found.finding(rows[name]))
    assert " ".join(chart.to_dict()["title"]["text"]) == found.finding(rows[name])
    assert output.render(chart.to_json(), ".svg").startswith(b"<svg")
    assert isinstance(found.verdict(rows[name]).agrees, bool)
    drawn = json.dumps(chart.to_dict())
    for axis in (
        "entropy, nats",
        "largest logit",
        "|dL/dq|",
        "held-out loss" if "held_out" in rows[name][0] else "loss, nats",
    ):
        assert f'"title": "{axis}"' in drawn


def test_every_training_experiment_is_here():
    assert set(TINY) == {name for name in NAMES if experiment(name).trains}


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
    found = experiment("fold").expect(rows["fold"])
    assert found
    assert all(one.agrees for one in found)


def test_projected_tables_are_projected_tokens():
    model = recall.Recall(8, "none", recall.generator("cpu", "x"))
    keys, values, asked, _ = recall._sequences(3, 4, recall.generator("cpu", "y"))
    tokens = (model.key[keys] + model.value[values]) / math.sqrt(2)  # (B, pairs, d)
    p = torch.softmax((model.key[asked] @ model.w_q)[:, None] @ (tokens @ model.w_k).transpose(1, 2), -1)
    expected = (p @ (tokens @ model.w_v))[:, 0] @ model.read
    torch.testing.assert_close(model(keys, values, asked), expected, rtol=1e-4, atol=1e-4)


def test_sequences_ask_for_a_key_that_is_there():
    keys, values, asked, answer = recall._sequences(50, 8, recall.generator("cpu", "z"))
    assert all(len(set(row.tolist())) == 8 for row in keys)
    place = (keys == asked[:, None]).int().argmax(-1)
    assert torch.equal(values[torch.arange(50), place], answer)


def test_the_text_is_hashed_into_every_row(rows):
    _, name = charlm.corpus()
    assert {row["text_sha256"] for row in rows["charlm"]} == {name}


def test_a_rule_is_judged_at_its_own_best_learning_rate():
    def run(rule, lr, seed, last, loss=1.0):
        return [
            {"rule": rule, "lr": lr, "seed": seed, "step": s, "accuracy": a, "loss": loss}
            for s, a in ((0, 0.0), (9, last))
        ]

    rows = run("a", 0.1, 0, 0.5) + run("a", 0.1, 1, 0.7) + run("a", 0.2, 0, 0.9) + run("a", 0.2, 1, 0.1, math.nan)
    assert best_lr(rows, "accuracy", True, rule="a") == 0.1  # a run that diverged counts as the worst
    assert first_step(rows[:2], "accuracy", 0.5) == 9
    assert first_step(rows[:2], "accuracy", 0.6) == math.inf


def evidence(bare=0.1, small=0.0, unit=0.1, deep=0.1, shallow=0.1):
    """Rows as three experiments would give them."""

    def recall_rows(rule, last):
        base = {"d": 256, "lr": 1e-3, "rule": rule, "loss": 1.0, "peak": 1.0, "entropy": 1.0, "w_q_grad": 1.0}
        return [{**base, "seed": s, "step": t, "accuracy": a} for s in range(3) for t, a in ((0, 0.0), (50, last))]

    def lm_rows(rule, init, layers, loss, early, train):
        base = {"lr": 1e-3, "rule": rule, "init": init, "layers": layers, "peak": 1.0}
        return [
            {**base, "seed": s, "step": t, "held_out": loss, "entropy": early, "loss": train}
            for s in range(3)
            for t in range(4)
        ]

    return {
        "recall": recall_rows("sqrt_dk", 1.0) + recall_rows("none", bare),
        "charlm": [
            *lm_rows("sqrt_dk", "small", 2, 2.0, 3.0, 1.9),
            *lm_rows("none", "small", 2, 2.0 + small, 3.0, 1.9),
            *lm_rows("sqrt_dk", "unit", 2, 2.0, 3.0, 1.9),
            *lm_rows("none", "unit", 2, 2.0 + unit, 1.0, 1.9 + unit),
        ],
        "depth": [
            *lm_rows("sqrt_dk", "unit", 1, 2.0, 3.0, 1.9),
            *lm_rows("none", "unit", 1, 2.0 + shallow, 1.0, 1.9),
            *lm_rows("sqrt_dk", "unit", 4, 2.0, 3.0, 1.9),
            *lm_rows("none", "unit", 4, 2.0 + deep, 1.0, 1.9),
        ],
    }


@pytest.mark.parametrize(
    ("judge", "changes", "verdict"),
    [
        (training_verdicts.falls_apart, {}, CONDITION),
        (training_verdicts.falls_apart, {"bare": 0.95}, FALSE),
        (training_verdicts.falls_apart, {"small": 0.2, "unit": 0.2}, CONDITION),
        (training_verdicts.falls_apart, {"small": 0.7, "unit": 0.8}, HOLDS),
        (training_verdicts.converges_faster, {}, CONDITION),
        (training_verdicts.converges_faster, {"bare": 1.0}, FALSE),
        (training_verdicts.converges_faster, {"small": 0.2}, HOLDS),
        (training_verdicts.commits_early, {}, FALSE),
        (training_verdicts.limits_depth, {"deep": 0.3}, HOLDS),
        (training_verdicts.limits_depth, {"deep": 0.1}, CONDITION),
        (training_verdicts.limits_depth, {"deep": 0.0}, FALSE),
    ],
)
def test_verdicts_follow_the_rows(judge, changes, verdict):
    assert judge(evidence(**changes)).verdict == verdict


def test_generalising_worse_is_seen():
    rows = copy.deepcopy(evidence())
    for row in pick(rows["charlm"], rule="none", init="unit"):
        row["held_out"] += 0.3
    assert training_verdicts.commits_early(rows).verdict == HOLDS


def test_claims_about_training_are_not_run_unless_asked():
    ids = {one.claim.id for one in claims.judge({}) if one.verdict == "not run" and "--train" in one.condition}
    assert ids >= {"C9", "C15", "C19", "C20"}
    judged = {one.claim.id: one.verdict for one in claims.judge(evidence())}
    assert {judged[name] for name in ("C9", "C15", "C19", "C20")} <= {HOLDS, CONDITION, FALSE}


def test_scores_cover_every_way_to_compare():
    q = torch.randn(1, 2, 3, 4)
    for name in (*recall.RULES, *layers.OTHERS, "sqrt_dmodel", "layer"):
        assert layers.Scores(name, 2, 4)(q, q, q).shape == q.shape


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*recall.RULES, *layers.OTHERS])
def test_what_is_seen_of_a_layer_is_what_it_computes(name, causal):
    """Through `watch`, or for additive scores by the layer itself: signs and gradients against a direct computation."""
    stream = torch.Generator().manual_seed(0)
    q, k, v, upstream = torch.randn(4, 3, 2, 9, 8, generator=stream)
    scores = layers.Scores(name, 2, 8, kappa=3.0)
    q.requires_grad_()
    with seen.looking(scores) as heads:
        output = scores(q, k, v, causal)
        (output * upstream).sum().backward()
    expected, vitals = judged(name, scores, q, k, v, causal)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    found = seen.folded(heads)
    assert len(heads) == 2
    assert found["entropy"] == pytest.approx(vitals.entropy.mean().item(), rel=1e-4)
    assert found["effective_keys"] == pytest.approx(vitals.effective_keys.mean().item(), rel=1e-4)
    assert found["top_weight"] == pytest.approx(vitals.top_weight.mean().item(), rel=1e-4)
    assert found["peak"] == pytest.approx(vitals.peak.max().item(), rel=1e-4)
    assert found["logit_std"] == pytest.approx(vitals.variance.mean().sqrt().item(), rel=1e-4)
    if name in (
        "sqrt_dk",
        "none",
        "dk",
        "softcap",
        "additive",
    ):  # where the query that was given is the one that enters
        size = q.grad.abs().movedim(1, 0).flatten(1)
        assert found["grad_q_rms"] == pytest.approx(size.square().mean().sqrt().item(), rel=1e-4)
        assert found["grad_q_median"] == pytest.approx(size.median(-1).values.mean().item(), rel=1e-4)
    assert found["grad_q_rms"] > 0


def test_a_layer_that_looked_at_itself_looks_no_longer():
    scores = layers.Scores("additive", 1, 4)
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="stop"), seen.looking(scores):
        raise RuntimeError("stop")
    assert scores.own is None
    assert not scores(q, q, q)._backward_hooks


def test_evaluation_is_not_in_the_signs(rows):
    """Recall's batch has 4 sequences and its evaluation 256: a peak over both would be the evaluation's."""
    first = pick(rows["recall"], rule="sqrt_dk", seed=0, step=0)[0]
    model = recall.Recall(16, "sqrt_dk", recall.generator("cpu", "recall", 16, 32, 0))
    keys, values, asked, _ = recall._sequences(4, 32, recall.generator("cpu", "recall data", 32, 0))
    with attemper.watch(model) as watch:
        model(keys, values, asked)
    assert first["peak"] == pytest.approx(watch.record.to_dicts()[0]["peak"], rel=1e-5)


def test_of_equal_learning_rates_the_better_on_the_way_is_taken():
    def run(lr, middle):
        steps = ((0, 0.0), (5, middle), (9, 1.0))
        return [{"rule": "a", "lr": lr, "seed": 0, "step": s, "accuracy": a, "loss": 1.0} for s, a in steps]

    rows = run(0.1, 0.2) + run(0.2, 0.9)
    assert best_lr(rows, "accuracy", True, rule="a") == 0.2
    theme = pytest.importorskip("attemper.figures.theme")
    assert theme.best_rates(rows, "rule", "accuracy") == {"a": 0.2}
