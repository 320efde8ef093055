"""Every private name of torch that attemper uses, and why. Other files import them from here; a test looks for strays.

The number behind a name is a release of torch that has it. attemper needs 2.11, which has them all. When a new torch breaks
something, look here first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import _foreach_zero_ as _foreach_zero_  # 2.0; many tensors in one launch

# `at_rest` below uses these to see whether anything traces, transforms or records a call. The public functions for that are
# several times slower, or do not exist.
from torch._C import _AutoDispatchBelowAutograd as _AutoDispatchBelowAutograd  # 2.0; runs an op without autograd
from torch._C import _current_graph_task_id as _current_graph_task_id  # 2.0; -1 unless a backward runs
from torch._C import (
    _disabled_torch_function_impl as _disabled_torch_function_impl,
)  # 2.0; what nn.Parameter has, see biases.py
from torch._C import _dispatch_keys as _dispatch_keys  # 2.0; what a tensor is, beyond its Python type
from torch._C import _get_dispatch_stack_at as _get_dispatch_stack_at  # 2.0; which dispatch mode is on top
from torch._C import _get_function_stack_at as _get_function_stack_at  # 2.2; which function mode is there
from torch._C import _get_tracing_state as _get_tracing_state  # 2.0; None unless torch.jit.trace runs
from torch._C import _is_any_autocast_enabled as _is_any_autocast_enabled  # 2.2; on any device, in one question
from torch._C import _is_torch_function_mode_enabled as _is_torch_function_mode_enabled  # 2.2
from torch._C import _len_torch_dispatch_stack as _len_torch_dispatch_stack  # 2.0; how many dispatch modes are active
from torch._C import _len_torch_function_stack as _len_torch_function_stack  # 2.2; how many function modes are active
from torch._C import _set_grad_enabled as _set_grad_enabled  # 2.0; torch.no_grad() for code that runs at every call
from torch._C import (  # public, without a wrapper in Python
    is_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
)
from torch._C._autograd import _profiler_enabled as _profiler_enabled  # 2.0
from torch._C._functorch import TransformType as TransformType  # 2.0; which of functorch's transforms an interpreter is
from torch._C._functorch import (
    is_functorch_wrapped_tensor as is_functorch_wrapped_tensor,
)  # 2.0; its numbers cannot be read
from torch._C._functorch import peek_interpreter_stack as peek_interpreter_stack  # 2.0; None outside vmap, grad, jvp
from torch._ops import HigherOrderOperator as HigherOrderOperator  # 2.0; flex_attention is one, for a watch
from torch._ops import OpOverload as OpOverload  # 2.0; the type of torch.ops.….default
from torch.autograd import Function, forward_ad
from torch.nn.modules.batchnorm import _NormBase as _NormBase  # 2.0; the base of every batch and instance norm

# 2.0; while one of them holds a hook, any module may run code that is not its own
from torch.nn.modules.module import _global_backward_hooks as _global_backward_hooks
from torch.nn.modules.module import _global_backward_pre_hooks as _global_backward_pre_hooks
from torch.nn.modules.module import _global_forward_hooks as _global_forward_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as _global_forward_pre_hooks

# described in torch's notes on __torch_dispatch__, but in no public module
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # 2.0
from torch.utils._python_dispatch import _pop_mode as _pop_mode  # 2.0; suspends a mode while attemper's own code runs
from torch.utils._python_dispatch import _push_mode as _push_mode  # 2.0

# containers that vmap, compile and export look into: Vitals are one
from torch.utils._pytree import register_pytree_node as register_pytree_node  # 2.2
from torch.utils._pytree import tree_leaves as tree_leaves  # 2.2

# where a compiled function calls from, as its frame names it: the module, and the code in it; 2.0
DYNAMO_MODULE, DYNAMO_WRAPPER = "torch._dynamo.eval_frame", "compile_wrapper"


def at_rest() -> bool:
    """Whether an op would go straight to its kernel: no mode, transform, trace, profiler or forward-mode derivative.

    False too under enable_grad inside inference mode: grad mode is on there, but autograd records nothing.
    """
    return not (
        _len_torch_dispatch_stack()
        or _is_torch_function_mode_enabled()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or _profiler_enabled()
        or forward_ad._current_level >= 0  # 2.0
        or (is_inference_mode_enabled() and is_grad_enabled())
    )


def may_be_rewritten() -> bool:
    """Whether a function mode is active that may call a function of torch with other arguments, or not at all."""
    if not _is_torch_function_mode_enabled():
        return False
    active = [_get_function_stack_at(index) for index in range(_len_torch_function_stack())]
    return any(type(mode).__name__ != "DeviceContext" for mode in active)  # that one belongs to a default device


def jagged_sdpa() -> tuple[Any, str]:
    """The function that SDPA calls for jagged tensors, by whatever name it is called itself, and the module that has it.

    2.2; torch imports that module at the first such call, and ``attention()`` needs none of it.
    """
    from torch.nested._internal import ops

    return ops, "jagged_scaled_dot_product_attention"


def is_autocast_on(device: str) -> bool:
    """Whether autocast lowers tensors of this kind of device. Meta tensors know no autocast."""
    return _is_any_autocast_enabled() and device != "meta" and is_autocast_enabled(device)


def apply_of(function: type[Function]) -> Callable[..., Any]:
    """The `apply` of an autograd Function for a call that no functorch transform sees: without the layer that looks for one.

    2.0; `Function.apply` calls it, after it has looked at every argument.
    """
    return super(Function, function).apply  # type: ignore[misc]


def is_functionalizing() -> bool:
    """Whether ``torch.func.functionalize`` runs, which has no rule for a Function."""
    interpreter = peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == TransformType.Functionalize


def is_forward_mode() -> bool:
    """Whether a forward-mode derivative is being computed."""
    return forward_ad._current_level >= 0


def mark_constant(function: object) -> None:
    """Let Dynamo call a function while it traces and take the result as a constant.

    ``torch.compiler.assume_constant_result`` does this (2.1), but imports all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def mark_static(tensor: object) -> None:
    """Tell a compiled graph that a tensor stays where it is, so that CUDA graphs may write into it.

    ``torch._dynamo.mark_static_address`` does this (2.1), but imports all of Dynamo.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def dynamo_counters() -> Any:
    """What Dynamo counts: graphs, graph breaks, and what Inductor skipped (2.0)."""
    from torch._dynamo.utils import counters  # imports all of Dynamo

    return counters


# torch.distributed.pipelining runs a stage once to learn the shapes of its tensors: in these functions, 2.4 and 2.13
PIPELINE_STAGE = "torch.distributed.pipelining.stage"
DRY_RUNS = {"_shape_inference", "_forward_metadata_inference"}


def process_groups() -> list[Any]:
    """All process groups that this process is in (2.0); none in a torch without distributed."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return [] if module is None else [*module._world.pg_map]


def resolve_process_group(name: str) -> Any:
    """The process group that a functional collective names (2.2)."""
    from torch.distributed import distributed_c10d

    return vars(distributed_c10d)["_resolve_process_group"](name)


def default_store() -> Any:
    """Where the ranks of a process group meet without a collective that could hang (2.0)."""
    from torch.distributed.distributed_c10d import _get_default_store  # a torch without distributed does not have it

    return _get_default_store()


def raise_if_false(condition: Any, sentence: str) -> None:
    """In a compiled graph, which raises when it runs."""
    torch._assert_async(condition, sentence)
