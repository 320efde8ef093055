"""watch_cuda: what watching costs models of the size that people train: forward passes and training steps on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attemper.extension.files import load

from ..timing import interleave
from . import BenchRow, watch_compiled
from .watch import cost_rows, open_calls

STEPS = 8
"""Steps of one timed call."""
SUBJECTS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "GPT-2-medium": ("gpt2", {"n_layer": 24, "n_head": 16, "n_embd": 1024, "n_positions": 1024}, 8, 1024),
    "Llama, 1B shape": (
        "llama",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        },
        2,
        4096,
    ),
}
"""Name, family and config of Hugging Face, batch, tokens; bfloat16, random weights."""


def rows(*, quick: bool, rounds: int, budget: float, device: str, note: Callable[[str], None]) -> list[BenchRow]:
    """Time every candidate on every model, forward and training step; cost is the time over the unwatched."""
    all_rows = []
    for name, (family, config, batch, tokens) in list(SUBJECTS.items())[: 1 if quick else None]:
        model = make(family, config, device).to(torch.bfloat16)
        ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=device)
        for training in (False, True):
            note(f"watch: {name}, {batch} × {tokens} tokens, {'training step' if training else 'forward'}, on {device}")
            model.train(training)
            with open_calls(model, _step(ids, training), STEPS) as calls:
                times = interleave(calls, rounds=rounds, warmup=3, budget=budget, device=device)
            case = {
                "model": name,
                "training": training,
                "batch": batch,
                "length": tokens,
                "padded": False,
                "device": device,
            }
            measured = cost_rows(times, case, STEPS)
            for row in measured:
                note(json.dumps(row))  # a kill loses nothing
            all_rows += measured
        del model
        torch.cuda.empty_cache()
        if name == "GPT-2-medium":
            case = {"model": name, "training": True, "batch": batch, "length": tokens, "device": device}
            all_rows += watch_compiled.rows(
                lambda family=family, config=config: make(family, config, device).to(torch.bfloat16),  # type: ignore[misc]
                case,
                rounds=rounds,
                budget=budget,
                note=note,
                modes=watch_compiled.MODES[: 1 if quick else None],
            )
            torch.cuda.empty_cache()
    return all_rows


def make(family: str, config: dict[str, Any], device: str) -> Any:
    """A causal language model of Hugging Face, with random weights, which are drawn on the device, and without dropout."""
    transformers = load("bench: watch", "transformers", "hf")
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **config, **dropped, use_cache=False)
        )


def _step(ids: torch.Tensor, training: bool) -> Callable[[nn.Module], object]:
    """A forward pass, or a training step without an optimizer, of any causal language model of Hugging Face."""

    def step(model: nn.Module) -> object:
        if not training:
            with torch.no_grad():
                return model(ids).logits
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss

    return step
