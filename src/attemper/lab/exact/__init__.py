"""Experiments that train nothing, one question per file, each with `measure`, `expect`, `finding` and `draw`.

In the order in which to read them:

    worked.py          do common worked examples come out as written?
    variance.py        how far do the dot products q·k spread as d_k grows?
    saturation.py      at which spread of the logits does softmax put nearly all the weight on one key?
    jacobian.py        how large is the softmax's Jacobian as d_k grows?
    gradient.py        what gradient reaches a query through the softmax, on average and typically?
    two_keys.py        with two keys, how fast does the softmax's slope fall as d_k grows?
    divisors.py        what does each divisor do to attention before any training?
    bounded.py         when logits cannot exceed a bound, how much weight can one of n keys get?
    precision.py       what does storing the scores in 16 bits do to the weights?
    additive_cost.py   what does additive attention cost compared with the dot product?
    parallel.py        how much faster is one pass over a sequence than a loop over its tokens?
    init.py            is folding 1/√d_k into W_q's initialisation the same function before training?
"""
