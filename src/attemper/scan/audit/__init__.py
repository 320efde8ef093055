"""The scale audit: which scale each layer declares, which it applies, and whether that is a fault.

audit.py       the examiner: collects the calls of each layer, and gives a LayerScale for each (the dispatcher)
applied.py     the scale that one call applies, from its argument, its numbers or a regression
slope.py       the regression of a model's own logits on q·k
declared.py    the scale that a config, a module or a rule declares
spread.py      the standard deviation of the logits
judge.py       the rule that a measured scale matches, and its fault
sentences.py   the explanation, and what to do
outliers.py    a layer with another scale than all others like it
"""
