"""blockwise: attention in torch operations, tile by tile. Any device and dtype, O(n) memory, a backward that recomputes."""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
