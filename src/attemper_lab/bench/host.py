"""host: what Python and torch take on the host: for a call, for a watched layer, for a compiled step that is instrumented.

Shapes are so small that nobody waits for a kernel. On a CPU a time is that of the processor in the calling thread, so that other
processes do not count (of compiled steps the wall clock); on a GPU it begins on an idle device and ends when the call returns.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attemper import attention, measure, sdpa

from ..timing import interleave
from . import BenchRow, watch, watch_compiled, watch_cuda
from .calls import timed, without_grad
from .watch_compiled import Note

LENGTHS = (4, 64)
MODES = {
    "no_grad": "no_grad",
    "grad": "grad mode",  # in which nothing requires a gradient
    "forward": "autograd",
    "backward": "+ backward",
}
"""How a call is made: the name in JSON and the name in tables. The last two have inputs that require gradients."""
CALL_ROUNDS, BATCH = 16, 2e-4
"""Rounds of calls for each round of models, and the least seconds of a timed step: most are over before the system gives the
processor to another process for some milliseconds, which would otherwise strike the slower candidate."""


@dataclass(frozen=True)
class SmallCall:
    """The arguments of one small call: query, key and value (1, 8, n, 64), a learned scale, and masks (1, 1, n, n)."""

    query: Tensor
    key: Tensor
    value: Tensor
    gain: Tensor
    keep: Tensor
    bias: Tensor

    @classmethod
    def make(cls, length: int, tracked: bool, dtype: torch.dtype, device: str) -> SmallCall:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, device="cpu").normal_(generator=generator).to(device, dtype)

        query, key, value = (normal(1, 8, length, 64).requires_grad_(tracked) for _ in range(3))
        gain = normal(8).abs().requires_grad_(tracked)
        bias = normal(1, 1, length, length)
        return cls(query, key, value, gain, torch.ones_like(bias, dtype=torch.bool).tril(), bias)

    def flat(self) -> SmallCall:
        """The call without a batch: query, key and value (8, n, 64)."""
        tracked = self.query.requires_grad
        query, key, value = (tensor.detach()[0].requires_grad_(tracked) for tensor in self.inputs)
        return replace(self, query=query, key=key, value=value)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return (self.query, self.key, self.value)


Called = Callable[[SmallCall], Tensor]

TORCH: dict[str, Called] = {
    "plain": lambda t: scaled_dot_product_attention(*t.inputs),
    "causal": lambda t: scaled_dot_product_attention(*t.inputs, is_causal=True),
    "keep": lambda t: scaled_dot_product_attention(*t.inputs, attn_mask=t.keep),
    "bias": lambda t: scaled_dot_product_attention(*t.inputs, attn_mask=t.bias),
    "gain": lambda t: scaled_dot_product_attention(t.query * t.gain[:, None, None], t.key, t.value, scale=1.0),
    "flat": lambda t: scaled_dot_product_attention(*t.inputs),
}
"""torch's SDPA with each kind of arguments. It takes no tensor as its scale, so ``gain`` multiplies the query."""
CALLS: dict[str, tuple[str, Called]] = {
    "attention, all signs": ("plain", lambda t: attention(*t.inputs).output),
    "attention, signs=()": ("plain", lambda t: attention(*t.inputs, signs=()).output),
    "sdpa": ("plain", lambda t: sdpa(*t.inputs)),
    "measure": ("plain", lambda t: measure(t.query, t.key).entropy),
    "causal": ("causal", lambda t: attention(*t.inputs, causal=True).output),
    "boolean mask": ("keep", lambda t: attention(*t.inputs, mask=t.keep).output),
    "float mask": ("bias", lambda t: attention(*t.inputs, mask=t.bias).output),
    "learned scale": ("gain", lambda t: attention(*t.inputs, scale=t.gain).output),
    "3-d input": ("flat", lambda t: attention(*t.inputs).output),
}
"""attemper's calls, each with the key in TORCH of the call that computes the same output. All signs, unless named otherwise."""
ALL_SIGNS = "attention, all signs"

LAYERED = {**watch.CANDIDATES, "by_hand": "attention() by hand"}
"""Candidates in a model: name in JSON → name in tables. By hand: attention() replaces torch's SDPA, its signs unread."""
STEPS = 8
"""Steps of one timed call of a model."""
TOKENS = 16
GPT2: dict[str, Any] = {"n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 64, "vocab_size": 1000}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


def rows(*, quick: bool, rounds: int, budget: float, devices: tuple[str, ...], note: Note) -> list[BenchRow]:
    """Calls, watched layers and, unless `quick`, compiled steps on each device. A row's `table` says which of them it is."""
    measured = []
    for device in devices:
        for length in LENGTHS[: 1 if quick else None]:
            for mode in MODES:
                note(f"host: calls on {length} tokens, {MODES[mode]}, on {device}")
                measured += call_rows(length, mode, device, rounds=CALL_ROUNDS * rounds, budget=budget)
        for name in list(MODELS)[: 1 if quick else None]:
            if name in HUGGING_FACE and importlib.util.find_spec("transformers") is None:
                note(f"host: {name} is left out: transformers is missing. Type pip install 'attemper[hf]'")
                continue
            for training in (False, True):
                note(f"host: watched layers of {name}, {'training step' if training else 'forward'}, on {device}")
                measured += layer_rows(name, training, device, rounds=rounds, budget=budget)
        if not quick and importlib.util.find_spec("transformers"):
            measured += compiled_rows(device, rounds=rounds, budget=budget, note=note)
    return measured


def call_rows(length: int, mode: str, device: str, *, rounds: int, budget: float) -> list[BenchRow]:
    """Time every call of one mode, ours and torch's, in the same rounds; one row for each of ours."""
    dtype = dtype_on(device)
    whole = SmallCall.make(length, mode in ("forward", "backward"), dtype, device)
    runs = {f"torch, {kind}": _in_mode(mode, call, kind, whole) for kind, call in TORCH.items()}
    runs |= {name: _in_mode(mode, call, kind, whole) for name, (kind, call) in CALLS.items()}
    times = timed(runs, rounds=rounds, budget=budget, batch=BATCH, device=device, host=True)
    return [
        {
            "table": "calls",
            "call": name,
            "length": length,
            "mode": mode,
            "dtype": str(dtype).removeprefix("torch."),
            "device": device,
            "rounds": times.rounds,
            "us": _microseconds(times.spread(name)),
            "torch_us": _microseconds(times.spread(f"torch, {kind}")),
            "over_torch": times.speed(f"torch, {kind}", name).to_dict(),
            "over_all_signs": times.speed(ALL_SIGNS, name).to_dict(),
        }
        for name, (kind, _) in CALLS.items()
    ]


def dtype_on(device: str) -> torch.dtype:
    """The dtype that people compute attention in on such a device."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def _in_mode(mode: str, call: Called, kind: str, whole: SmallCall) -> Callable[[], object]:
    tensors = whole.flat() if kind == "flat" else whole
    if mode == "no_grad":
        return without_grad(lambda: call(tensors))
    if mode != "backward":
        return lambda: call(tensors)
    upstream = torch.ones_like(call(tensors))
    leaves = (*tensors.inputs, tensors.gain) if kind == "gain" else tensors.inputs
    return lambda: torch.autograd.grad(call(tensors), leaves, upstream, allow_unused=True)


def _encoder(device: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device=device)
    return nn.TransformerEncoder(layer, 2)


def _bert(device: str) -> nn.Module:
    import transformers

    config: dict[str, Any] = {**watch.MINILM, "vocab_size": 1000}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with torch.device(device):
        model: nn.Module = transformers.BertModel(transformers.BertConfig(**config))
    return model


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "nn.TransformerEncoder": _encoder,
    "MiniLM-sized BERT": _bert,
    "GPT-2, 6 layers": lambda device: watch_cuda.make("gpt2", GPT2, device),
}
"""How each is made on a device; random weights, no dropout."""
HUGGING_FACE = tuple(MODELS)[1:]


def layer_rows(name: str, training: bool, device: str, *, rounds: int, budget: float) -> list[BenchRow]:
    """Time a model unwatched, watched, replaced, and with attention() patched in by hand; one row each."""
    model, hugging_face = MODELS[name](device).to(dtype_on(device)).train(training), name in HUGGING_FACE
    layers: int = model.config.num_hidden_layers if hugging_face else len(model.layers)  # type: ignore[arg-type, assignment, union-attr]
    shape = (1, TOKENS) if hugging_face else (2, TOKENS, 64)
    words = torch.randint(1000, shape, device=device)
    step = _step(words if hugging_face else words.to(dtype_on(device)) / 1000, training)
    with by_hand() as count:
        step(model)
    with watch.open_calls(model, step, STEPS, replace=hugging_face) as calls:
        if len(count) == layers:  # torch's own encoder skips SDPA on its fast path
            calls["by_hand"] = lambda: _by_hand(model, step)
        times = interleave(calls, rounds=rounds, warmup=3, budget=budget, device=device, host=True)
    case = {"model": name, "layers": layers, "training": training, "device": device, "rounds": times.rounds}
    return [
        {
            "table": "layers",
            "candidate": candidate,
            **case,
            "us": _microseconds(times.spread(candidate), STEPS),
            "us_per_layer": _microseconds(times.above(candidate, "unwatched"), STEPS * layers),
            "cost": times.speed("unwatched", candidate).to_dict(),
        }
        for candidate in calls
    ]


def _step(batch: Tensor, training: bool) -> Callable[[nn.Module], object]:
    """A forward pass, or a training step without an optimizer."""

    def step(model: nn.Module) -> object:
        with nullcontext() if training else torch.no_grad():
            outputs = model(batch)
        output: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
        if training:
            model.zero_grad(set_to_none=True)
            output.float().square().mean().backward()
        return output

    return step


def _by_hand(model: nn.Module, step: Callable[[nn.Module], object]) -> object:
    with by_hand():
        return [step(model) for _ in range(STEPS)][-1]


@contextmanager
def by_hand() -> Iterator[list[None]]:
    """Replace torch's SDPA by attention() with all signs; the list gets an entry with each call."""
    count: list[None] = []

    def attend(  # the arguments are torch's
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        count.append(None)
        options: dict[str, Any] = {"mask": attn_mask, "causal": is_causal, "scale": scale, "dropout": dropout_p}
        return attention(query, key, value, **options).output

    before = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attend
    try:
        yield count
    finally:
        nn.functional.scaled_dot_product_attention = before


def compiled_rows(device: str, *, rounds: int, budget: float, note: Note) -> list[BenchRow]:
    """A compiled model and the same instrumented, in inference and training; what cannot be compiled is a row that says why."""
    measured: list[BenchRow] = []
    for training in (False, True):
        case = {"model": "GPT-2, 6 layers", "training": training, "batch": 1, "length": TOKENS, "device": device}
        options: dict[str, Any] = {"rounds": rounds, "budget": budget, "note": note, "modes": ("default",)}
        measured += watch_compiled.rows(
            lambda: watch_cuda.make("gpt2", GPT2, device).to(dtype_on(device)), case, **options
        )
    return [{"table": "compiled", **row} for row in measured]


def _microseconds(spread: Any, parts: int = 1) -> dict[str, float]:
    return {name: round(1e6 * value / parts, 2) for name, value in spread.to_dict(digits=12).items()}
