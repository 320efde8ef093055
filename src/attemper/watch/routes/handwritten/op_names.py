"""Op names: which ops of torch make, keep and use a matrix of logits or of weights."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from ...._torch_private import HigherOrderOperator

# by the name in the op's schema, without the underscore of the in-place form
PRODUCTS = {"bmm": (0, 1), "mm": (0, 1), "matmul": (0, 1), "mv": (0, 1), "baddbmm": (1, 2), "addmm": (1, 2)}
LINEAR = "linear"  # one op in inference mode only
SOFTMAXES = {"_softmax", "_safe_softmax", "softmax"}
LOG_SOFTMAXES = {"_log_softmax", "log_softmax"}
SAFE = "_safe_softmax"  # of SDPA's math backend only
SCALINGS = {"mul", "div"}
RESHAPING = {"_unsafe_view", "reshape"}  # if they copy; a view shares its storage and need not be followed
SELECTING = {"topk", "gather", "scatter", "index_select", "index", "constant_pad_nd"}  # some entries, or more entries
EXPONENTIALS = {"exp", "exp2", "sigmoid"}
KEEPING = {  # entry by entry: logits stay logits, weights stay weights
    *SCALINGS,
    *("add", "sub", "neg", "tanh", "masked_fill", "where", "clamp", "clamp_min", "clamp_max", "leaky_relu"),
    *("maximum", "minimum", "max", "nan_to_num", "_to_copy", "to", "clone", "copy", "contiguous"),
    *("native_dropout", "dropout", "feature_dropout", "cat", "expand", "tril", "triu"),
    *RESHAPING,
    *SELECTING,
    *EXPONENTIALS,
}
CARRYING = {"native_layer_norm", "layer_norm", "rms_norm", "gelu", "silu", "relu", "rsub", "repeat", "stack"}
"""Other ops whose result belongs to the sequence of their input."""

FOREIGN = "an attention op that is not torch's"
FLEX = "flex_attention"
COLLECTIVE = "a collective"  # what ranks exchange; waiting for it is none
OTHERS = {*SOFTMAXES, *LOG_SOFTMAXES, LINEAR, FOREIGN, FLEX, COLLECTIVE}
_ATTENTION = re.compile(r"attn|attention|^attemper::\w*forward")
_COLLECTIVE = re.compile(r"(c10d|_c10d_functional|_dtensor|symm_mem|cplib)::(?!.*(wait|barrier|_wrap_tensor))")


@cache
def is_torchs(func: Any) -> bool:
    """Whether an op is torch's or attemper's."""
    return isinstance(func, HigherOrderOperator) or func.namespace in (
        "aten",
        "attemper",
        "prims",
        "_c10d_functional",
        "c10d",
    )


@cache
def is_followed(func: Any) -> bool:
    """Whether an op is followed. Half of a model's ops are views, and following one costs time."""
    name = op_name(func)
    return name in PRODUCTS or name in KEEPING or name in CARRYING or name in OTHERS


@cache
def op_name(func: Any) -> str:
    """``aten::masked_fill_`` → ``masked_fill``; one name for all collectives, one for attention ops from outside torch."""
    if isinstance(func, HigherOrderOperator):
        return func.name()
    name: str = func._schema.name
    if not name.startswith("aten::"):
        if _COLLECTIVE.match(name) is not None:
            return COLLECTIVE
        attends = _ATTENTION.search(name) is not None and "backward" not in name
        return FOREIGN if attends else name
    name = name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name
