"""Every fault of a layer: its level, source and title, what is said of it, what to do, and the check that finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple


class Fault(NamedTuple):
    """What can be wrong with a layer. ``message`` is a template for ``str.format``; ``check`` is one of ``CHECKS``."""

    level: str
    source: str
    title: str
    message: str
    advice: str
    check: str = "scale"


_DK = "Vaswani et al. 2017, §3.2.1: {}"
_INSIDE = "Vaswani et al. 2017, eq. 1: the scale is inside the softmax"
_TRAINED = "If the weights were trained like this, "

FAULTS = {
    "sqrt_dmodel": Fault(
        "warn",
        _DK.format("√d_k, the width of one head"),
        "√d_model instead of √d_k",
        "√d_model instead of √d_k: q·k is multiplied by {applied}, but each head sums over d_k = {width} numbers, which needs "
        "{root}. Logits are {times} times too small, and attention too flat.",
        "Divide by the square root of the head's width, head_dim ** 0.5. "
        + _TRAINED
        + "keep it and say so in a comment.",
    ),
    "sqrt_heads": Fault(
        "warn",
        _DK.format("√d_k, the width of one head"),
        "√heads instead of √d_k",
        "The root of the number of heads instead of √d_k: q·k is multiplied by {applied} = 1/√{heads}, but each head sums over "
        "d_k = {width} numbers, which needs {root}.",
        "Divide by the square root of the head's width, head_dim ** 0.5: q.size(-1) behind the split into heads. "
        + _TRAINED
        + "keep it and say so in a comment.",
    ),
    "twice": Fault(
        "error",
        _DK.format("one factor of 1/√d_k"),
        "scaled twice",
        "Scaled twice: 1/√d_k = {root} is applied twice, so q·k is multiplied by {applied} and attention is far flatter than "
        "intended.",
        "Remove one of the two: pass scale=1.0 to scaled_dot_product_attention, or do not scale q before it. If 1/d_k is meant "
        "(µP), write it as one number.",
    ),
    "after_softmax": Fault(
        "error",
        _INSIDE,
        "scaled after the softmax",
        "Scaled after the softmax: its output is multiplied by {after}, which shrinks the output and does not change how sharp "
        "attention is.",
        "Move the factor in front of the softmax: softmax(q·k / √d_k) v.",
    ),
    "ignored": Fault(
        "error",
        "the model's own configuration",
        "a setting ignored",
        "A setting is ignored: {setting}, but the code that ran applies {formula}.",
        "Use an attention implementation that honours it (attn_implementation='eager' often does), or update the library.",
    ),
    "uncontrolled": Fault(
        "error",
        "Giorlandino & Goldt 2025, arXiv 2505.24333: softmax freezes at a logit std of √(2 ln n)",
        "no scale, and logits spread too far",
        "{opening}: the logit std is {std}, above √(2 ln n) = {limit} for the {keys} keys a row sees, where a softmax freezes on "
        "one key.",
        "Multiply q·k by 1/√d_k (scaled_dot_product_attention does so by default), or normalise q and k. If 1/√d_k is part "
        "of the weights, the scale is correct: the heads are sharp because of training.",
    ),
    "multiplied": Fault(
        "error",
        _DK.format("divided by √d_k"),
        "multiplied instead of divided",
        "Multiplied instead of divided: q·k is multiplied by {applied} = {divisor}, instead of {root} = 1/√d_k.{spread}",
        "Divide q·k by √d_k, or multiply it by head_dim ** -0.5: the sign of the exponent is missing, or * was written for /.",
    ),
    "negative": Fault(
        "warn",
        "Vaswani et al. 2017, eq. 1: the scale is positive",
        "a negative scale",
        "A negative scale: q·k is multiplied by {applied}, so the keys that match a query least get the most weight.",
        "Remove the minus. " + _TRAINED + "they need it: keep it and say so in a comment.",
    ),
    "shrunk": Fault(
        "note",
        _INSIDE,
        "a mean over heads, or a scale after the softmax",
        "The weights of a row add up to {after}, which is both 1/heads and 1/√d_k: a mean over the heads if they are summed "
        "afterwards; otherwise the output is scaled after the softmax.",
        "If the heads are concatenated, remove the factor after the softmax.",
    ),
    "unscaled": Fault(
        "note",
        _DK.format("1/√d_k keeps the variance of q·k at 1 whatever d_k"),
        "no scale",
        "No scale, and nothing declares that: q·k is a sum over d_k = {width} numbers and is multiplied by nothing.{spread} "
        "Logits grow with the weights: 1/√d_k = {root} keeps their size independent of d_k.",
        "If it is meant (1/√d_k folded into the weights, as T5 has it), declare it: scale = 1.0 in the attention module. "
        "Otherwise multiply q·k by head_dim ** -0.5.",
    ),
    "unknown": Fault(
        "note",
        _DK.format("√d_k, the width of one head"),
        "a scale that no rule gives",
        "q·k is multiplied by {applied}{inverse}, which no rule gives and nothing declares. Each head sums over d_k = {width} "
        "numbers, for which 1/√d_k = {root}: logits are {times} times too small.",
        "If it depends on the length of the text, or belongs to a model of another width, write head_dim ** -0.5. If it is "
        "meant, say so in an attribute of the attention module: scale = {applied}.",
    ),
    "odd": Fault(
        "note",
        "the model's other layers",
        "unlike the other layers",
        "This layer multiplies q·k by {applied}, the {others} others like it by {common}.",
        "If that is intended, say so in a comment; otherwise give it the scale of the others.",
    ),
}
"""The faults of a scale, by name."""

_EQUATION = "Vaswani et al. 2017, eq. 1: the softmax runs over the keys of a query, once"
_MASK = "Vaswani et al. 2017, §3.2.3: what a position may not see is −∞ before the softmax"
_EXPERIMENT = "an experiment on the model itself"
_SPLIT = "Write x.view(B, L, H, E).transpose(1, 2): split the last dimension first, then move the heads."


def _over(dimension: str, those: str) -> Fault:
    message = (
        f"The softmax runs over the {those}, and the values are added up over the keys: {those} compete with one another, and "
        "keys do not.{sums}"
    )
    advice = (
        "Write softmax(dim=-1) on scores of shape (batch, heads, queries, keys); without dim, torch picks another one."
    )
    return Fault("error", _EQUATION, f"softmax over the {dimension}", message, advice, "softmax_axis")


ATTENTION_FAULTS = {
    "over_queries": _over("queries", "queries"),
    "over_heads": _over("heads", "heads"),
    "over_batch": _over("batch", "items of the batch"),
    "softmax_twice": Fault(
        "error",
        _EQUATION,
        "softmax applied twice",
        "The softmax is applied to weights that a softmax made: they lie between 0 and 1, so no key can get more than e times "
        "the weight of another, and attention is nearly uniform.",
        "Remove one of the two. A function that returns weights has applied it already.",
        "softmax_once",
    ),
    "masked_after_softmax": Fault(
        "error",
        _MASK,
        "masked after the softmax",
        "Weights are set to 0 after the softmax: hidden keys have taken their share by then, and the weights of a row add up to "
        "between {low} and {high} instead of 1.",
        "Fill the scores with −inf before the softmax: scores.masked_fill(~mask, float('-inf')).softmax(-1).",
        "row_sums",
    ),
    "added_after_softmax": Fault(
        "warn",
        "Vaswani et al. 2017, eq. 1; biases are added to the scores (Raffel et al. 2020, §2.1; Press et al. 2022, §3)",
        "a bias added after the softmax",
        "A tensor is added to the weights after the softmax: the weights of a row add up to between {low} and {high} instead of "
        "1, and hidden keys may get a part of it.",
        "Add it to the scores: (scores + bias).softmax(dim=-1).",
        "row_sums",
    ),
    "uneven_rows": Fault(
        "warn",
        _EQUATION,
        "rows of weights that do not add up to one number",
        "The weights of a row add up to between {low} and {high}: they were divided after the softmax, and not by the sum of "
        "their row.",
        "Divide by weights.sum(dim=-1, keepdim=True), or not at all: a softmax has made every row add up to 1. The "
        "Point Cloud Transformer divides by columns on purpose: keep it if it is meant.",
        "row_sums",
    ),
    "dropout_in_eval": Fault(
        "error",
        "Srivastava et al. 2014: dropout is for training alone",
        "dropout in evaluation mode",
        "Weights are dropped in evaluation mode{rate}: the same input gives another output every time.",
        "Pass dropout_p=self.dropout if self.training else 0.0, or training=self.training to F.dropout; nn.Dropout does.",
        "dropout",
    ),
    "weak_mask": Fault(
        "error",
        _MASK,
        "a mask too weak to hide",
        "A hidden key keeps up to {weight} of a row's weight: {mask} does not hide it.",
        "Use float('-inf') or torch.finfo(scores.dtype).min in the scores before the softmax, or a boolean mask.",
        "mask_strength",
    ),
    "inverted_mask": Fault(
        "error",
        _MASK,
        "an inverted causal mask",
        "Every row sees only the keys after its own ({example}): the causal mask is inverted. The last row sees nothing.",
        "In scaled_dot_product_attention a boolean mask is True for keys that may be seen; in nn.MultiheadAttention it is True "
        "for keys that are hidden. Negate it.",
        "mask_direction",
    ),
    "transposed_mask": Fault(
        "error",
        _MASK,
        "a transposed causal mask",
        "Every row sees its own key and those after it ({example}), and none before it: the causal mask is transposed.",
        "Use torch.ones(L, L).tril() with rows as queries: row i keeps keys 0 to i. If the model reads from the right on "
        "purpose, give the module an attribute: direction = 'backward'.",
        "mask_direction",
    ),
    "shifted_mask": Fault(
        "error",
        _MASK,
        "a causal mask shifted by one",
        "Every row sees one key after its own ({example}): the causal mask is shifted by one, so a model that predicts the next "
        "token is given that token.",
        "Use tril() or triu(diagonal=1) to hide: row i keeps keys 0 to i. If one token of look-ahead is meant, give the module "
        "an attribute: lookahead = 1.",
        "mask_direction",
    ),
    "missing_mask": Fault(
        "error",
        _MASK,
        "no causal mask in a decoder",
        "Rows see keys after their own ({example}), but {declared_by} declares a decoder: the future is visible.",
        "Pass is_causal=True or a causal mask. With a registered attention function of transformers, register a mask function "
        "under the same name, or no mask is made.",
        "mask_direction",
    ),
    "causal_unasked": Fault(
        "warn",
        _MASK,
        "a causal mask in a bidirectional model",
        "No row sees a key after its own (row {row} does not see key {key}), but {declared_by} says that rows see both sides: "
        "the first tokens see nearly nothing.",
        "Pass no is_causal and no causal mask; hide padding alone.",
        "mask_direction",
    ),
    "padding_inverted": Fault(
        "error",
        _MASK,
        "an inverted padding mask",
        "Real tokens see padding and no other real token ({example}): the padding mask is inverted.",
        "key_padding_mask of nn.MultiheadAttention is True for padding; attention_mask of transformers and attn_mask of "
        "scaled_dot_product_attention are True for real tokens. Negate it.",
        "mask_padding",
    ),
    "padding_visible": Fault(
        "error",
        _MASK,
        "padding is attended to",
        "Real tokens see up to {count} ({example}): the batch has a mask, and this layer does not hide what it marks.",
        "Pass the mask on to the attention, as keys: mask[:, None, None, :] of a (batch, length) mask hides columns; "
        "mask[:, None, :, None] hides rows.",
        "mask_padding",
    ),
    "zero_scores": Fault(
        "note",
        "a product with 0 is 0",
        "scores that are all 0",
        "All scores of this layer are 0, so every row is the mean of the values that it sees: the scale, q or k is 0.",
        "Look at the scale (d ** -1 // 2 is 0) and at the weights of q and k. Some begin with queries of 0 (µP): then nothing is "
        "wrong before training.",
        "numbers",
    ),
    "zero_weights": Fault(
        "error",
        "a product with 0 is 0",
        "weights that are all 0",
        "All weights of this layer are 0, so it gives the same output for every input, and no gradient reaches them.",
        "Load the weights, or initialise them: model.apply(init), or reset_parameters() after a meta device.",
        "numbers",
    ),
    "masks_differ": Fault(
        "error",
        "the model's other layers",
        "a layer with another mask",
        "This layer {does}, and {others}. Nothing declares that they differ.",
        "Pass the same mask to every layer. If it is meant, give the modules an attribute that says so: causal = True or False.",
        "mask_agreement",
    ),
    "heads_differ": Fault(
        "warn",
        "the layer's other heads",
        "heads with different masks",
        "The heads of this layer hide different keys ({example}), and nothing declares that: a mask may have been folded into "
        "the heads in another order than the scores (repeat for repeat_interleave).",
        "Fold a (batch, L, L) mask with repeat_interleave(heads, 0) for scores of shape (batch·heads, L, L). If it is meant, "
        "give the module an attribute that says so: windows = (…).",
        "mask_agreement",
    ),
    "heads_mixed": Fault(
        "error",
        "Vaswani et al. 2017, §3.2.2: every head projects each position",
        "heads that mix positions",
        "Row {row} of head {head} holds numbers of token {token}: the projection was cut into heads by a reshape without a "
        "transpose, so every head mixes positions.",
        _SPLIT,
        "head_layout",
    ),
    "window_ignored": Fault(
        "warn",
        "the module's own setting",
        "a window that hides nothing",
        "{declared_by} is {window}, and a row sees keys {distance} places before its own ({example}): no key is hidden for being "
        "too far.",
        "Pass the window to the attention: keep keys with i − j < window. If this layer is to see all, set it to None.",
        "mask_direction",
    ),
    "crossed_causal": Fault(
        "warn",
        _MASK,
        "a causal mask on cross-attention",
        "Row i of this cross-attention sees the keys 0 to i of its source, and none after them: the mask is that of "
        "self-attention, and the first rows see nearly nothing of the source.",
        "Pass no is_causal and no causal mask here: a source has no future. Hide its padding alone.",
        "mask_direction",
    ),
    "heads_joined": Fault(
        "error",
        "Vaswani et al. 2017, §3.2.2: heads are concatenated",
        "heads joined across positions",
        "Row {row} of the joined heads holds the output for token {token}: the heads were joined by a reshape without a "
        "transpose, so positions are mixed.",
        "Write out.transpose(1, 2).reshape(B, L, H * E): move the heads behind the length first.",
        "head_layout",
    ),
    "future_leak": Fault(
        "error",
        _EXPERIMENT,
        "a leak of the future",
        "A leak of the future: tokens from {start} on were changed, and row {row} of {layer} moved by {share}, although {why}. A "
        "loss that falls fast may come of it.",
        "Hide keys after the query's own with −inf before the softmax, in every layer. If the mask is right, look for what else "
        "mixes positions there: a softmax or a norm over the length, a convolution that sees both sides, heads cut by a reshape.",
        "future",
    ),
    "padding_leak": Fault(
        "error",
        _EXPERIMENT,
        "padding changes the result",
        "Padding changes real tokens: with {more} more tokens on the {side} that the mask hides, row {row} of {layer} moved by "
        "{share}.{why}",
        "Hide padded keys with −inf before the softmax, in every layer: mask[:, None, None, :]. On the left, positions must "
        "count real tokens alone: position_ids = (mask.cumsum(-1) − 1).clamp(min=0).",
        "padding",
    ),
    "batch_leak": Fault(
        "error",
        _EXPERIMENT,
        "items of a batch change one another",
        "Items of a batch change one another: {how} moved by {share} in {layer}.",
        "If the inputs are (batch, length, width), set batch_first=True: nn.MultiheadAttention and nn.TransformerEncoderLayer "
        "take (length, batch, width) by default. Otherwise look for a softmax, a norm or a reshape over the batch.",
        "batch",
    ),
    "input_ignored": Fault(
        "error",
        _EXPERIMENT,
        "an output that ignores the input",
        "The output does not depend on the input: {layer} is the same, number for number, for other {tokens}.",
        "Look for weights that are all 0 or were never loaded, and for a constant in the place of the input.",
        "input",
    ),
    "position_leak": Fault(
        "error", _EXPERIMENT, "heads that mix positions", "Heads mix positions: {words}.", _SPLIT, "position"
    ),
    "packed_differs": Fault(
        "error",
        _EXPERIMENT,
        "packed documents change one another",
        "Packed documents change one another: row {row} of document {document} differs by {share} in {layer} from what it is "
        "alone.",
        "Hide the other documents with a block-diagonal mask, or give the attention their offsets (cu_seqlens); positions must "
        "restart at 0 in each.",
        "packed",
    ),
    "cache_differs": Fault(
        "error",
        _EXPERIMENT,
        "the KV cache changes the result",
        "The KV cache changes the result: at token {row}, {layer} differs by {share} from that of the whole text at once.{why}",
        "Give a step the position of its token (not 0), keys of all tokens so far, and a mask over all of them; is_causal=True "
        "hides all cached keys but the first from a single query, as it aligns the first query with the first key.",
        "cache",
    ),
    "chunk_differs": Fault(
        "warn",
        _EXPERIMENT,
        "a chunk of tokens with the KV cache",
        "Several tokens at once change the result of the KV cache: with {tokens} tokens after {before}, row {row} of {layer} "
        "differs by {share} from that of the whole text.",
        "A chunk needs the mask of its last rows, torch.ones(q, k).tril(k - q), not none (its tokens see one another) and not "
        "is_causal=True (which is top-left); and the positions of its tokens.",
        "chunks",
    ),
    "long_breaks": Fault(
        "warn",
        _EXPERIMENT,
        "longer inputs break it",
        "{happened}.",
        "Make masks and positions for the length that was given: a table or a mask of fixed size must be as long as the longest "
        "input that the model declares.",
        "long",
    ),
    "order_ignored": Fault(
        "warn",
        _EXPERIMENT,
        "the order of the tokens is ignored",
        "The order of the tokens is ignored: in another order they give the same rows, number for number.",
        "Add positions: a learned table, sinusoids, or a rotation of q and k. If the tokens are a set, nothing is wrong.",
        "permutation",
    ),
    "dropout_runs": Fault(
        "error",
        "Srivastava et al. 2014: dropout is for training alone",
        "dropout that runs in evaluation mode",
        "Dropout runs in evaluation mode: {op} in {where} draws in every call, and with another seed the same input moved "
        "{layer} by {share}.",
        "Write F.dropout(x, p, training=self.training), whose default is True, or use nn.Dropout.",
        "repeat",
    ),
    "random_output": Fault(
        "warn",
        _EXPERIMENT,
        "random numbers in evaluation mode",
        "The same call gives other numbers: {op} in {where} draws in evaluation mode, and with another seed {layer} moved by "
        "{share}.",
        "Draw when training alone: if self.training. Or give the numbers to forward() as an argument.",
        "repeat",
    ),
    "state_kept": Fault(
        "error",
        _EXPERIMENT,
        "state kept from one call to the next",
        "The same call gives other numbers the second time: {layer} moved by {share}, so the model keeps something from one call "
        "to the next.{what}",
        "Clear it where a text begins, or pass it in and return it, as past_key_values are: a cache that is never reset lets one "
        "text see another.",
        "repeat",
    ),
    "item_counted": Fault(
        "error",
        _EXPERIMENT,
        "the place in the batch changes the result",
        "The same text gives other rows in another item of the batch: in {layer}, item {item} differs from item 0 by {share}.",
        "Look for the batch taken for the length: pe[:x.size(0)] takes positions by item if x is (batch, length, width); write "
        "pe[:, :x.size(1)]. Or a mask or a table that is indexed by item.",
        "repeat",
    ),
    "padding_counted": Fault(
        "error",
        _EXPERIMENT,
        "padding is counted",
        "Padding on the {side} changes real tokens: without it, row {row} of {layer} of item {item} moved by {share}.",
        "Positions must count real tokens alone: position_ids = (mask.cumsum(-1) − 1).clamp(min=0), not arange(length). If "
        "positions are right, look for a mask that shows padding to real tokens.",
        "unpadded",
    ),
    "rotated_alone": Fault(
        "error",
        "Su et al. 2021, §3.1: q and k are both rotated, so that their product depends on i − j",
        "q or k is not rotated",
        "{one} is rotated by its position and {other} is not: with one repeated token every {other} is the same and {one} is "
        "not, so logits do not show how far apart two tokens are.",
        "Rotate both, by the same angles: q = rotate(q, cos, sin) and k = rotate(k, cos, sin).",
        "relative",
    ),
    "rotated_apart": Fault(
        "error",
        "Su et al. 2021, §3.1: the product of a rotated q and k depends on i − j alone",
        "a rotation that is none",
        "With one repeated token the product of q and k should depend on i − j alone; that of row {row} and key {key} differs by "
        "{number} of |q||k| from that of the first pair as far apart.{why}",
        "Pair the numbers as the angles are: cos and sin of cat([angle, angle], -1) go with rotate_half (numbers i and i + E/2), "
        "those of repeat_interleave(angle, 2) with pairs (2i, 2i + 1). q and k need the same angles.",
        "relative",
    ),
    "rotation_lost": Fault(
        "error",
        "Su et al. 2021, §3.1: q and k are rotated by their positions",
        "a rotation without effect",
        "{by} holds a rotation, but with one repeated token neither q nor k changes with its position, in any layer.",
        "Rotate along the length: cos and sin are indexed by position, so they must meet dimension 2 of (batch, heads, length, "
        "width), or dimension 1 of (batch, length, heads, width). And use what rotate() returns.",
        "relative",
    ),
    "bias_grows": Fault(
        "error",
        "Press et al. 2022, §3: ALiBi subtracts slope · distance",
        "a bias that grows with the distance",
        "The numbers added to the scores grow with the distance: {slope} a token in head {head}. Far keys get the most weight.",
        "ALiBi is −slope · |i − j|: scores + slope * (j − i) in a causal model. Check the sign and the order of the two.",
        "relative",
    ),
    "later_seen": Fault(
        "error",
        _EXPERIMENT,
        "a later token is seen",
        "A leak of the future: token {token} was changed, and row {row} of {layer} moved by {share}, although {why}. The leak "
        "ends at the border of a block, or reaches a few tokens alone.",
        "Inside a block too a row may see keys up to its own alone: combine the mask of blocks with tril(). If blocks are meant, "
        "give the module an attribute that says so: chunk_size = 4.",
        "reach",
    ),
    "source_ignored": Fault(
        "error",
        _EXPERIMENT,
        "an input without effect",
        "{given} was changed, and no number of the output moved: the model does not read it.",
        "Look at the cross-attention: its k and v come from that input, and its output is added. If the input is not meant to "
        "count here, leave it out of the batch.",
        "reach",
    ),
    "tokens_apart": Fault(
        "error",
        _EXPERIMENT,
        "attention without effect",
        "A changed token moved its own row of the output and no other: the output does not depend on the attention.",
        "Add what the attention returns: x = x + self.attention(x). A mask that hides all keys but the row's own does this too.",
        "reach",
    ),
    "modes_differ": Fault(
        "error",
        _EXPERIMENT,
        "another mask in training mode",
        "In {mode} mode row {row} of {layer} depends on token {token}{which}; in {other} mode {none}.",
        "Use the same mask in both: a mask or a window that is made if self.training, or is_causal=self.training, trains one "
        "model and runs another. Statistics over tokens, as of a batch norm, also differ between the modes.",
        "modes",
    ),
    "backend_differs": Fault(
        "error",
        _EXPERIMENT,
        "two ways to compute attention that differ",
        "The model has two ways to compute its attention, and they differ: with {flag} = {other} in place of {now}, {layer} "
        "moved by {share}.",
        "Compare the mask (is_causal, a buffer tril), the scale and the padding of the two: scaled_dot_product_attention divides "
        "by √d_k itself, and a boolean mask is True for keys that may be seen.",
        "backend",
    ),
    "weight_unused": Fault(
        "warn",
        _EXPERIMENT,
        "weights without effect",
        "{names} {what}.",
        "Look for a projection that is used twice (v = self.k(x)), a norm that is made and never called, or a result that is "
        "thrown away.",
        "unused",
    ),
    "projection_shared": Fault(
        "warn",
        _EXPERIMENT,
        "one projection for q, k and v",
        "{projection} runs three times on the same input in one call: q, k and v are the same numbers.",
        "[nn.Linear(…)] * 3 holds one module three times: write [nn.Linear(…) for _ in range(3)].",
        "unused",
    ),
    "dtype_changes": Fault(
        "note",
        _EXPERIMENT,
        "bfloat16 changes what it attends to",
        "In bfloat16 a row moves about {percent} % of its weight to other keys, on average, in {where}.",
        "Nothing to do in float32. To run it in bfloat16, compute scores and softmax in float32, or add QK-norm.",
        "dtype",
    ),
}
"""The faults of attention apart from its scale, by name."""

MEANT = {
    "sqrt_dmodel", "sqrt_heads", "ignored", "negative", "added_after_softmax", "uneven_rows", "heads_mixed",
    "position_leak", "future_leak", "later_seen", "batch_leak", "item_counted", "dropout_runs", "random_output",
    "state_kept", "modes_differ", "source_ignored", "tokens_apart", "weight_unused", "bias_grows", "rotated_alone",
    "chunk_differs", "cache_differs", "window_ignored", "crossed_causal", "projection_shared", "order_ignored", "causal_unasked",
}  # fmt: skip
"""Faults that a design may look like; what is said of them ends with how to declare that it is meant."""


def declaring(name: str) -> str:
    """How to declare that a fault is meant; "" if no design looks like it."""
    return f" If it is meant: declared={{'{name}': True}}, or --declare {name}." if name in MEANT else ""


class Check(NamedTuple):
    """A question about a model's attention: what passes, and whether it takes forward passes of its own (``deep``)."""

    passes: str
    deep: bool = False


@dataclass(kw_only=True)
class CheckResult:
    """One question about a model's attention, and its answer."""

    name: str
    state: Annotated[str, {"enum": ["passed", "failed", "skipped"]}]
    deep: Annotated[bool, {"description": "whether it is an experiment with forward passes of its own"}]
    layers: Annotated[int | None, {"minimum": 0, "description": "how many layers it judged; null: the whole model"}]
    message: Annotated[str, {"description": "what passed, with what was assumed; or why it was skipped"}]
    needs: Annotated[
        str | None,
        {"description": "what to pass so that it is judged; only of a check that applies to the model and was skipped"},
    ] = None


CHECKS = {
    "scale": Check("the scale is no fault"),
    "softmax_axis": Check("the softmax runs over the keys"),
    "softmax_once": Check("it runs once"),
    "row_sums": Check("the weights of every row add up to one number"),
    "dropout": Check("no weight is dropped in evaluation mode"),
    "mask_strength": Check("hidden keys get no weight"),
    "mask_direction": Check("no mask is inverted, transposed, shifted or missing"),
    "mask_padding": Check("padding is hidden, and words are not"),
    "mask_agreement": Check("similar layers, and the heads of a layer, have the same mask"),
    "head_layout": Check("row i of every head belongs to token i"),
    "numbers": Check("outputs are finite, and no layer's weights are all 0"),
    "repeat": Check("the same text gives the same rows, in every item and in every call", deep=True),
    "future": Check("a token changes no output before it", deep=True),
    "padding": Check("padding changes no real token", deep=True),
    "batch": Check("items of a batch do not change one another", deep=True),
    "input": Check("the output depends on the input", deep=True),
    "position": Check("a token changes its own row of every head, and no other", deep=True),
    "reach": Check("rows depend on no later token, on other tokens, and on every input", deep=True),
    "unpadded": Check("an item has the same rows without its padding", deep=True),
    "relative": Check("where q and k are rotated, logits of one repeated token depend on i − j alone", deep=True),
    "packed": Check("documents packed into one row have the numbers that they have alone", deep=True),
    "cache": Check("the KV cache gives the same result", deep=True),
    "chunks": Check("several tokens at once with the KV cache give the same result", deep=True),
    "long": Check("longer inputs run, and keep what came before", deep=True),
    "permutation": Check("the order of the tokens matters", deep=True),
    "backend": Check("fused attention, and attention by hand, give the same rows", deep=True),
    "modes": Check("rows see the same tokens in training and in evaluation mode", deep=True),
    "unused": Check("every weight of the attention has an effect", deep=True),
    "dtype": Check("bfloat16 attends to the same keys", deep=True),
}
"""All checks of a scan, in their order; the deep ones run on request."""
