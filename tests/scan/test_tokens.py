"""Which tokens a token attends to: found by its text, its weights as the model's own, the best head for each target."""

import pytest
import torch

import attemper
import zoo
from attemper.demo import SENTENCE
from attemper.errors import InputError
from attemper.scan.document import plain
from attemper.scan.examiners.tokens import TokenWeights, find_token, word_of
from close import in_float32, in_float64, printed

TOKENS = ["[CLS]", "It", "##it", "Ġit", "▁it", "play", "##ing", "7", "it:2", "ball</w>"]


@pytest.mark.parametrize(
    ("asked", "position"),
    [
        ("It", 1),
        ("it", 2),
        ("it:3", 4),
        ("Ġit", 3),
        ("##ing", 6),
        ("ING", 6),
        ("ball", 9),
        ("BALL:1", 9),
        ("4", 4),
        ("7", 7),
        ("7:1", 7),
        ("[CLS]", 0),
        ("[cls]", 0),
        ("it:2", 8),  # a token of that text goes before
    ],
)
def test_a_token_is_found_by_its_text(asked, position):
    assert find_token(asked, TOKENS) == position


@pytest.mark.parametrize(("asked", "position"), [("👩", 1), ("👩:2", 2), ("👩 (2/2)", 2)])
def test_a_letter_of_several_tokens_is_found_by_itself(asked, position):
    assert find_token(asked, ["a", "👩 (1/2)", "👩 (2/2)"]) == position


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("cat", "'cat' is not a token of the text. The tokens are: [CLS] It it it it play ing 7 it:2 ball."),
        ("Playing", "made of 'play' + '##ing': ask for one of them."),
        ("it:4", "'it' occurs 3 times, at 2, 3, 4; got 'it:4'. Type it:3 for the last."),
        ("10", "must be a position from 0 to 9; got 10."),
        ("10", "For the text '10' type 10:1."),
        ("", "'' is not a token of the text"),
    ],
)
def test_a_token_that_is_not_there(asked, words):
    with pytest.raises(InputError) as caught:
        find_token(asked, TOKENS)
    assert words in str(caught.value)


def test_many_tokens_are_not_all_named():
    with pytest.raises(InputError, match=r"w0 w1 .* w59 … \(200 in all\)\."):
        find_token("x", [f"w{number}" for number in range(200)])


def test_marks_are_taken_off_at_their_place_only():
    assert [word_of(token) for token in ("a##b", "##", "Ġ", "▁▁", "</w>x")] == ["a##b", "", "", "▁", "</w>x"]


def examined(subject, **options):
    examiner = TokenWeights(**options)
    watch = attemper.watch(subject.model, examiners=[examiner])
    with torch.no_grad(), watch:
        subject.run()
    return plain(examiner.result())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gpt_neo", "bloom", "deberta", "torch_encoder", "by_hand"])
@pytest.mark.parametrize("item", [0, 1])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_the_weights_are_the_models_own(name, item):
    subject = zoo.make(name)
    words = [f"t{index}" for index in range(zoo.LENGTH)]
    found = examined(subject, asked="t7", tokens=words, item=item, number=3)
    full = [logits.softmax(-1)[item, :, 7] for logits in subject.full(subject)]
    assert len(found["heads"]) == sum(len(weights) for weights in full)
    for row, weights in zip(found["heads"], torch.cat(full), strict=True):
        assert row["weights"] == in_float32(weights.tolist(), terms=zoo.LENGTH, size=1.0)  # float32 is what is kept
    assert (found["position"], found["input"], found["token"], found["asked"]) == (7, 3, "t7", "t7")


def test_cross_attention_and_other_lengths_are_left_out():
    found = examined(zoo.make("t5"), asked="3", tokens=["t"] * zoo.LENGTH)
    assert {row["layer"].split(".")[0] for row in found["heads"]} == {"encoder"}
    nothing = examined(zoo.make("t5"), asked="3", tokens=["t"] * 5)
    assert (nothing["heads"], nothing["targets"], nothing["best"], nothing["strongest"]) == ([], [], None, None)


def test_the_best_head_leaves_special_tokens_and_neighbours_out():
    words = [f"t{place}" for place in range(zoo.LENGTH)]
    special = [place in (0, 1, 2, 3) for place in range(zoo.LENGTH)]
    found = examined(zoo.make("bert"), asked="t7", tokens=words, special=special)
    rows = {(row["layer"], row["head"]): row["weights"] for row in found["heads"]}
    for place, target in enumerate(found["targets"]):
        assert target["position"] == place
        assert target["special"] == special[place]
        weight = rows[target["layer"], target["head"]][place]
        assert target["weight"] == weight == max(row[place] for row in rows.values())
    allowed = [4, 5, 9, 10, 11, 12, 13]
    assert found["best"]["weight"] == max(row[place] for row in rows.values() for place in allowed)
    assert found["strongest"]["weight"] == max(max(row) for row in rows.values()) >= found["best"]["weight"]
    assert found["best"]["position"] in allowed


@pytest.mark.usefixtures("float64")
def test_a_layer_that_runs_twice_is_averaged():
    subject = zoo.make("bert")
    once = examined(subject, asked="1", tokens=["t"] * zoo.LENGTH)
    other = subject.inputs["input_ids"].flip(1)
    run = subject.run
    both = {}

    def second():
        subject.inputs["input_ids"] = other
        return run()

    subject.run = second
    both["second"] = examined(subject, asked="1", tokens=["t"] * zoo.LENGTH)
    subject.inputs["input_ids"] = other.flip(1)
    subject.run = lambda: (run(), second())
    both["all"] = examined(subject, asked="1", tokens=["t"] * zoo.LENGTH)
    for one, two, mean in zip(once["heads"], both["second"]["heads"], both["all"]["heads"], strict=True):
        expected = (torch.tensor(one["weights"]) + torch.tensor(two["weights"])) / 2
        assert mean["weights"] == in_float64(expected.tolist())


def test_it_looks_at_the_dog_as_every_token_does(minilm):
    model, tokenizer = minilm
    batch = tokenizer(SENTENCE, return_tensors="pt")
    numbers = batch["input_ids"][0].tolist()
    words = tokenizer.convert_ids_to_tokens(numbers)
    special = [number in tokenizer.all_special_ids for number in numbers]
    found = examined(zoo.Subject(model, dict(batch)), asked="it", tokens=words, special=special)
    assert len(found["heads"]) == 72
    best = found["best"]
    assert (best["token"], best["layer"], best["head"]) == ("dog", "encoder.layer.5.attention.self", 11)
    assert best["weight"] == printed(0.627, 3)
    assert found["strongest"]["token"] == "because"  # a head that looks one token back
    assert best["others"] == printed(0.542, 3)  # in that head the other tokens look at the dog nearly as much
    rivals = {target["token"]: target["weight"] for target in found["targets"]}
    assert rivals["ball"] == printed(0.469, 3)
    assert rivals["[CLS]"] == printed(0.908, 3)


def test_others_are_the_mean_of_the_other_words(minilm):
    """From the model's own weights: without the token asked for, special tokens, and the diagonal."""
    model, tokenizer = minilm
    batch = tokenizer(SENTENCE, return_tensors="pt")
    numbers = batch["input_ids"][0].tolist()
    words = tokenizer.convert_ids_to_tokens(numbers)
    special = [number in tokenizer.all_special_ids for number in numbers]
    before = model.config._attn_implementation
    try:
        model.double()
        found = examined(zoo.Subject(model, dict(batch)), asked="it", tokens=words, special=special)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            shown = model(**batch, output_attentions=True).attentions
    finally:
        model.float().set_attn_implementation(before)
    rest = [index for index in range(len(words)) if not special[index] and index != 7]
    for row in found["heads"]:
        weights = shown[int(row["layer"].split(".")[2])][0, row["head"]]
        expected = [weights[[one for one in rest if one != key], key].mean().item() for key in range(len(words))]
        assert row["others"] == in_float32(expected, terms=9, size=1.0)


def test_a_causal_mask_leaves_out_who_cannot_see():
    """Only later tokens see a key; the last one is seen by no other token."""
    found = examined(zoo.make("gpt2"), asked="3", tokens=["t"] * zoo.LENGTH)
    for row in found["heads"]:
        assert row["others"][-1] is None or row["others"][-1] != row["others"][-1]
        assert all(0 < one < 1 for one in row["others"][:-1])
