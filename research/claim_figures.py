"""claim_figures: the numbers of each claim that the page draws side by side, their labels, and the reference line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from attemper.errors import InputError


class ClaimFigure(NamedTuple):
    """Numbers of one unit as bars: label → the words by which a number of the claim is found. ``lane`` marks with and without."""

    unit: str
    bars: Mapping[str, str]
    reference: tuple[float, str] | None = None
    log: bool = False


def _ratios(statistic: str) -> dict[str, str]:
    without = "without the scale ÷ with it"
    return {
        f"{statistic} at the softmax, before training": f"{statistic} gradient at the softmax's input before training, {without} "
        "(d_k = 128, 128 keys)",
        f"{statistic} at q, before training": f"{statistic} gradient at q before training, {without} (d_k = 128, 128 keys)",
        f"{statistic} at q, trained, largest": f"{statistic} gradient at q after 800 training steps, {without}, largest",
        f"{statistic} at q, trained, smallest": f"{statistic} gradient at q after 800 training steps, {without}, smallest",
    }


_GRADIENTS = ClaimFigure(
    "gradient without the scale ÷ with it", {**_ratios("median"), **_ratios("RMS")}, (1, "equal"), log=True
)
_SOFTMAX = "RMS gradient at the softmax's input before training, without the scale ÷ with it"
_MATCH = "weight of a key equal to q beside 1024 others"

FIGURES: dict[str, ClaimFigure] = {
    "C1": ClaimFigure(
        "Var(q·k) ÷ d_k",
        {"unit entries, least": "smallest Var", "unit entries, most": "largest Var", "fan-in": "fan-in", "nn.Linear": "nn.Linear",
         "Xavier": "Xavier", "GPT-2": "GPT-2"},
        (1, "variance is d_k"),
    ),
    "C2": ClaimFigure(
        "variance of q·k/√d_k",
        {"unit entries, least": "smallest", "unit entries, most": "largest", "fan-in": "fan-in", "nn.Linear": "nn.Linear",
         "Xavier": "Xavier", "GPT-2": "GPT-2"},
        (1, "variance 1"),
    ),
    "C3": ClaimFigure("largest minus smallest of 1000 scores", {"d_k = 2": "d_k = 2", "d_k = 5": "d_k = 5"}),
    "C4": ClaimFigure(
        "weight",
        {"softmax([7, 3]), 7": "[7, 3]), weight 1", "softmax([7, 3]), 3": "[7, 3]), weight 2",
         "softmax([25, 2, −3]), 25": "-3]), weight 1", "softmax([25, 2, −3]), 2": "-3]), weight 2"},
    ),
    "C5": ClaimFigure(
        "logit std ÷ √(2 ln n)",
        {"half the weight, 16 keys": "half the weight ÷ √(2 ln n), 16 keys",
         "half, 1024 keys": "half the weight ÷ √(2 ln n), 1024 keys",
         "half, 8192 keys": "half the weight ÷ √(2 ln n), 8192 keys",
         "0.9 of it, 16 keys": "of the weight ÷ √(2 ln n), 16 keys",
         "0.9, 1024 keys": "of the weight ÷ √(2 ln n), 1024 keys", "0.9, 8192 keys": "of the weight ÷ √(2 ln n), 8192 keys"},
        (1, "√(2 ln n)"),
        log=True,
    ),
    "C6": _GRADIENTS,
    "C7": ClaimFigure(
        "RMS gradient without the scale ÷ with it, the factor √d_k set aside",
        {"at the softmax, before, 128 keys": f"{_SOFTMAX} (d_k = 128, 128", "before, 1024 keys": f"{_SOFTMAX} (d_k = 128, 1024",
         "at q, trained, largest": "RMS gradient at q after 800 steps, without ÷ with it, the factor √d_k set aside, largest",
         "at q, trained, smallest": "RMS gradient at q after 800 steps, without ÷ with it, the factor √d_k set aside, smallest"},
        (1, "equal"),
        log=True,
    ),
    "C8": ClaimFigure(
        "share of rows in which a float16 softmax that does not subtract the maximum overflows",
        {"no scale": "no scale (d_k", "÷ √d_k": "1/√d_k (d_k"},
    ),
    "C9": ClaimFigure("accuracy on recall", {"no scale": "without the scale", "÷ √d_k": "with 1/√d_k"}),
    "C10": ClaimFigure(
        "weight of a key equal to q, beside 1024 others", {"÷ d_k": f"{_MATCH}, under 1/d_k", "÷ √d_k": f"{_MATCH}, under 1/√d_k"}
    ),
    "C11": ClaimFigure(
        "weight of a key equal to q, beside 1024 others", {"÷ √d_model": "others, with √d_model", "÷ √d_k": "others, with √d_k"}
    ),
    "C12": ClaimFigure("additive score", {"largest": "largest additive", "smallest": "smallest additive"}, (1, "1")),
    "C13": ClaimFigure(
        "variance of the scores at d = 256 ÷ that at d = 16",
        {"additive, w of variance 1/d": "variance 1/d", "additive, w of variance 1": "variance 1:",
         "dot, no scale": "unscaled dot"},
        (1, "does not grow"),
    ),
    "C14": ClaimFigure(
        "mean top weight of trained language models",
        {"no scale, least": "mean top weight, the least", "no scale, most": "mean top weight, the most",
         "÷ √d_k, most": "of those trained with 1/√d_k, the most"},
    ),
    "C15": ClaimFigure(
        "held-out loss without the scale minus with it, nats",
        {"std 0.02, lr 0.0001": "nats (small init, lr 0.0001)", "std 0.02, lr 0.0003": "nats (small init, lr 0.0003)",
         "std 0.02, lr 0.001": "nats (small init, lr 0.001)", "unit variance, lr 0.0001": "nats (unit init, lr 0.0001)",
         "unit variance, lr 0.0003": "nats (unit init, lr 0.0003)", "unit variance, lr 0.001": "nats (unit init, lr 0.001)"},
        (0, "no difference"),
    ),
    "C16": ClaimFigure(
        "effective keys",
        {"of 1024, before training, no scale": "before training without",
         "of 1024, before training, ÷ √d_k": "before training with 1/√d_k",
         "of 64.5 visible, trained, no scale": "steps without", "of 64.5 visible, trained, ÷ √d_k": "steps with 1/√d_k"},
        log=True,
    ),
    "C17": ClaimFigure("numbers per token", {"input": "input", "one head": "one head", "heads joined": "joined"}),
    "C18": ClaimFigure("overlap of query subspaces (1: the same)", {"two heads": "two heads, mean", "two random": "two random"}),
    "C19": ClaimFigure("entropy early in training, nats", {"no scale": "training, without", "÷ √d_k": "training, with 1"}),
    "C20": ClaimFigure(
        "held-out loss without the scale minus with it, nats",
        {"1 layer": "nats, 1 layer", "2 layers": "nats, 2 layers", "4 layers": "nats, 4 layers", "8 layers": "nats, 8 layers"},
        (0, "no difference"),
    ),
    "C21": ClaimFigure(
        "times as fast as a loop", {"one pass": "that of a loop", "not counting the calls": "without the cost"}, (1, "as fast")
    ),
    "C22": ClaimFigure(
        "share that holds half of the squared gradient",
        {"entries of W_Q, no scale": "W_Q's entries that", "entries of W_K, no scale": "W_K's entries that",
         "entries of W_Q, ÷ √d_k": "the same of W_Q", "entries, if one query sent it": "if one query sent",
         "queries, no scale": "queries that hold half of the squared gradient, without",
         "queries, ÷ √d_k": "queries that hold half of the squared gradient, with 1/√d_k"},
    ),
    "C23": ClaimFigure("variance at d_k = 64 ÷ that at d_k = 1", {"a = 0.25": "a = 0.25", "a = 9": "a = 9"}, (64, "64")),
    "C24": ClaimFigure(
        "share of pairs that the most certain head gets right",
        {"'it'": "most certain of them", "by chance": "by chance", "'he', 'she'": "of those"}
    ),
    "C25": ClaimFigure("weight", {"of a word on itself": "on itself", "an even share, 1/n": "an even share, 1/n"}),
    "C26": ClaimFigure(
        "std of the logits after dividing by √d_model",
        {"1 head": "√d_model, 1 head", "8 heads": "√d_model, 8 heads", "96 heads": "√d_model, 96 heads",
         "W of std 0.02, 12 heads": "12288, 12 heads", "W of std 0.02, 96 heads": "12288, 96 heads"},
        (1, "what √d_k gives"),
    ),
    "C27": ClaimFigure(
        "growth of the logits' variance from width 256 to 4096",
        {"W of variance 1/d_model": "variance 1/d_model", "W of std 0.02": "std 0.02"},
        (1, "does not grow"),
        log=True,
    ),
    "C28": ClaimFigure(
        "times as fast with the scale", {"attemper's kernel": "median of how many times as fast, attemper",
                                         "three lines of torch": "median of how many times as fast, three"}, (1, "as fast")
    ),
    "C29": ClaimFigure(
        "weight of a key equal to q, among 1024",
        {"d_k = 16": "d_k = 16", "d_k = 64": "d_k = 64", "d_k = 128": "d_k = 128", "d_k = 512": "d_k = 512"},
    ),
    "C30": ClaimFigure(
        "std of the logits after 1/√d_k",
        {"fan-in": "fan-in", "nn.Linear": "torch.nn.Linear", "a trained head, least": "smallest std",
         "a trained head, most": "largest std"},
        (1, "1"),
    ),
    "C31": ClaimFigure(
        "share of 66 model families", {"d_k = 64": "d_k = 64", "d_k = 128": "d_k = 128", "d_k = 512": "d_k = 512"}
    ),
    "C32": ClaimFigure(
        "share of draws whose range in 5 dimensions is 3.7 times that in 2",
        {"9 scores": "draws of 9", "1024 scores": "draws of 1024"}
    ),
    "C33": ClaimFigure("tanh's for each pair of tokens", {"additive": ", additive", "dot product": ", dot product"}),
    "C34": ClaimFigure(
        "largest rise of the loss above its lowest, in first losses",
        {"SGD, smallest first gradient": "SGD, smallest first", "SGD, largest": "SGD, largest",
         "Adam, smallest first gradient": "Adam, smallest first", "Adam, largest": "Adam, largest"},
    ),
    "C35": ClaimFigure(
        "effective keys of 256",
        {"additive": "additive score", "dot, no scale": "without a scale", "dot, ÷ √d": "with 1/√d"},
    ),
    "C36": ClaimFigure(
        "share of queries whose largest dot product has the largest cosine", {"d_k = 16": "d_k = 16", "d_k = 64": "d_k = 64"}
    ),
}  # fmt: skip


def drawn(claim: Mapping[str, Any]) -> dict[str, Any] | None:
    """A claim's figure as plain data, with its numbers; None where it has no numbers."""
    figure = FIGURES.get(claim["id"])
    numbers = {**claim["numbers"], **claim["context"]}
    if figure is None or not numbers:
        return None
    return {
        "unit": figure.unit,
        "log": figure.log,
        "reference": None if figure.reference is None else {"at": figure.reference[0], "name": figure.reference[1]},
        "bars": [{"name": name, "value": _found(claim["id"], numbers, words)} for name, words in figure.bars.items()],
    }


def _found(claim: str, numbers: Mapping[str, float], words: str) -> float:
    found = [name for name in numbers if words in name]
    exact = [name for name in found if name.endswith(words) or name.startswith(words)] if len(found) > 1 else found
    if len(exact) != 1:
        raise InputError(f"{claim}: the words {words!r} must be those of one number; they are in {exact or found}.")
    return numbers[exact[0]]
