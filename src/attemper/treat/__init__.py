"""treat: change a model whose attention goes wrong, after the watch has shown where.

Data passes the files in this order:

    finder        projections(): runs the model once and hands each attention call on
    find          the rows of parameters that make q and k of one call
    derivatives   the two questions to autograd that `find` asks
    projections   the answer: a table of layers, heads and rows
    clip          qk_clip(): factors for the heads above tau
    peaks         the largest score of each head, from a record, over all ranks
    write         multiplies rows in place: shards, half precision, masters
"""

from .clip import Clip as Clip
from .clip import qk_clip as qk_clip
from .finder import Finder as Finder
from .finder import projections as projections
from .projections import LayerProjections as LayerProjections
from .projections import Projections as Projections
