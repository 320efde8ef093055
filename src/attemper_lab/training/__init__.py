"""Experiments that train small models, one question per file. In the order in which a run passes the files that they share:

layers.py       attention under any score or rule
loop.py         one training run: a row of loss and vital signs per logged step
runs.py         runs grouped, learning rates chosen, what one rule costs compared with another
language.py     a small language model of Python source
"""
