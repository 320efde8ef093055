"""Attention with its projections, as nn.Modules that drop into existing models."""

from .additive import AdditiveAttention as AdditiveAttention
from .multi_head import MultiHeadAttention as MultiHeadAttention
