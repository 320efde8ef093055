"""attemper.testing: each assertion fails on a model with that fault, passes on one without, and says which layer and how much."""

import pytest
import torch
from torch import nn

from attemper import testing
from attemper.errors import InputError
from scan import right, wrong

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")

PAIRS = [
    (testing.assert_causal, "heads cut by view", "causal", r"layers\.0: A leak of the future: .* moved by \d"),
    (
        testing.assert_causal,
        "weak mask, −5",
        "−100 hides",
        r"layers\.0: A hidden key keeps up to 0\.\d+ of a row's weight",
    ),
    (testing.assert_causal, "a norm over the length", "a causal convolution", r"row \d+ of layers\.0 moved by \d"),
    (testing.assert_causal, "shifted mask", "ALiBi by hand", r"Every row sees one key after its own"),
    (testing.assert_ignores_padding, "padding forgotten", "rows of padding set to 0", r"Real tokens see padded keys"),
    (
        testing.assert_ignores_padding,
        "padding hides queries",
        "nn.MultiheadAttention, padded",
        r"Real tokens see padded",
    ),
    (testing.assert_cache_matches, "positions of a step start at 0", "a KV cache", r"at token \d+, .* differs by \d"),
    (testing.assert_heads_keep_positions, "heads cut by view", "causal", r"Row 0 of head 3 holds numbers of token \d"),
    (
        testing.assert_heads_keep_positions,
        "heads joined by reshape",
        "a set",
        r"joined by a reshape without a transpose",
    ),
    (testing.assert_scale, "grouped heads by einsum, √d_model", "causal", r"layers\.0 does not apply rule 'sqrt_dk'"),
]


@pytest.mark.parametrize(("check", "faulty", "sound", "words"), PAIRS)
def test_each_assertion(check, faulty, sound, words):
    torch.manual_seed(0)
    case = wrong.WRONG[faulty]()
    with pytest.raises(AssertionError, match=words) as raised:
        check(case.model, case.inputs)
    assert str(raised.value).startswith(f"{check.__name__}(): ")
    case = right.RIGHT[sound]()
    modes = [part.training for part in case.model.modules()]
    assert check(case.model, case.inputs) is None
    assert [part.training for part in case.model.modules()] == modes


def test_a_bidirectional_model_is_not_causal():
    case = right.RIGHT["bidirectional"]()
    with pytest.raises(AssertionError, match=r"layers\.0 moved by"):
        testing.assert_causal(case.model, case.inputs)


def test_a_model_without_attention_is_judged_by_its_output():
    class Recurrent(nn.Module):
        def __init__(self, both):
            super().__init__()
            self.rnn = nn.GRU(8, 8, batch_first=True, bidirectional=both)

        def forward(self, x):
            return self.rnn(x)[0]

    x = torch.randn(2, 9, 8)
    testing.assert_causal(Recurrent(False), x)
    with pytest.raises(AssertionError, match="the model's output moved"):
        testing.assert_causal(Recurrent(True), x)


def test_longformer_which_a_scan_does_not_follow_ignores_padding():
    case = right.family("Longformer", inputs=wrong.padded(), attention_window=4, max_position_embeddings=80)
    testing.assert_ignores_padding(case.model, case.inputs)


def test_what_cannot_be_said_is_an_error_of_the_batch():
    case = right.RIGHT["bidirectional"]()
    with pytest.raises(InputError, match="Model could not be tested: the model takes no KV cache"):
        testing.assert_cache_matches(case.model, case.inputs)
    with pytest.raises(InputError, match=r"`model` must be a torch\.nn\.Module; got function"):
        testing.assert_causal(test_each_assertion, case.inputs)
    with pytest.raises(InputError, match="rule"):
        testing.assert_scale(case.model, case.inputs, rule="sqrt")


def test_a_scale_by_its_number():
    case = right.RIGHT["causal"]()
    testing.assert_scale(case.model, case.inputs, rule=wrong.EACH**-0.5)
    with pytest.raises(AssertionError, match=r"does not apply 0\.5"):
        testing.assert_scale(case.model, case.inputs, rule=0.5)
