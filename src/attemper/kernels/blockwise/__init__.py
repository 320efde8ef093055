"""blockwise: attention in torch operations, tile by tile. Any device and dtype, O(n) memory, a backward that recomputes.

plan.py       how a problem is cut: blocks of heads, tiles of rows and keys, the mask of a tile
block.py      the heads of a block, their scores tile by tile, and the gradients of query, key and gain
additive.py   the same for additive scores; block_of() takes one or the other
forward.py    the running sums of each row, and what becomes of them: output and signs
backward.py   dz of a tile, from recomputed weights, and the gradients from it
"""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
