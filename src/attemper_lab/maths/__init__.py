"""Theory and statistics that the experiments share; gradients.py needs the two before it, the others nothing.

theory.py     closed forms for softmax over random logits, and for q·k
moments.py    exact means of the Jacobian and the entropy for any number of keys, by quadrature
stats.py      means of independent batches with t intervals
gradients.py  the lengths of the gradients at the softmax's input and at q: exact RMS, medians, where the medians cross
"""
