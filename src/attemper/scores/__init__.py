"""The other two scores of the literature, measured sign by sign as the dot product is: additive (Bahdanau) and cosine."""

from .additive import additive_attention
from .cosine import cosine_attention

__all__ = ["additive_attention", "cosine_attention"]
