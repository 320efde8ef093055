"""Figures: what the `draw` functions of the experiments share, imported only when a figure is drawn, since it needs altair.

In the order in which a figure uses them:

    theme.py     size, colours, axes, and the title that states the finding
    marks.py     closed forms as lines, measurements as points with their intervals
    panels.py    columns of a training run over its steps: loss, entropy, the largest logit, the gradient
    protects.py  what the scale protects: the figure and the animation, from rows that come with the package
"""
