"""The other two scores of the literature, with the same signs as the dot product.

additive.py   additive_attention(): Bahdanau's score; checks its weight, then goes the way of attention()
cosine.py     cosine_attention(): query and key brought to length 1, then the way of attention()
"""

from .additive import additive_attention
from .cosine import cosine_attention

__all__ = ["additive_attention", "cosine_attention"]
