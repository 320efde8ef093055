"""Attention with its projections, as nn.Modules that take the place of those in existing models.

checks.py             the arguments of a module, checked
multi_head.py         MultiHeadAttention: projections, rule, attention(), output projection
masks.py              torch.nn.MultiheadAttention's masks as one mask of attention()
additive.py           AdditiveAttention: projections, additive_attention()
vitals_mixin.py       the vitals of the last call, kept for those who asked
state_dict_errors.py  why a state dict does not fit
"""

from .additive import AdditiveAttention as AdditiveAttention
from .multi_head import MultiHeadAttention as MultiHeadAttention
