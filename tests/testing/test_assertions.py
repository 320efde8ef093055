"""attemper.testing: each assertion fails on a model with that fault, passes on one without, and says which layer and how much."""

import pytest
import torch
from torch import nn

from attemper import testing
from attemper.errors import InputError
from scan import right, unseen, wrong

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
    (
        testing.assert_ignores_padding,
        "padding forgotten",
        "rows of padding set to 0",
        r"Real tokens see up to 4 padded keys",
    ),
    (
        testing.assert_ignores_padding,
        "padding hides queries",
        "nn.MultiheadAttention, padded",
        r"Real tokens see up to 4 padded keys \(row 0 of item 1 sees key 12\)",
    ),
    (testing.assert_cache_matches, "positions of a step start at 0", "a KV cache", r"at token \d+, .* differs by \d"),
    (testing.assert_heads_keep_positions, "heads cut by view", "causal", r"Row 0 of head 3 holds numbers of token \d"),
    (
        testing.assert_heads_keep_positions,
        "heads joined by reshape",
        "a set",
        r"joined by a reshape without a transpose",
    ),
    (
        testing.assert_items_independent,
        "a norm over the batch",
        "causal",
        r"without the others, item 1 moved by \d.* in layers\.0",
    ),
    (testing.assert_items_independent, "batch_first forgotten", "(length, batch, width)", r"item 1 moved by \d"),
    (testing.assert_scale, "grouped heads by einsum, √d_model", "causal", r"layers\.0 does not apply rule 'sqrt_dk'"),
]


@pytest.mark.parametrize(("check", "faulty", "sound", "words"), PAIRS)
def test_each_assertion(check, faulty, sound, words):
    torch.manual_seed(0)
    case = {**wrong.WRONG, **unseen.WRONG}[faulty]()
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


class Drawing(wrong.Model):
    """Dropout behind the layers, in evaluation too."""

    def forward(self, input_ids):
        return torch.nn.functional.dropout(super().forward(input_ids), 0.1)


class Counting(wrong.Model):
    """Adds up how often it was called."""

    calls = 0

    def forward(self, input_ids):
        self.calls += 1
        return super().forward(input_ids) * self.calls


def test_a_model_that_draws_or_remembers_is_not_repeatable():
    torch.manual_seed(0)
    drawing, counting = (cls(wrong.Attention(wrong.causal)) for cls in (Drawing, Counting))
    with pytest.raises(AssertionError, match=r"another seed moved the model's output by \d.* training=self\.training"):
        testing.assert_repeatable(drawing, wrong.ids())
    with pytest.raises(
        AssertionError, match=r"keeps state from call to call: it changed calls, so the same batch moved"
    ):
        testing.assert_repeatable(counting, wrong.ids())
    assert "calls" not in vars(counting)
    testing.assert_repeatable(wrong.model(wrong.causal), wrong.ids())
    with pytest.raises(InputError, match="could not be tested: the output is random in evaluation mode"):
        testing.assert_causal(drawing, wrong.ids())


class Packing(wrong.Model):
    """Positions restart in every document; ``hides`` says whether a document hides the others."""

    def __init__(self, hides):
        super().__init__(wrong.Attention(self.attend))
        self.hides, self.document = hides, None

    def attend(self, q, k, v):
        mask = wrong.lower(q.shape[2])
        mask = mask & (self.document[:, None] == self.document) if self.hides else mask
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, input_ids, position_ids):
        self.document = (position_ids[0] == 0).cumsum(0)
        x = self.words(input_ids) + self.places(position_ids)
        return self.head(x + self.layers[0](self.norms[0](x)))


def test_packed_documents():
    torch.manual_seed(0)
    pack = {"input_ids": wrong.ids(1), "position_ids": torch.cat([torch.arange(5), torch.arange(8)])[None]}
    testing.assert_packed_matches(Packing(True), pack)
    with pytest.raises(AssertionError, match=r"layers\.0: .* row \d of document 1 differs by \d"):
        testing.assert_packed_matches(Packing(False), pack)
    with pytest.raises(InputError, match=r"the batch is not packed\. Pass one row \(1, length\) of several documents"):
        testing.assert_packed_matches(wrong.model(wrong.causal), wrong.ids())
    with pytest.raises(InputError, match=r"the batch is packed: .* Pass one document for each item"):
        testing.assert_causal(Packing(True), pack)


class Prefixed(wrong.Model):
    """Some learned tokens before those of the text, or behind them."""

    def __init__(self, attend, more=1, before=True, padded=False):
        super().__init__(wrong.Attention(attend))
        self.more, self.before = nn.Parameter(torch.randn(1, more, wrong.WIDTH)), before

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        own = self.more.expand(len(x), -1, -1)
        x = torch.cat([own, x] if self.before else [x, own], 1)
        if attention_mask is None:
            return x + self.layers[0](x)
        ones = attention_mask.new_ones(len(x), own.shape[1])
        return x + self.layers[0](x, mask=torch.cat([ones, attention_mask], 1))


def padded(q, k, v, mask=None):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, None if mask is None else mask[:, None, None, :] > 0
    )


@pytest.mark.parametrize(("more", "before"), [(1, True), (3, True), (1, False)])
def test_a_model_that_adds_tokens_is_judged_by_those_of_the_text(more, before):
    torch.manual_seed(0)
    testing.assert_causal(Prefixed(wrong.causal, more, before), wrong.ids())
    with pytest.raises(AssertionError, match=r"row \d+ of layers\.0 moved by"):
        testing.assert_causal(Prefixed(torch.nn.functional.scaled_dot_product_attention, more, before), wrong.ids())
    if before:
        testing.assert_ignores_padding(Prefixed(padded, more), wrong.padded())


class Translating(nn.Module):
    """Two sequences; ``causal`` hides later targets."""

    def __init__(self, causal):
        super().__init__()
        self.inner, self.causal_mask = nn.Transformer(48, 4, 1, 1, 64, dropout=0.0, batch_first=True), causal

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1]) if self.causal_mask else None
        return self.inner(src, tgt, tgt_mask=mask)


class Unnamed(Translating):
    def forward(self, x, y):
        return super().forward(x, y)


@pytest.mark.parametrize("length", [7, 9])
@pytest.mark.parametrize("cls", [Translating, Unnamed])
def test_of_two_sequences_the_target_is_causal(length, cls):
    torch.manual_seed(0)
    batch = torch.randn(2, 9, 48), torch.randn(2, length, 48)
    testing.assert_causal(cls(True), batch)
    testing.assert_items_independent(cls(True), batch)
    with pytest.raises(AssertionError, match="moved by"):
        testing.assert_causal(cls(False), batch)


def test_an_encoder_with_a_decoder():
    case = right.RIGHT["T5"]()
    testing.assert_causal(case.model, case.inputs)
    testing.assert_cache_matches(case.model, case.inputs)
    testing.assert_ignores_padding(case.model, case.inputs)


def test_a_pooled_output_is_judged_or_refused():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.rnn = nn.Embedding(wrong.WORDS, 8), nn.GRU(8, 8, batch_first=True)

        def forward(self, input_ids):
            return self.rnn(self.words(input_ids))[0][:, -1]

    torch.manual_seed(0)
    testing.assert_items_independent(Last(), wrong.ids())
    testing.assert_repeatable(Last(), wrong.ids())
    with pytest.raises(InputError, match=r"has one row per token\. Pass a model that returns one row per token"):
        testing.assert_causal(Last(), wrong.ids())
    case = unseen.RIGHT["a mean over real tokens"]()
    testing.assert_ignores_padding(case.model, case.inputs)
