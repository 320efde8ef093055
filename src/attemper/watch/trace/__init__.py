"""trace: what q, k and the scores of a call were multiplied by. It runs only for an examiner that asks for it.

Data passes the files in this order:

    trace      follows tensors from op to op
    factors    what one multiplication does
    hiding     which ops hide keys, and what happened to weights
    cuts       how tokens were cut into heads
    paths      the factors of a tensor, joined, rotated and normed
"""
