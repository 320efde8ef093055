"""checks: whether the attention of a model is right, as far as its ops show; they cost no forward pass.

examiner.py    the examiner: what is read of each call, and the faults of all layers (the dispatcher)
masks.py       which keys the rows of a call see
numbers.py     NaN and infinity in the output, and where they were born; weights that are all 0
declared.py    what a model declares: that it is a decoder, that it reads from the right; which tokens of a batch are padding
"""
