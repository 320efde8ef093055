"""sentences: every factual sentence of five common notes on √d_k, in our words, with the claims that judge it.

The notes are numbered 000 to 004. A sentence that no claim judges is a definition, arithmetic that can be checked by
hand, or too vague to measure; then ``remark`` says what there is to say.
"""

from __future__ import annotations

from typing import NamedTuple

DEFINITION, ARITHMETIC, VAGUE = "definition", "arithmetic", "not measurable"


class NoteSentence(NamedTuple):
    """One sentence: what it says, the claims that judge it, or why none does."""

    says: str
    claims: tuple[str, ...] = ()
    kind: str = ""
    remark: str = ""


def _judged(says: str, *claims: str, remark: str = "") -> NoteSentence:
    return NoteSentence(says, claims, "", remark)


def _plain(kind: str, says: str, remark: str = "") -> NoteSentence:
    return NoteSentence(says, (), kind, remark)


FIRST = (
    _plain(DEFINITION, "Attention is softmax(QKᵀ/√d_k) V.", "`attemper explain` computes it step by step."),
    _plain(DEFINITION, "Q, K and V are the matrices of queries, keys and values."),
    _plain(
        DEFINITION, "d_k is how many numbers a key has.", "A query has as many; a value may have another number, d_v."
    ),
    _judged("Undivided, the dot products of queries and keys can be large when d_k is large.", "C1"),
    _judged("The softmax of large values can have very small gradients.", "C6"),
    _judged("Small gradients make training unstable.", "C34"),
    _judged("Dividing by √d_k normalises the values before the softmax.", "C2"),
    _judged("That gives stable gradients.", "C6", "C7"),
    _plain(DEFINITION, "Q, K and V are n × d_k.", "V is n × d_v in general."),
    _plain(
        DEFINITION,
        "With several heads each has a smaller d_k, often d_model / heads.",
        "Often, not always: `attemper run head_dims`.",
    ),
    _plain(
        DEFINITION,
        "Tokens become embeddings, Q, K, V, scores, scaled scores, weights, and a weighted sum: the context.",
        '`attemper explain "Love Apple phones" -o flow.svg` draws it.',
    ),
)

SECOND = (
    _judged(
        "The division is there for numerical stability.", "C8", remark="It is about saturation, not about overflow."
    ),
    _judged("The higher the dimension, the larger the dot products.", "C1", "C3"),
    _judged("exp of a big number overflows.", "C8"),
    _judged("Without the scale the softmax is extremely peaked.", "C5"),
    _judged("Nearly all the attention goes to one token.", "C14"),
    _judged("Left unscaled, attention has exploding gradients.", "C7"),
    _judged("A model without the scale does not train stably.", "C9"),
    _judged("The std of q·k is √d_k.", "C1"),
    _judged("After the division the variance is 1 again.", "C2"),
    _judged("What counts is d_k, the size of a head, and not the width d of the model.", "C11"),
    _plain(ARITHMETIC, "GPT-3 has width 12,288 and 96 heads, so d_k is 128.", "12288 / 96 = 128."),
    _plain(DEFINITION, "d is the size of embeddings and positional encodings, d_k that of a head's queries and keys."),
    _judged("Dividing by √d instead would correct too little or too much, depending on the number of heads.", "C26"),
    _judged(
        "For an interview: q·k has variance d_k, not d; the division keeps the softmax from blowing up.", "C1", "C5"
    ),
    _judged("Training falls apart without the scale.", "C9"),
    _judged("The dot product of a query and a key measures relevance.", "C36"),
    _plain(
        DEFINITION,
        "d_k is the width of an embedding over how many heads there are.",
        "In most models; Gemma 2 and 3 27B are exceptions.",
    ),
    _judged(
        "Adding up 512 numbers gives more than adding up 64 of the same kind.",
        "C1",
        remark="The typical size is √64 = 8 and √512 = 22.6; the mean is 0 for both.",
    ),
    _judged("When one score is far ahead, the softmax collapses towards one-hot.", "C5"),
    _judged("From there on gradients disappear.", "C6"),
    _judged("Softmax has a slope of p(1 − p), which is 0 where p is 0 or 1.", "C6"),
    _judged("Attention then picks instead of weighing, to the harm of what deep models learn.", "C20"),
    _judged("Dividing by √d_k keeps scores in a stable range.", "C2"),
    _judged(
        "The softmax stays smooth, gradients stay useful, attention stays expressive over many layers.",
        "C16",
        "C6",
        "C20",
    ),
    _judged(
        "The scale is a foundation of training Transformers at scale.",
        "C9",
        remark="T5 and GPT-Neo divide by nothing, and were trained.",
    ),
)

THIRD = (
    _judged("Attention decides how much each token attends to every other one by their similarity.", "C36", "C25"),
    _plain(DEFINITION, "A query is the current token's vector; a value is the content of a token."),
    _judged("Keys come from every token but the current one.", "C25"),
    _judged("QKᵀ measures the similarity of queries and keys.", "C36"),
    _plain(
        DEFINITION,
        "Softmax turns scores into weights, which multiply the values and give the context.",
        "`attemper explain` shows the numbers.",
    ),
    _judged("Without the scale, a large d_k makes QKᵀ large.", "C1"),
    _judged("That pushes the softmax towards 0 and 1.", "C5"),
    _judged("Gradients stop being steady, and learning is wasteful.", "C6", "C7", "C15"),
    _plain(
        DEFINITION,
        "The paper of Vaswani et al. (2017) introduced the division as the remedy.",
        "They give the reason as a suspicion; the paper has no run without the factor.",
    ),
    _judged("With it the scores have a steady variance, and weights are less extreme.", "C2", "C16"),
    _judged(
        'In "The dog chased the ball because it was fast", attention decides by the similarity of word embeddings whether "it" '
        "is the dog or the ball.",
        "C24",
        remark="Above the first layer q and k come from vectors of words in context, not from word embeddings.",
    ),
    _judged("The scale keeps scores from exploding, so that they stay meaningful.", "C14"),
    _judged("Attention stays stable across embedding dimensions.", "C27"),
    _judged("Gradient flow and convergence improve.", "C6", "C15"),
    _judged("A long sequence is computed in parallel.", "C21", remark="Nothing to do with the scale."),
    _plain(VAGUE, "It works efficiently inside multi-head attention.", "Efficient compared with what is not said."),
    _judged("Unscaled, gradients are too small or too large, and training is more difficult.", "C6", "C7", "C9"),
    _plain(DEFINITION, "Every head uses the formula on its own."),
    _judged("Heads attend to different representation subspaces.", "C18"),
    _judged("The outputs of the heads are concatenated and projected.", "C17"),
    _judged("The scale stabilises the softmax and the updates.", "C16", "C6"),
    _judged("Leaving it out makes training less stable and its result worse.", "C9", "C15"),
    _judged("The scale makes attention faster.", "C28"),
    _plain(
        VAGUE, "The scale makes attention smarter.", "Smarter at what is not said; what it learns is C9, C15 and C19."
    ),
)

FOURTH = (
    _plain(
        ARITHMETIC,
        '"Love Apple phones" is [3×512]; W_Q, W_K, W_V are [512×64]; Q, K, V are [3×64]; the scores are [3×3].',
        '`attemper explain "Love Apple phones"` prints these shapes.',
    ),
    _plain(DEFINITION, "scores[1][0] compares Apple with Love.", "Row 1 is Apple's query, column 0 the key of Love."),
    _judged("The final representations have the shape of the input.", "C17"),
    _plain(DEFINITION, "Without the scale the formula is softmax(QKᵀ) V.", "`attemper explain --rule none`."),
    _judged("Longer vectors give dot products of larger variance: one term more for each entry.", "C1"),
    _judged("2-d vectors give scores from −23 to 23, 5-d vectors from −49 to 122.", "C32"),
    _judged("More dimensions mean a larger deviation from the mean.", "C3"),
    _judged("Softmax exaggerates gaps: [7, 3] becomes [0.98, 0.02].", "C4"),
    _judged("Large gaps make attention too narrow.", "C5"),
    _judged("Most weights are left without an update.", "C22"),
    _judged("The gradient stops: the vanishing gradient problem.", "C6"),
    _judged("A variance of a at d_k = 1 is 64 a at d_k = 64.", "C23"),
    _plain(ARITHMETIC, "Var(x/√d_k) = Var(x)/d_k.", "A factor c changes a variance by c²."),
    _judged("Dividing by √d_k keeps the variance near 1 while d_k grows.", "C2"),
    _judged("It evens out the softmax, so that every weight takes part in training.", "C16"),
    _judged("It prevents vanishing gradients.", "C6"),
    _judged("Otherwise training fails, with a handful of weights that learn.", "C9", "C22"),
    _judged(
        "In one line: the variance is normalised, and softmax, gradients and training are better for it.",
        "C2",
        "C16",
        "C15",
    ),
)

FIFTH = (
    _plain(
        DEFINITION, "Plain dot-product attention is softmax(QKᵀ) V; a query asks, a key describes what a token offers."
    ),
    _judged("The larger the dot product, the more relevant the token.", "C36"),
    _judged("The trouble begins with a large d_k.", "C1", "C5"),
    _judged("Common values of d_k are 64, 128 and 512.", "C31"),
    _judged("After initialisation the entries of Q and K commonly have mean 0 and variance 1.", "C1"),
    _judged("Then Var(q·k) = d_k.", "C1"),
    _judged("Scores grow with the count of terms, whatever the similarity of the vectors.", "C1"),
    _judged("For large inputs one weight is near 1, the others near 0: [25, 2, −3] gives [1, 0, 0].", "C4", "C5"),
    _judged("All attention is on a single token.", "C14"),
    _judged("There is no smooth gradient, and learning is unstable.", "C6", "C9"),
    _judged("A saturated softmax has gradients near 0, and little is learned.", "C6"),
    _judged("Attention is over-confident: it commits too early and generalises badly.", "C19"),
    _judged("With the scale the variance is about 1.", "C2"),
    _judged("That makes scores numerically stable.", "C8"),
    _judged("It makes scores independent of the dimension.", "C29"),
    _judged("The softmax works where it is sensitive.", "C16"),
    _judged("Dividing by d_k would shrink too much: attention would be too flat.", "C10"),
    _judged("√d_k is perfect, because it cancels the growth of the variance.", "C30"),
    _plain(ARITHMETIC, "With width 512 and 8 heads, d_k is 64.", "512 / 8 = 64."),
    _plain(
        DEFINITION,
        "Bahdanau attention scores with vᵀ tanh(W_q q + W_k k).",
        "`attemper.AdditiveAttention`; our w is their v.",
    ),
    _judged("Its scores lie between −1 and 1, because of the tanh.", "C12"),
    _judged("It has no exploding values and is stable.", "C13"),
    _judged("It is slower because it has no matrix multiplication.", "C33"),
    _judged("Dot products are the faster way, at the price of a scale.", "C35"),
    _judged("High dimension makes numbers large, and large numbers break the softmax.", "C5"),
    _judged("Scaled, one similarity can be compared with another at any dimension.", "C29"),
    _judged(
        "In one line: large dot products saturate the softmax and make training unstable; dividing by √d_k "
        "normalises the variance and "
        "stabilises learning.",
        "C5",
        "C9",
        "C2",
    ),
)

NOTES = {"000": FIRST, "001": SECOND, "002": THIRD, "003": FOURTH, "004": FIFTH}
"""The sentences by the number of their note."""


def said(claim: str) -> list[tuple[str, str]]:
    """The note and the sentence, in our words, of everyone who makes a claim: the first of each note, where it comes first."""
    found: list[tuple[str, str]] = []
    for number, sentences in NOTES.items():
        those = sorted(
            (one for one in sentences if claim in one.claims),
            key=lambda one: (one.claims.index(claim), len(one.claims)),
        )
        found += [(number, one.says) for one in those[:1]]
    return found
