"""trace: what q, k and the scores of a call were multiplied by. It runs only for an examiner that asks for it.

Data passes the files in this order:

    trace      follows tensors from op to op
    factors    what one multiplication does
    paths      the factors of a tensor, joined, rotated and normed
"""
