"""What the backward needs of each row, as the hardware copies it: numbers of kernels/triton/row_terms.py, padded to whole tiles.

A row that is not there, or that sees no key, has a reference so high that its weights are zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional
from triton.experimental.gluon import language as gl

from attemper.kernels.triton import row_terms as portable

LSE: gl.constexpr = gl.constexpr(0)  # to base 2
CONSTANT: gl.constexpr = gl.constexpr(1)
ENTROPY: gl.constexpr = gl.constexpr(2)  # for logarithms to base 2
P2: gl.constexpr = gl.constexpr(3)
LEVEL: gl.constexpr = gl.constexpr(4)
SLOPE: gl.constexpr = gl.constexpr(5)  # for scores, without the scale
PEAK: gl.constexpr = gl.constexpr(6)
ARGMAX: gl.constexpr = gl.constexpr(7)  # the bits of an integer
TOTAL: gl.constexpr = gl.constexpr(8)
PLACES: gl.constexpr = gl.constexpr(9)
ROWS_OF_TILE = 128
UNSEEN = 1e30


def packed(terms: Tensor, argmax: Tensor | None, arrived: int, scale: float) -> Tensor:
    """(B H, places, rows): all places, or the first two if a gradient arrived at the output alone."""
    more = -terms.shape[3] % ROWS_OF_TILE
    none = torch.zeros_like(terms[0])

    def place(of: gl.constexpr, gradients: gl.constexpr, times: float = 1.0) -> Tensor:
        return terms[of.value] * times if arrived & gradients.value else none  # what did not arrive was not written

    lse = (terms[portable.LSE.value] / math.log(2)).clamp(max=UNSEEN)
    places = [lse, terms[portable.CONSTANT.value]]
    if arrived != portable.G_OUTPUT.value:
        arg = none.int() if argmax is None else argmax.int()
        places += [place(portable.ENTROPY, portable.G_ENTROPY, math.log(2)), place(portable.P2, portable.G_P2)]
        places += [place(portable.LEVEL, portable.G_MOMENTS), place(portable.SLOPE, portable.G_MOMENTS, scale)]
        places += [place(portable.PEAK, portable.G_PEAK), arg.view(torch.float32), terms[portable.TOTAL.value]]
    padded = [functional.pad(one, (0, more), value=0.0 if at else UNSEEN) for at, one in enumerate(places)]
    return torch.stack(padded, 2).flatten(0, 1)
