"""Theory and statistics that the experiments share. None of these files needs another.

theory.py    closed forms for softmax over random logits, and for q·k
moments.py   exact means of the Jacobian and the entropy for any number of keys, by quadrature
stats.py     means of independent batches with t intervals
"""
