"""Run: every call of attemper's functions, from its arguments to its kernel and back. There is no other way in."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from .._torch_private import _AutoDispatchBelowAutograd, _get_tracing_state, is_forward_mode, is_functionalizing
from ..errors import InputError
from ..kernels import reference
from ..kernels.contract import (
    ALL_SIGNS,
    BIT,
    HALVES,
    N_GRADS,
    Problem,
    Results,
    band,
    gradient_bits,
    is_recording,
    measuring_dtype,
    without_autocast,
)
from ..kernels.guard import PLAIN, RECORDED
from ..vitals import SIGNS, Attended, Vitals, in_dtype, in_shape, rounded_off
from .autograd import KernelCall, OpFunction, Packed, PackedSigns, apply_kernel, check_no_tangent
from .call import Call, Offsets, Signs, check_signs, prepare
from .call_hooks import TallyTarget, call_hooks, current_target, tallying
from .ops import FORWARD, bits_of, with_bits_of_gradients
from .parts.compute import kernel_of
from .parts.jagged import attend_sequences, is_jagged
from .shapes import broadcast_like_torch, check_gain
from .tally import add_packed, add_vitals, surviving


class Execution(NamedTuple):
    """How a call runs, apart from what it computes."""

    kernel: str = "auto"
    detached: bool = False
    """Its signs get no gradients, which takes less time and memory."""
    tally: TallyTarget | None = None
    """Where its vitals are added besides; None: to the target of the module that runs, if there is one."""


AS_USUAL = Execution()
_bits_of = cache(bits_of)  # for calls that Dynamo does not trace


def attend(
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    signs: Signs,
    execution: Execution,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    documents: Offsets = None,
    sink: Tensor | None = None,
    no_value: str | None = None,
    like_torch: bool = False,
    grouped: bool = True,
) -> Attended:
    """Check a call, choose its kernel and run it.

    Args:
        where: the name of the called function, for errors.
        no_value: what the error tells the user to do if value is None; without it, value may be None.
        like_torch: tensors broadcast as in torch's SDPA, and errors name its arguments.
        grouped: whether there may be fewer key heads than query heads.
    """
    names = SIGNS if signs is SIGNS or (type(signs) is str and signs == "all") else check_signs(where, signs)
    if int in (type(scale), type(softcap), type(dropout)):
        scale, softcap, dropout = _as_float(scale), _as_float(softcap) if softcap else softcap, _as_float(dropout)
    simple = type(dropout) is float and dropout == 0.0 and documents is sink is None
    if simple and not torch.compiler.is_compiling() and (value is not None or no_value is None):
        flat, q, k, v = type(query) is Tensor and query.dim() == 3, query, key, value
        flat = flat and _is_flat(key, value, mask, scale)
        if flat:
            q, k, v = query[None], key[None], None if value is None else value[None]
        attended = _attend_at_once(
            where, q, k, v, mask, causal, scale, window, softcap, names, execution, grouped, like_torch
        )
        if attended is not None:
            return _without_batch(attended) if flat else attended
    if like_torch and (is_jagged(query) or is_jagged(key) or is_jagged(value)):

        def dense(query: Tensor, key: Tensor, value: Tensor, documents: Offsets = None) -> Tensor:
            options: Any = {"causal": causal, "scale": scale, "dropout": dropout, "documents": documents}
            options |= {"no_value": no_value, "like_torch": True, "grouped": grouped}
            return attend(where, query, key, value, (), execution, **options).output

        return Attended(attend_sequences(dense, query, key, value, mask), Vitals())
    given = query
    if like_torch and value is not None:
        query, key, value = broadcast_like_torch(where, query, key, value, grouped)
    call = prepare(
        where, query, key, value, mask=mask, causal=causal, scale=scale, window=window, softcap=softcap, dropout=dropout,
        documents=documents, sink=sink, signs=names, no_value=no_value, torch_names=like_torch,
    )  # fmt: skip
    kernel = kernels.choose(where, call.request, execution.kernel)
    attended = as_asked(call, *run(call.problem, call.signs, kernel, execution))
    return attended if query is given or query.dtype is given.dtype else in_dtype(*attended, given.dtype)


def _is_flat(key: Any, value: Any, mask: Any, scale: float | Tensor | None) -> bool:
    """Whether the other tensors of a call with a query (H, L, E) lack nothing but the batch, too."""
    flat = all(type(tensor) is Tensor and tensor.dim() == 3 for tensor in (key, key if value is None else value))
    return flat and not any(isinstance(one, Tensor) and one.dim() > most for one, most in ((mask, 3), (scale, 1)))


class _FirstItem:
    """The signs of a call with a batch of one, without it."""

    def __init__(self, signs: Any) -> None:
        self._signs = signs

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in Results._fields:
            raise AttributeError(name)  # a block of memory has the batch
        sign = getattr(self._signs, name)
        if sign is None or not sign.requires_grad or is_recording():
            return None if sign is None else sign[0]
        with torch.inference_mode(False), torch.enable_grad():  # the call was recorded, wherever its sign is read
            return sign[0]


def _without_batch(attended: Attended) -> Attended:
    output, vitals = attended
    if vitals._signs is not None:
        vitals._signs = _FirstItem(vitals._signs)
    return Attended(None if output is None else output[0], vitals)


def _attend_at_once(
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    causal: bool | str,
    scale: float | Tensor | None,
    window: int | None,
    softcap: float | None,
    names: tuple[str, ...],
    execution: Execution,
    grouped: bool,
    like_torch: bool,
) -> Attended | None:
    """A plain call that no call hook is told of: compiled code checks it and runs it. None for any other.

    On the CPU that is any call, on a GPU one like an earlier one. The ways of `run` are the same for all calls, and take longer
    than a small one.
    """
    if value is not None and (call_hooks.current is not None or tallying.targets or execution.tally is not None):
        return None
    kernel = compiled_kernel(execution.kernel, getattr(query, "is_cpu", True))
    native = native_functions(kernel)
    gain, number = (scale, None) if isinstance(scale, Tensor) else (None, scale)
    readable = native is not None and (not like_torch or type(causal) is bool)
    state = native.guard(query, key, value, mask, gain) if readable else 0
    recorded, sign_bits = state > PLAIN and bool(names or value is not None), _bits_of(names)
    if not state:
        return None
    if mask is not None and mask.dim() < 4 == query.dim():
        mask = mask[(None,) * (4 - mask.dim())]
    if gain is not None and (gain.dim() == 3 or recorded or kernel != "cpu"):
        if query.dim() != 4 or key.dim() != 4 or query.shape[0] != key.shape[0]:
            return None  # `prepare` decides, also where a batch of 1 broadcasts
        try:  # compiled code would read a user's (H, 1, 1) as (B, H, Lq)
            gain = check_gain(where, gain, query, query.shape[:1], 4)
        except InputError:
            return None  # `prepare` names what is wrong first
    if recorded and any(tensor is not None and tensor.requires_grad for tensor in (query, key, mask, gain)):
        sign_bits |= gradient_bits(0 if execution.detached else sign_bits)
    if kernel == "cpu":
        answer = native.forward(
            query, key, value, mask, gain, causal, window, number, softcap, sign_bits, grouped, recorded
        )
        if answer is None:
            return None
        output, signs = answer
    else:
        answer = native.replay(query, key, value, mask, gain, causal, window, number, softcap, sign_bits, grouped)
        if answer is None:
            return None
        output, low, memory, layout = answer
        signs = kernels.load("triton").Signs(memory, layout, low, recorded)
    if recorded:
        left, right = band(causal, window, query.shape[2], key.shape[2])
        number = (query.shape[3] ** -0.5 if gain is None else 1.0) if number is None else number
        problem = Problem(query, key, value, mask, gain, None, None, None, None, number, left, right, softcap, 0.0)
        return Attended(*_record(problem, kernel, output, signs, names, execution.detached))
    return Attended(*_attended(output, signs, names))


def _as_float(number: Any) -> Any:
    """The float that an int stands for; what is no int, or too large for a float to hold it, is checked later."""
    return float(number) if type(number) is int and -(2**53) <= number <= 2**53 else number


def compiled_kernel(kernel: str, on_cpu: bool) -> str:
    """The kernel that compiled code may start for a call with this ``kernel=``."""
    if kernel != "auto":
        return kernel
    return "cpu" if on_cpu and next(iter(kernels.KERNELS)) == "cpu" else "triton"


def native_functions(kernel: str) -> Any:
    """The compiled functions for calls on this kernel: `guard`, and `forward` of "cpu" or `replay` of "triton"."""
    if kernel == "triton":
        return kernels.extension()
    return None if kernel != "cpu" or (library := kernels.native()) is None else library.offered


def as_asked(call: Call, output: Tensor, vitals: Vitals) -> Attended:
    """Results in the dtype and the shape of a call."""
    attended = Attended(output, vitals)
    if output is not None and output.dtype is not call.request.dtype:
        attended = in_dtype(output, vitals, call.request.dtype)
    return attended if len(call.shape) == 3 else in_shape(attended, call.shape)


def run(
    problem: Problem, names: tuple[str, ...], kernel: str, execution: Execution = AS_USUAL
) -> tuple[Tensor, Vitals]:
    """Run a checked problem on a kernel, for a tally and a call hook too.

    The output is (B, H, Lq, Ev), empty without values, and the signs named are (B, H, Lq) each. Calls with additive scores or
    without values are not added to a tally.
    """
    target = current_target() if execution.tally is None else execution.tally
    if target is not None and problem.value is not None and problem.weight is None:
        attended = _run_and_tally(problem, names, kernel, execution.detached, target)
    else:
        attended = _run(problem, names, kernel, execution.detached)
    call_hook = None if torch.compiler.is_compiling() else call_hooks.current
    if call_hook is not None and problem.value is not None:
        try:
            call_hook.computed(problem)
        except Exception as error:
            call_hook.failed(error)
    return attended


def _run(problem: Problem, names: tuple[str, ...], kernel: str, detached: bool) -> tuple[Tensor, Vitals]:
    if kernel == "reference":
        return _by_definition(problem, names)
    state = 0 if torch.compiler.is_compiling() else kernels.fast_guard()(*problem.tensors[:N_GRADS])
    if not state:
        return _run_op(problem, names, kernel)
    sign_bits, recorded = _bits_of(names), bool(state & RECORDED and (names or problem.value is not None))
    if recorded:
        sign_bits |= with_bits_of_gradients(problem, 0 if detached else sign_bits)
    with torch.no_grad():
        output, signs = kernel_of(problem, kernel).forward(problem, sign_bits, saved=recorded)
    return _record(problem, kernel, output, signs, names, detached) if recorded else _attended(output, signs, names)


def _record(
    problem: Problem, kernel: str, output: Tensor | None, signs: Any, names: tuple[str, ...], detached: bool
) -> tuple[Tensor, Vitals]:
    """A plain call that was computed, with its derivative."""
    fields: tuple[str, ...] = () if detached and output is not None else names
    names_packed = () if not fields or isinstance(signs, tuple) else _with_gradients(fields)
    packed = Packed(names_packed) if names_packed else None
    fields = () if packed else fields
    fields = fields if output is None else ("output", *fields)
    tensors = apply_kernel(*problem[:N_GRADS], KernelCall(problem, kernel, output, signs, fields, packed))
    if packed:
        output, tensor = (None, tensors) if output is None else tensors
        return _attended(output, PackedSigns(tensor, packed, signs), names)
    values = dict(zip(fields, tensors, strict=True))
    output, vitals = _attended(values.pop("output", None), signs, names)
    vitals.__dict__ |= values
    return output, vitals


@cache
def _with_gradients(names: tuple[str, ...]) -> tuple[str, ...]:
    """The signs with a derivative that a kernel measures for these, in the order in which a block packs them."""
    return tuple([name for name in SIGNS if name != "visible" and bits_of(names) & BIT[name]])


def _run_op(problem: Problem, names: tuple[str, ...], kernel: str) -> tuple[Tensor, Vitals]:
    check_no_tangent(problem, kernel)
    sign_bits = with_bits_of_gradients(problem, bits_of(names))
    if torch.compiler.is_compiling():
        tensors_out = OpFunction.apply(*_with_distinct_tensors(problem), sign_bits, kernel, False)
    elif not is_recording() and not is_forward_mode():
        # nothing is differentiated: a Function's apply, or the bare op's rule of autograd, costs as much as a small call
        with _AutoDispatchBelowAutograd():
            tensors_out = FORWARD(*problem, sign_bits, kernel)
    elif _get_tracing_state() is not None or is_functionalizing():
        tensors_out = FORWARD(*problem, sign_bits, kernel)  # a graph holds no Function
    else:
        tensors_out = OpFunction.apply(*problem, sign_bits, kernel, False)
    output, *signs = tensors_out
    if not torch.compiler.is_compiling():
        return _attended(output, Results(None, *signs), names)  # type: ignore[arg-type]
    results = Results(None, *signs)  # type: ignore[arg-type]
    return output, Vitals(**{name: getattr(results, name) for name in names})._with_low(results.lse_low)


def _with_distinct_tensors(problem: Problem) -> Problem:
    """The problem with views of key and value: Dynamo refuses one tensor as two arguments, as in ``attention(x, x, x)``."""
    key, value = problem.key, problem.value
    return problem._replace(key=key.view_as(key), value=None if value is None else value.view_as(value))


def _run_and_tally(
    problem: Problem, names: tuple[str, ...], kernel: str, detached: bool, target: TallyTarget
) -> tuple[Tensor, Vitals]:
    """A call whose vitals are added to a target, whichever were asked for. In a traced graph only those have gradients."""
    compiling = torch.compiler.is_compiling()
    if not names and kernel != "reference" and compiling:
        sign_bits = with_bits_of_gradients(problem, ALL_SIGNS)
        tensors_out = OpFunction.apply(*_with_distinct_tensors(problem), sign_bits, kernel, True)
        add_packed(problem, tensors_out, target)
        return tensors_out[0], Vitals()
    output, vitals = _run(problem, SIGNS, kernel, detached)
    (add_vitals if compiling else surviving(add_vitals))(problem, vitals, target)
    asked = Vitals(**{name: getattr(vitals, name) for name in names})
    return output, asked._with_low(vitals._lse_low, vitals._output_low)


def _attended(output: Any, signs: Any, names: tuple[str, ...]) -> tuple[Tensor, Vitals]:
    """The output, and the signs that were asked for: each becomes a tensor when it is first read."""
    vitals = Vitals.__new__(Vitals)  # the names were checked
    if names:
        vitals.__dict__ = {"_signs": signs, "_asked": names}
    return output, vitals


def _by_definition(problem: Problem, names: tuple[str, ...]) -> tuple[Tensor, Vitals]:
    with without_autocast(problem.query):
        definition = reference.define(_widened(problem))
    output: Any = None if definition.output is None else definition.output.to(problem.query.dtype)
    vitals = Vitals(**{name: getattr(definition, name) for name in names})
    if "lse" not in names:
        return output, vitals
    low = None
    traced = _get_tracing_state() is not None  # torch.jit.trace cannot record that bits are read as another dtype
    if definition.output is not None and output.dtype in HALVES and is_recording() and not traced:
        low = rounded_off(definition.output.detach(), output.detach())
    return output, vitals._with_low(reference.lse_low(definition), low)


def matrix(problem: Problem) -> Tensor:
    """The weights of a checked problem, (B, H, Lq, Lk)."""
    with without_autocast(problem.query):
        return reference.matrix(_widened(problem))


def _widened(problem: Problem) -> Problem:
    """Half precision raised to the dtype of vitals, for the definition. It reads no offset, so these are checked here."""
    if problem.documents is not None:
        sizes = problem.query.shape[2], problem.key.shape[2]
        problem = problem._replace(documents=torch.ops.attemper.checked_offsets(problem.documents, *sizes))
    wide = measuring_dtype(problem.query.dtype)
    value = None if problem.value is None else problem.value.to(wide)
    return problem._replace(query=problem.query.to(wide), key=problem.key.to(wide), value=value)
