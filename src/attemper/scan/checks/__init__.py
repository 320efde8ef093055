"""checks: whether a model's attention is right, as far as its ops show that. They cost no forward pass.

examiner.py    the examiner: what is read of each call, and the faults of all layers (the dispatcher)
padding.py     which tokens of a batch are padding, by the names of its masks
masks.py       which keys the rows of a call see
declared.py    what a model says of itself: that it is a decoder, that it reads from the right
sentences.py   each fault in words, and what to do
"""
