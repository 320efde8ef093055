"""The claims C24 to C36, judged from rows: each number can turn its verdict; and docs/notes.md, which they are shown on."""

import re
from pathlib import Path

import pytest
import torch

from attemper_lab import experiment
from attemper_lab.claims import claims
from attemper_lab.claims.judgement import CONDITION, FALSE, HOLDS, NOT_RUN, UNDECIDED
from attemper_lab.details import head_dims, similarity, three_scores
from attemper_lab.notes import sentences
from attemper_lab.real_model import antecedent
from attemper_lab.real_model.pronouns import PRONOUN_PAIRS
from attemper_lab.real_model.sentences import loaded
from close import in_float32, in_float64, printed
from flips import assert_turns, judged_by_id, names_by_verdict, times
from measured import GROUP
from research import notes, reading

pytestmark = pytest.mark.xdist_group(GROUP)  # in one process: the evidence is gathered once

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "notes.md").read_text(encoding="utf-8")
OWN = [claim.id for claim in claims.NOTE_CLAIMS]


@pytest.fixture
def judged(evidence):
    return {name: judgement for name, judgement in judged_by_id(evidence).items() if name in OWN}


# as in test_claims.py: claim → the beginning of a number's name → what to change first, what then, the verdict that follows
FLIPS = {
    "C24": {
        "heads of 72": ([], [("antecedent", {}, {"p": 1.0})], FALSE),
        "share of the pairs": ([], [("antecedent", {"layer": 3, "head": 1}, {"right": 0.95})], HOLDS),
        "share that the best": ([], [("antecedent", {}, {"right_by_chance": 0.8})], FALSE),
    },
    "C25": {"heads of 72": ([], [("own_key", {}, {"own_weight": 0.0})], HOLDS)},
    "C26": {
        **{
            f"std of the logits after dividing by √d_model, {heads} head": (
                [("by_heads", {}, {"logit_std": 0.5})],
                [("by_heads", {"heads": heads}, {"logit_std": 2.0})],
                HOLDS,
            )
            for heads in (1, 2, 8, 96)
        },
        **{
            f"std of the logits after dividing by √d_model, W of std 0.02 at width 12288, {heads}": (
                [],
                [("by_heads_fixed", {"d": 12288 // heads}, {"logit_variance": float(heads)})],
                FALSE,
            )
            for heads in (12, 96)
        },
    },
    "C27": {
        "growth of the logits' variance": (
            [],
            [("width", {"init": "fan_in", "d_model": 4096}, times(3, "logit_variance"))],
            FALSE,
        ),
        "growth from the narrow": ([], [("width", {"init": "fixed"}, {"logit_variance": 1.0})], HOLDS),
    },
    "C28": {
        f"lower end of how many times as fast with the scale, {name}": (
            [("scale_cost", {}, {"speed_low": 1.5}), ("scale_cost", {"way": way}, {"speed_low": 0.9, "speed_high": 1.0})],
            [("scale_cost", {"way": way}, {"speed_low": 1.4})],
            HOLDS,
        )
        for way, name in (("attemper", "attemper's kernel"), ("eager", "three lines of torch"))
    }
    | {
        f"upper end of how many times as fast with the scale, {name}": (
            [("scale_cost", {}, {"speed_low": 0.9, "speed_high": 1.0})],
            [("scale_cost", {"way": way}, {"speed_high": 1.4})],
            UNDECIDED,
        )
        for way, name in (("attemper", "attemper's kernel"), ("eager", "three lines of torch"))
    },
    "C29": {
        "smallest std": ([], [("match", {"d": 16}, {"logit_std": 0.5})], FALSE),
        "largest std": ([], [("match", {"d": 512}, {"logit_std": 2.0})], FALSE),
        "weight of a key equal to q among 1024, d_k = 16": ([], [("match", {"d": 16}, {"aligned_weight": 0.99})], HOLDS),
        "weight of a key equal to q among 1024, d_k = 512": ([], [("match", {"d": 512}, {"aligned_weight": 0.1})], HOLDS),
    },
    "C30": {
        "std of the logits after": ([], [("inits", {"init": "fan_in"}, {"scaled_variance": 4.0})], FALSE),
        "heads of 72": ([], [("real_heads", {"rule": "sqrt_dk"}, {"variance": 1.0})], HOLDS),
    },
    "C31": {
        f"share of 66 model families drawn from transformers with d_k = {size}": ([], [("head_dims", {}, {"head_dim": 7})], FALSE)
        for size in (64, 128)
    }
    | {
        "share of 66 model families drawn from transformers with d_k = 512": (
            [],
            [("head_dims", {}, {"head_dim": lambda row: 512 if row["family"][0] in "ab" else row["head_dim"]})],
            HOLDS,
        )
    },
    "C32": {
        "share of draws of 9 scores": ([], [("ranges", {"scores": 9}, {"as_said": 0.0})], FALSE),
        "share of such draws of 1024": (
            [("ranges", {"scores": 9}, {"as_said": 0.5})],
            [("ranges", {"scores": 1024}, {"as_said": 0.5})],
            HOLDS,
        ),
    },
    "C33": {"operations in matrix products": ([], [("three_scores", {"score": "additive"}, {"product_flops": 0})], HOLDS)},
    "C34": {
        f"largest rise of the loss above its lowest, in first losses, {name}, {which}": (
            [(source, {}, {"worst_rise": 0.2})],
            [(source, {"gap": gap}, {"worst_rise": rise})],
            CONDITION,
        )
        for name, source in (("SGD", "plateau"), ("Adam", "plateau_adam"))
        for which, gap, rise in (("smallest", 8.0, 0.5), ("largest", 2.0, 0.1))
    },
    "C35": {
        "effective keys of 256": ([], [("three_scores", {"score": "additive"}, {"effective_keys": 2.0})], FALSE),
        "effective keys, dot product without": ([], [("three_scores", {"score": "dot"}, {"effective_keys": 150.0})], FALSE),
        "effective keys, dot product with 1/√d": ([], [("three_scores", {"score": "scaled"}, {"effective_keys": 2.0})], FALSE),
        "how many times as long": ([], [("additive_cost", {}, {"factor_low": 0.8})], FALSE),
    },
    "C36": {
        "share of queries": ([], [("similarity", {}, {"same_key": 0.3})], FALSE),
        "how many times as often": (
            [("similarity", {}, {"same_key": 1.0})],
            [("similarity", {}, {"longer_wins": lambda row: row["first_wins"]})],
            HOLDS,
        ),
    },
}  # fmt: skip


def test_what_is_measured_here(judged):
    """The verdicts of this code, so that a change of one shows."""
    names = names_by_verdict(judged)
    assert list(judged) == [f"C{number}" for number in range(24, 37)]
    assert names[FALSE] - {"C28"} == {"C25", "C33", "C34"}
    assert names[HOLDS] == {"C35"}  # not C28, whose times are those of a machine that may be busy
    assert all(judgement.condition for judgement in judged.values())


@pytest.mark.parametrize(("name", "number"), [(name, number) for name, flips in FLIPS.items() for number in flips])
def test_every_number_of_a_claim_can_turn_it(name, number, evidence):
    assert_turns(name, number, FLIPS[name][number], evidence)


def test_no_number_is_for_show(judged):
    for name, judgement in judged.items():
        numbers = set(judgement.numbers)
        assert {number for number in numbers if number.startswith(tuple(FLIPS[name]))} == numbers, name


def test_the_pairs_differ_in_one_token_and_name_both_nouns():
    _, tokenizer = loaded("cpu")
    assert {by: len(pairs) for by, pairs in PRONOUN_PAIRS.items()} == {"meaning": 48, "agreement": 24}
    for pair in (pair for pairs in PRONOUN_PAIRS.values() for pair in pairs):
        words = [tokenizer.tokenize(text) for text in pair.texts]
        pronoun, nouns = antecedent.positions(pair, *words)
        assert words[0][pronoun] in ("it", "he", "she")
        assert [words[0].count(noun) for noun in pair[1:3]] == [1, 1]
        assert nouns[0] < nouns[1] < pronoun
    assert len({pair.texts for pair in PRONOUN_PAIRS["meaning"]}) == 48


def test_the_weights_are_those_the_model_shows():
    """In float64, and without the scale too, in the first layer: it reads the same embeddings under every rule."""
    model, tokenizer = loaded("cpu")
    pair = PRONOUN_PAIRS["meaning"][0]
    before = model.config._attn_implementation
    try:
        model.double()
        own, others = antecedent.looks((pair,), "sqrt_dk", "pronoun", "cpu")
        bare, _ = antecedent.looks((pair,), "none", "pronoun", "cpu")
        model.set_attn_implementation("eager")
        with torch.no_grad():
            shown = model(**tokenizer(list(pair.texts), return_tensors="pt"), output_attentions=True).attentions
    finally:
        model.float().set_attn_implementation(before)
    query, nouns, rest = 7, [2, 5], [1, 3, 4, 8, 9, 10]  # [CLS] the dog chased the ball because it was fast . [SEP]

    def same(found, expected):
        return found.flatten().tolist() == in_float32(expected.transpose(0, 1).flatten().tolist(), terms=2, size=1.0)

    for layer, weights in enumerate(shown):  # (sentence, head, n, n)
        heads = slice(12 * layer, 12 * layer + 12)
        assert same(own[0, heads], weights[:, :, query][..., nouns])
        assert same(others[0, heads], weights[:, :, rest][..., nouns].mean(2))
    logits = shown[0][:, :, query].log() * 32**0.5
    assert same(bare[0, :12], logits.softmax(-1)[..., nouns])


def test_a_planted_head_is_found_and_chance_is_not():
    """One of 72 heads follows the antecedent in most pairs; without it, what is left is found in about 1 of 20 draws."""
    stream = torch.Generator().manual_seed(3)
    alarms = 0
    for _ in range(60):
        values = torch.randn(48, 72, generator=stream, dtype=torch.float64)
        signs = torch.randint(0, 2, (999, 48), generator=stream).double() * 2 - 1
        alarms += bool((antecedent.corrected(values, signs)[1] < antecedent.LEVEL).any())
        values[:, 31] += 1.0
        t, p, _ = antecedent.corrected(values, signs)
        assert p[31] < 0.01
        assert t[31].item() == in_float64((values[:, 31].mean() / (values[:, 31].std() / 48**0.5)).item())
    assert alarms <= 9  # of 60 at 1 in 20: more than 9 once in a thousand


def test_the_head_of_the_showpiece_is_not_the_one_that_follows(evidence):
    """Layer 5 head 11 gives "dog" most of all heads; nothing says that it knows why."""
    rows = [row for row in evidence["antecedent"] if row["rule"] == "sqrt_dk"]
    (showpiece,) = [row for row in rows if (row["layer"], row["head"]) == (5, 11)]
    assert showpiece["p"] > 0.1
    assert showpiece["weight"] - showpiece["weight_of_others"] < 0.1
    best = max(rows, key=lambda row: row["t"])
    assert (best["layer"], best["head"]) == (3, 1)
    assert best["p"] < 0.01


def test_head_dims_of_configs_made_by_hand():
    class Config:
        def __init__(self, **known):
            vars(self).update(known)

    def broken():
        raise ValueError

    made = {
        "said": lambda: Config(head_dim=256, hidden_size=8, num_attention_heads=2),
        "divided": lambda: Config(d_model=512, encoder_attention_heads=8),
        "no heads": lambda: Config(hidden_size=8),
        "broken": broken,
    }
    assert [head_dims.head_dim(made, name) for name in made] == [256, 64, None, None]


def test_the_correlation_of_scores_and_cosines():
    assert similarity.correlation(1) == in_float64(2 / torch.pi)  # (E|k|)² of one normal number
    assert similarity.correlation(10**6) == printed(1.0, 5)


def test_counting_what_a_score_computes():
    assert three_scores.counted(lambda: torch.randn(3, 4) @ torch.randn(4, 5)) == (2 * 3 * 4 * 5, 0)
    assert three_scores.counted(lambda: torch.tanh(torch.randn(3, 4)) + 1) == (0, 12)


def test_without_the_embedded_model_or_transformers_they_are_not_run(evidence):
    left = {
        name: rows
        for name, rows in evidence.items()
        if name not in ("own_key", "antecedent", "head_dims", "real_heads")
    }
    found = judged_by_id(left)
    for name, extra in (("C24", "demo"), ("C25", "demo"), ("C30", "demo"), ("C31", "hf")):
        assert found[name].verdict == NOT_RUN
        assert f"attemper[{extra}]" in found[name].condition


def test_every_sentence_is_judged_or_says_why_not():
    ids = {claim.id for claim in claims.CLAIMS}
    named_claims = set()
    for sentence in (sentence for of_note in sentences.NOTES.values() for sentence in of_note):
        assert bool(sentence.claims) != bool(sentence.kind), sentence
        assert sentence.kind in ("", sentences.DEFINITION, sentences.ARITHMETIC, sentences.VAGUE)
        assert sentence.kind != sentences.VAGUE or sentence.remark
        named_claims |= set(sentence.claims)
    assert named_claims == ids, "every claim is one that a note makes"
    assert {claim for _, _, some in reading.TAKEAWAYS for claim in some} <= ids
    assert [note for note, _ in sentences.said("C24")] == ["002"]


def test_the_page_is_of_this_code(judged, evidence):
    """Every sentence, its verdict, and the numbers that decide the claims of this page; digits are the run's own."""
    for note, some in sentences.NOTES.items():
        for index, sentence in enumerate(some, start=1):
            assert f"| {note}.{index} | {notes.cell(sentence.says)} |" in PAGE, "run python -m research.notes"
    lines = dict(re.findall(r"^\| (C\d+) \| (.*)$", PAGE, flags=re.MULTILINE))
    assert list(lines) == OWN
    for name, judgement in judged.items():
        # C28 compares times, and this machine may be busy
        assert f"**{judgement.verdict}**" in lines[name] or name == "C28", f"{name}: run python -m research.notes"
        shown = re.sub(r"\d+", "#", lines[name].replace("\\|", "|"))
        assert [
            each for each in (*judgement.numbers, *judgement.context) if re.sub(r"\d+", "#", each) not in shown
        ] == []
    for name in OWN:
        assert experiment(claims.CLAIMS[int(name[1:]) - 1].look.split()[1])
