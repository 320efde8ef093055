"""experiments: a few forward passes that show whether attention is right: what moves when a token, padding or an item changes.

run.py          all experiments on one input, in order, and what each found (the dispatcher)
subject.py      the batch by its parts: tokens, mask, positions; batches with other tokens, more of them, or more items
runner.py       runs the model and keeps what its layers return; nothing of the model is changed
trial.py        the passes that all experiments share, how far two passes differ, and how far rounding alone moves them
future.py       does a token change outputs before it?
padding.py      does padding change real tokens?
items.py        do items of a batch change one another?
position.py     does a token change its own row of every head, and no other?
cache.py        does the KV cache give the same result?
long.py         do longer inputs run, and keep what came before?
permutation.py  does the order of the tokens matter?
dtype.py        does bfloat16 attend to the same keys?
"""
