"""The claims about a real model's heads: their measures on cases worked out by hand, their verdicts, the missing extra."""

import math

import pytest
import torch

from attemper import cli, demo
from attemper_lab import experiment
from attemper_lab.claims import claims, judge_real_model
from attemper_lab.claims.judgement import CONDITION, FALSE, HOLDS, NOT_RUN
from attemper_lab.real_model.real_heads import ALMOST_ALL, almost_all
from attemper_lab.real_model.sentences import PAIRS, batch, chosen, loaded
from attemper_lab.real_model.subspaces import between_heads, distance, others, overlaps
from close import assert_float64, in_float32, in_float64
from flips import judged_by_id
from measured import GROUP

pytestmark = pytest.mark.xdist_group(GROUP)  # in one process: the model is loaded once


def test_both_sentences_of_a_pair_have_as_many_tokens():
    for pair in PAIRS:
        found = batch(pair, "cpu")
        assert found["attention_mask"].all()
        assert (found["input_ids"][0] != found["input_ids"][1]).sum() >= 3


def test_the_overlap_of_subspaces():
    """Heads that read the same directions in another basis, orthogonal ones, and two that share one of two directions."""
    same = torch.eye(4)[:2]
    turned = torch.tensor([[3.0, 1.0, 0, 0], [1.0, -2.0, 0, 0]])
    apart_from_it = 5 * torch.eye(4)[2:]
    half = torch.eye(4)[1:3]
    found = overlaps(torch.cat([same, turned, apart_from_it, half]), 4)
    expected = torch.tensor([[1, 1, 0, 0.5], [1, 1, 0, 0.5], [0, 0, 1, 0.5], [0.5, 0.5, 0.5, 1]], dtype=torch.float64)
    assert_float64(found, expected)
    assert others(found).tolist() == in_float64([0.5, 0.5, 1 / 6, 0.5])


def test_the_distance_of_weights():
    one, other = torch.eye(3), torch.eye(3).roll(1, 0)
    even = torch.full((3, 3), 1 / 3)
    assert distance(one, other) == 1.0
    assert distance(one, one) == 0.0
    assert distance(one, even).item() == in_float32(2 / 3, terms=3)
    matrix = between_heads(torch.stack([one, other, even]))
    assert matrix.tolist() == [in_float32(row, terms=3) for row in ([0, 1, 2 / 3], [1, 0, 2 / 3], [2 / 3, 2 / 3, 0])]


def test_the_weights_are_those_the_model_shows():
    """The distance between heads again, from the model's own eager attention."""
    model, _ = loaded("cpu")
    rows = experiment("subspaces").run(pairs=(1,))
    (pair,) = chosen({"pairs": 1, "seed": 0})
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            shown = model(**batch(pair, "cpu"), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    for row, weights in zip(rows, shown, strict=True):
        heads = weights.shape[1]
        apart_by = sum(
            (text[a] - text[b]).abs().sum(-1).mean() / 2 for text in weights for a in range(heads) for b in range(heads)
        )
        assert row["distance"] == pytest.approx(float(apart_by) / 2 / heads / (heads - 1), rel=1e-4)
        own = float((weights[0] - weights[1]).abs().sum(-1).mean() / 2)
        assert row["own_distance"] == pytest.approx(own, rel=1e-4)


def heads(bare, scaled):
    """Rows of ten heads, so many of which give one token almost all under each rule."""
    return [
        {"rule": rule, "d": 32, "top_weight": ALMOST_ALL + 0.05 if index < count else 0.5}
        for rule, count in (("none", bare), ("sqrt_dk", scaled))
        for index in range(10)
    ]


def trained(without, with_it):
    """Rows of language models: the mean top weight at each of their learning rates, without the scale and with it."""
    return [
        {"rule": rule, "init": "normal", "lr": 10.0**-at, "step": 400, "steps": 400, "top_weight": weight}
        for rule, weights in (("none", without), ("sqrt_dk", with_it))
        for at, weight in enumerate(weights)
    ]


@pytest.mark.parametrize(
    ("without", "with_it", "verdict"),
    [
        ((0.95, 0.99), (0.3, 0.4), HOLDS),
        ((0.95, 0.5), (0.3, 0.4), CONDITION),
        ((0.8, 0.5), (0.3, 0.4), FALSE),
        ((0.95, 0.99), (0.3, 0.95), FALSE),
    ],
)
@pytest.mark.parametrize("pretrained", [True, False])
def test_one_token_gets_all(without, with_it, verdict, pretrained):
    evidence = {"charlm": trained(without, with_it)}
    if pretrained:
        evidence["real_heads"] = heads(9, 1)
        assert almost_all(evidence["real_heads"], "none") == (9, 10)
    judged = judge_real_model.one_token_gets_all(evidence)
    assert judged.verdict == verdict
    assert all(math.isfinite(value) for value in judged.numbers.values())
    assert sum("MiniLM" in name for name in judged.context) == 2 * pretrained


@pytest.mark.parametrize(
    ("different", "overlap", "verdict"),
    [
        (1.0, 0.08, HOLDS),
        (1.0, 0.2, CONDITION),
        (0.8, 0.08, CONDITION),
        (0.4, 0.08, FALSE),
        (1.0, 0.6, FALSE),
    ],
)
def test_heads_differ(different, overlap, verdict):
    row = {"different": different, "overlap": overlap, "overlap_low": overlap - 0.005, "overlap_high": overlap + 0.005}
    row["overlap_reach"] = 0.01
    row |= {"chance": 1 / 12, "distance": 0.4, "own_distance": 0.1, "largest_overlap": 0.6}
    assert judge_real_model.heads_differ({"subspaces": [row]}).verdict == verdict


def test_the_seed_draws_the_sentences():
    subject = experiment("real_heads")
    one, same, other = (subject.run(rule=("none",), pairs=(2,), seed=(seed,)) for seed in (0, 0, 1))
    assert one == same
    assert [row["top_weight"] for row in one] != [row["top_weight"] for row in other]


@pytest.fixture
def without_demo(monkeypatch):
    loaded.cache_clear()
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    yield
    loaded.cache_clear()


def test_without_the_demo_package_they_are_not_run(without_demo, monkeypatch):
    wanted = {name: claims.EVIDENCE[name] for name in ("worked", "real_heads", "subspaces")}
    monkeypatch.setattr(claims, "EVIDENCE", wanted)
    told = []
    evidence = claims.gather(False, told.append)
    assert set(evidence) == {"worked", *claims.STORED}
    assert sum("pip install 'attemper[demo]'" in line for line in told) == 2
    judged = judged_by_id(evidence)
    assert judged["C18"].verdict == NOT_RUN
    assert "pip install 'attemper[demo]'" in judged["C18"].condition
    assert judged["C14"].verdict != NOT_RUN  # models that were trained before decide it
    assert not any("MiniLM" in name for name in judged["C14"].context)


def test_without_the_demo_package_run_says_the_pip_line(without_demo, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "real_heads"])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert "Type pip install 'attemper[demo]'." in " ".join(err.split())
    assert not out
