"""treat: change a model whose attention goes wrong, after the watch has shown where.

Data passes the files in this order:

    finder        projections(): runs the model once and hands each attention call on
    find          the rows of parameters that make q and k of one call
    reuse         the rows of a layer that is built like one already searched
    effect        whether scaling them scales the logits of that head alone
    derivatives   the two questions that `find` asks autograd
    table         the answer: a table of layers, heads and rows
    clip          qk_clip(): factors for the heads above tau
    peaks         the largest score of each head, from a record, over all ranks
    afterwards    whether the heads that were clipped came down
    write         multiplies rows in place: shards, half precision, masters
    entropy       entropy_floor() and floor(): a loss for attention that looks at too few keys
    norm          add_qk_norm() and add_temperature(): new parameters behind a projection
    rates         scale_rates(): learning rates of q and k
"""

from .clip import Clip as Clip
from .clip import qk_clip as qk_clip
from .entropy import entropy_floor as entropy_floor
from .entropy import floor as floor
from .finder import Finder as Finder
from .finder import last_projections as last_projections
from .finder import projections as projections
from .norm import add_qk_norm as add_qk_norm
from .norm import add_temperature as add_temperature
from .rates import scale_rates as scale_rates
from .table import LayerProjections as LayerProjections
from .table import Projections as Projections
