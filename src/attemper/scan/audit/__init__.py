"""The scale audit: which scale each layer declares, which it applies, and whether that is a fault.

audit.py       the examiner: collects the calls of each layer, and gives a LayerScale for each (the dispatcher)
applied.py     the scale that one call applies, from its argument, its numbers or a regression; the spread of its logits
declared.py    the scale that a config, a module or a rule declares
judge.py       the rule that a measured scale matches, its fault, the sentences about it, and layers unlike all others
"""
