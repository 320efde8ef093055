"""Experiments on the heads of the embedded MiniLM; each file has `measure`, `expect`, `finding` and `draw`.

sentences.py    the model, and the pairs of sentences that it reads
real_heads.py   does one token get almost all the attention when the scale is removed?
subspaces.py    do the heads of a layer read different subspaces, and look at different tokens?
pronouns.py     pairs of sentences that differ in one word, which decides what a pronoun refers to
antecedent.py   does a pronoun attend to the word that it refers to, in any head?
own_key.py      are the keys those of all other tokens, or is a token's own key among them?
"""
