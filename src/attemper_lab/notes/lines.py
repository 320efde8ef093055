"""lines: why √d_k in one sentence and in ten lines: docs/why-sqrt-dk.md, the page, `attemper explain` and the notes say the same.

Every number is one of the rows that its command measures, or of those that come with the package; tests hold them to these rows.
"""

from __future__ import annotations

ONE_LINE = (
    "q·k is a sum of d_k products, so for independent entries of variance 1 its std is √d_k, noise from counting dimensions that "
    "the softmax reads as its temperature; dividing by √d_k, where d_k is the size of one head, starts the logits at std 1 for "
    "any d_k, and keeps a step of training from moving them √d_k times as far."
)

TEN_LINES = (
    (
        "A score q·k is a sum of d_k products. Unrelated q and k with independent entries of mean 0 and variance 1 score about "
        "±√d_k: the variance at d_k = 64 is 64, the std 8.",
        "attemper run variance",
    ),
    (
        "That spread comes from counting dimensions, not from similarity: it is the same whatever the vectors mean. A key equal "
        "to q scores d_k, √d_k times the noise.",
        "attemper run divisors",
    ),
    (
        "The softmax sees only differences of logits, so their spread is its temperature: softmax([7, 3]) = softmax([4, 0]) = "
        "[0.98, 0.02].",
        "attemper run worked",
    ),
    (
        "Only a divisor that grows as √d_k gives a std of 1 for every head size. The sum runs inside a head, so it is d_k and "
        "not d_model: for GPT-3's 96 heads √d_model would be 9.8 times too large.",
        "attemper run divisors",
    ),
    (
        "At std 1 a query spreads its weight over e^(−1/2) = 61 % of its keys, measured as e to the entropy. At std 8, which is "
        "d_k = 64 without the scale, one of 1024 keys holds 71 %.",
        "attemper run saturation",
    ),
    (
        "Beyond a std of √(2 ln n), 3.7 for 1024 keys, weight condenses: one key has 0.39 of it there, half at 1.25 times that, "
        "0.9 at 6 times. Gradients become uneven: at d_k = 1024 half of the squared gradient comes from 3 % of 128 queries, with "
        "the scale from 32 %.",
        "attemper run gradient",
    ),
    (
        "The scale is also a learning rate: a step of Adam changes W_Q and W_K as much with it as without, and the logits √d_k "
        "times as far without. In 800 steps at a rate of 0.001 their std goes from 7 to 222, with the scale from 0.8 to 5.5.",
        "attemper run charlm --preset full --device cuda",
    ),
    (
        "What it costs: a model of 32 M parameters ends 0.24 ± 0.05 nats higher without it at d_k = 64 and 0.36 ± 0.08 at 128 "
        "(400 steps, rates half a decade apart: a finer grid may take 0.06 off the first). Recall takes 1.3 to 27 times as many "
        "steps, as √d_k · √(2 ln n) grows. Why depends on the task: to give the softmax's gradient alone its scale back undoes "
        "1.03 of 1.33 and 1.35 of 1.69 in ln steps in two small cells of recall, but 0.03 (−0.03 to 0.08) of 0.22 nats in a "
        "small language model.",
        "python -m research.run run causal --preset recall, --preset language",
    ),
    (
        "Nothing about it is sacred. T5 has no divisor and draws W_Q smaller; at its own best rate 1/d_k ends 0.04 nats (0.00 to "
        "0.07) above 1/√d_k, and QK-norm 0.09 (0.03 to 0.15) below.",
        "attemper claims C10",
    ),
    (
        "It is right at initialisation, for entries of variance 1. Training aligns q with its keys: in a small language model "
        "the spread of q·k grows like d_k^0.49 at first and d_k^0.60 (0.51 to 0.70) in the end, where full alignment is d_k. In "
        "MiniLM's heads the std of the logits ends between 0.7 and 10. Hence 1/d_k in µP, QK-norm, and clips.",
        "python -m research.run run alpha --preset slice",
    ),
)
"""Each line with the command that measures its number."""
