"""Figures: what the `draw` functions of the experiments share.

In the order in which a figure uses them:

    alt.py       altair, imported only when a figure is drawn
    theme.py     size, colours, axes, and the title that states the finding
    marks.py     closed forms as lines, measurements as points with their intervals
    panels.py    columns of a training run over its steps: loss, entropy, the largest logit, the gradient
"""
