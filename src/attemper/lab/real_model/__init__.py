"""Experiments on the heads of the embedded MiniLM; each file has `measure`, `expect`, `finding` and `draw`.

sentences.py    the model, and the pairs of sentences that it reads
real_heads.py   does one token get almost all the attention when the scale is removed?
subspaces.py    do the heads of a layer read different subspaces, and look at different tokens?
"""
