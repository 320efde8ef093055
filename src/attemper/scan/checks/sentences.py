"""Each fault that is read from the ops of a model in words, and what to do about it."""

from __future__ import annotations

from ..._display import plural

_DIMS = {"queries": "queries", "heads": "heads", "batch": "items of the batch"}


def over(what: str, sums: tuple[float, float] | None) -> tuple[str, str]:
    reach = (
        "" if sums is None else f" The weights of a row add up to between {sums[0]:.3g} and {sums[1]:.3g} instead of 1."
    )
    says = (
        f"The softmax runs over the {_DIMS[what]}, and the values are added up over the keys: {_DIMS[what]} compete with one "
        f"another, and keys do not.{reach}"
    )
    return (
        says,
        "Write softmax(dim=-1) on scores of shape (batch, heads, queries, keys); without dim, torch picks another one.",
    )


def twice() -> tuple[str, str]:
    return (
        "The softmax is applied to weights that a softmax made: they lie between 0 and 1, so no key can get more than e times "
        "the weight of another, and attention is nearly uniform.",
        "Remove one of the two. A function that returns weights has applied it already.",
    )


def masked_after(sums: tuple[float, float]) -> tuple[str, str]:
    return (
        f"Weights are set to 0 after the softmax: hidden keys have taken their share by then, and the weights of a row add up to "
        f"between {sums[0]:.3g} and {sums[1]:.3g} instead of 1.",
        "Fill the scores with −inf before the softmax: scores.masked_fill(~mask, float('-inf')).softmax(-1).",
    )


def uneven(sums: tuple[float, float]) -> tuple[str, str]:
    return (
        f"The weights of a row add up to between {sums[0]:.3g} and {sums[1]:.3g}: they were divided after the softmax, and not "
        "by the sum of their row.",
        "Divide by weights.sum(dim=-1, keepdim=True), or not at all: a softmax has made every row add up to 1. The "
        "Point Cloud Transformer divides by columns on purpose: keep it if it is meant.",
    )


def dropout(rate: float | None) -> tuple[str, str]:
    how = "" if rate is None else f" (dropout_p={rate:g})"
    return (
        f"Weights are dropped in evaluation mode{how}: the same input gives another output every time.",
        "Pass dropout_p=self.dropout if self.training else 0.0, or training=self.training to F.dropout; nn.Dropout does.",
    )


def weak(how: str, weight: float) -> tuple[str, str]:
    return (
        f"A hidden key keeps up to {weight:.3g} of a row's weight: {how} does not hide it.",
        "Use float('-inf') or torch.finfo(scores.dtype).min in the scores before the softmax, or a boolean mask.",
    )


def inverted(own: bool) -> tuple[str, str]:
    if own:
        return (
            "Every row sees its own key and those after it, and none before it: the causal mask is transposed.",
            "Use torch.ones(L, L).tril() with rows as queries: row i keeps keys 0 to i. If the model reads from the right on "
            "purpose, give the module an attribute: direction = 'backward'.",
        )
    return (
        "Every row sees only the keys after its own: the causal mask is inverted. The last row sees nothing.",
        "In scaled_dot_product_attention a boolean mask is True for keys that may be seen; in nn.MultiheadAttention it is True "
        "for keys that are hidden. Negate it.",
    )


def shifted() -> tuple[str, str]:
    return (
        "Every row sees one key after its own: the causal mask is shifted by one, and a model that predicts the next token is "
        "given it.",
        "Use tril() or triu(diagonal=1) to hide: row i keeps keys 0 to i. If one token of look-ahead is meant, give the module "
        "an attribute: lookahead = 1.",
    )


def missing(by: str) -> tuple[str, str]:
    return (
        f"Rows see keys after their own, but {by} declares a decoder: the future is visible.",
        "Pass is_causal=True or a causal mask. With a registered attention function of transformers, register a mask function "
        "under the same name, or no mask is made.",
    )


def padding_inverted() -> tuple[str, str]:
    return (
        "Real tokens see padding and no other real token: the padding mask is inverted.",
        "key_padding_mask of nn.MultiheadAttention is True for padding; attention_mask of transformers and attn_mask of "
        "scaled_dot_product_attention are True for real tokens. Negate it.",
    )


def padding_visible() -> tuple[str, str]:
    return (
        "Real tokens see padded keys: the batch has a mask, and this layer does not hide what it marks.",
        "Pass the mask on to the attention, as keys: mask[:, None, None, :] of a (batch, length) mask hides columns; "
        "mask[:, None, :, None] hides rows.",
    )


def differ(others: int, future: bool) -> tuple[str, str]:
    what = "sees keys after its own position" if future else "hides keys after its own position"
    rest = "do not" if future else "see them"
    return (
        f"This layer {what}, and {plural(others, 'similar layer')} {rest}. Nothing declares that they differ.",
        "Pass the same mask to every layer. If it is meant, give the modules an attribute that says so: causal = True or False.",
    )


def heads_differ() -> tuple[str, str]:
    return (
        "The heads of this layer hide different keys, and nothing declares that: a mask may have been folded into the heads in "
        "another order than the scores (repeat for repeat_interleave).",
        "Fold a (batch, L, L) mask with repeat_interleave(heads, 0) for scores of shape (batch·heads, L, L). If it is meant, "
        "give the module an attribute that says so: windows = (…).",
    )


def mixed(head: int, row: int, token: int, turned: bool) -> tuple[str, str]:
    if turned:
        return (
            f"Key {row} of head {head} holds numbers of token {token}: the keys were reshaped to (head dim, length), not "
            "transposed, so every key mixes positions.",
            "Write q @ k.transpose(-2, -1): a reshape or a view to the same shape moves numbers to other tokens.",
        )
    return (
        f"Row {row} of head {head} holds numbers of token {token}: the projection was cut into heads by a reshape without a "
        "transpose, so every head mixes positions.",
        "Write x.view(B, L, H, E).transpose(1, 2): split the last dimension first, then move the heads.",
    )


def joined(row: int, token: int) -> tuple[str, str]:
    return (
        f"Row {row} of the joined heads holds the output for token {token}: the heads were joined by a reshape without a "
        "transpose, so positions are mixed.",
        "Write out.transpose(1, 2).reshape(B, L, H * E): move the heads behind the length first.",
    )
