"""Experiments that train small models.

In the order in which a run passes the files that they share:

    layers.py       attention under any score or rule
    loop.py         one training run: a row of loss and vital signs per logged step
    runs.py         runs grouped, learning rates chosen, what one rule costs compared with another
    language.py     a small language model of Python source

and one question per file, each with `measure`, `expect`, `finding` and `draw`:

    recall.py       does a layer learn to look up a pair it has just read, under each rule?
    charlm.py       how much does the scale matter to a small language model?
    depth.py        does leaving the scale out cost more in a deeper model?
    fold.py         does a scale that is folded into W_q train the same?
    transplant.py   with the scale of the logits forced to κ, from which κ on does training suffer?
    scores.py       as d grows, which score still learns to recall?
"""
