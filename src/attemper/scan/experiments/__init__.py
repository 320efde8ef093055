"""experiments: a few forward passes that show whether attention is right: which outputs change with a token, padding or an item.

run.py          all experiments on one input, in order, and what each found (the dispatcher)
subject.py      the batch by its parts: tokens, mask, positions; batches with other tokens, more of them, or more items
runner.py       runs the model, unchanged, and keeps what its layers return
trial.py        the passes that all experiments share, and how far two passes differ, beside what rounding does
changes.py      future, padding, items, permutation, long: the batch is changed, and rows of outputs are compared
packed.py       do documents in one row have the numbers that they have alone?
tiled.py        one item several times, with something changed in each copy; how far rows of two copies are apart
repeat.py       does the same text give the same rows in every item, and in every call?
reach.py        which rows depend on which tokens and inputs, in evaluation and in training mode?
unpadded.py     does an item of a padded batch have the same rows without its padding?
relative.py     do the logits of one repeated token depend on i − j alone, where q and k are rotated?
chunks.py       do several tokens at once, with a cache, give what the whole text gives?
backend.py      does attention by hand give what fused attention gives?
unused.py       does the output depend on every weight of the attention?
position.py     does a token change its own row of every head, and no other?
cache.py        does the KV cache give the same result?
dtype.py        does bfloat16 attend to the same keys?
"""
