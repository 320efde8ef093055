"""Checks the arguments of `explain`, and makes labels of words."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from rich.cells import cell_len, set_cell_size

from attemper import RULES, Rule, rule
from attemper.errors import InputError
from attemper.extension.calls import FACTS
from attemper.extension.tools import nearest, nearest_divisors

CORNER = 6
"""The rows and columns of a matrix that are kept to be shown."""

SCORES = {"dot": "sqrt_dk", "additive": "none", "cosine": "qk_norm"}
"""Each score and the rule that goes with it when none is named."""

D_K = 64
MOST_WORDS = 20_000
MOST_D_K = 8192  # the variance of a row of logits is measured through a d_k × d_k matrix: 0.5 GiB
MOST_ENTRIES = 2**27  # of one drawn matrix: 1 GiB
MOST_LAYERS = 10**6
MOST_CELLS = 24
"""The most terminal cells of a word that are shown; a wide letter (漢) takes two cells."""
MOST_LETTERS = 2 * MOST_CELLS  # accents take no cell, and one letter may have thousands


@dataclass(frozen=True)
class ExplainSettings:
    """A checked call of :func:`attemper.explain`."""

    text: str
    words: tuple[str, ...]
    rule: Rule
    score: str
    heads: int | None
    d_model: int
    d_k: int
    seed: int
    layer: int | None

    @property
    def count(self) -> int:
        """The number of words."""
        return len(self.words)

    @property
    def shown(self) -> tuple[str, ...]:
        """The first words, as labels of rows and columns."""
        return tuple(map(label_of, self.words[:CORNER]))

    @property
    def title(self) -> str:
        """The sentence in one line of 200 letters."""
        line = " ".join(map(label_of, self.words[:200]))
        return line if len(line) <= 200 else line[:199] + "…"

    @property
    def facts(self) -> str:
        """The settings in one line."""
        parts = [f"{self.count:,} {'words' if self.count > 1 else 'word'}", f"d_model {self.d_model}"]
        parts += [f"{self.heads} heads"] if self.heads else []
        parts += [f"d_k {self.d_k}", f"score {self.score}", f"seed {self.seed}"]
        parts += [f"layer {self.layer}"] if "layer" in self.rule.needs else []
        return " · ".join(parts)

    @property
    def model_heads(self) -> int | None:
        """The number of heads of the model; None where d_k does not divide d_model."""
        return self.heads or (self.d_model // self.d_k if self.d_model % self.d_k == 0 else None)


def check(
    text: str, rule_name: str | Rule | None, heads: int | None, score: str, d_model: int, d_k: int | None, seed: int,
    layer: int | None,
) -> ExplainSettings:  # fmt: skip
    """The settings, or an error that says what is wrong."""
    if not isinstance(text, str):
        raise InputError(f"explain(): `text` must be a str; got {type(text).__name__}. Use ' '.join(words).")
    text = text.encode("utf-8", "replace").decode()  # half a surrogate pair can be neither hashed nor printed
    words = tuple(text.split())
    if not words:
        raise InputError(
            f"explain(): `text` must hold at least one word; got {text!r}. For example: 'Love Apple phones'."
        )
    if len(words) > MOST_WORDS:
        raise InputError(
            f"explain(): `text` may hold at most {MOST_WORDS:,} words, since every word is compared with every other; "
            f"got {len(words):,}. Use a shorter text."
        )
    if score not in SCORES:
        raise InputError(f"explain(): unknown score {score!r}. {nearest(score, SCORES)}")
    d_model = _whole("d_model", d_model, "Use 512.")
    if d_model > MOST_ENTRIES:
        raise InputError(
            f"explain(): `d_model` may be at most {MOST_ENTRIES:,}; got {d_model:,}. Use 512; GPT-3 has 12288."
        )
    if heads is not None:
        heads = _whole("heads", heads, "Leave it out to look at one head.")
        _check_heads(d_model, heads, d_k)
        d_k = d_model // heads
    d_k = D_K if d_k is None else _whole("d_k", d_k, f"Use {D_K}.")
    if d_k > MOST_D_K or d_model * d_k > MOST_ENTRIES:
        raise InputError(
            f"explain(): `d_k` may be at most {MOST_D_K:,}, and d_model × d_k at most {MOST_ENTRIES:,}; "
            f"got d_model {d_model:,} and d_k {d_k:,}. Use smaller ones: GPT-3 has 12288 and 128."
        )
    seed = _whole("seed", seed, "Use 0.", least=None)
    chosen = _check_rule(rule_name, score)
    if layer is not None:
        layer = _whole("layer", layer, "The first layer is 0.", least=0)
        if layer > MOST_LAYERS:
            raise InputError(
                f"explain(): `layer` may be at most {MOST_LAYERS:,}; got a larger number. GPT-3 has 96 layers."
            )
    settings = ExplainSettings(text, words, chosen, score, heads, d_model, d_k, seed, layer)
    needs = f"explain(): rule {chosen.name!r} ({chosen.formula}) needs"
    if layer is None and "layer" in chosen.needs:
        raise InputError(f"{needs} `layer`, {FACTS['layer']}; got none. Add layer=3, or --layer 3 on the command line.")
    if "heads" in chosen.needs and settings.model_heads is None:
        raise InputError(
            f"{needs} a d_model that is a multiple of d_k; got {d_model} and {d_k}. "
            f"Use a d_model of {_multiples(d_model, d_k)}."
        )
    return settings


def _check_rule(name: str | Rule | None, score: str) -> Rule:
    if isinstance(name, str) and name not in RULES:
        raise InputError(f"explain(): unknown rule {name!r}. {nearest(name, RULES)}")
    chosen = rule(SCORES[score] if name is None else name)
    # score → its rules, and why it takes no others
    limited = {
        "additive": (("none",), "has no scale: its tanh bounds it"),
        "cosine": (("qk_norm", "none"), "is q·k with the lengths divided out already"),
    }
    if score in limited and chosen.name not in limited[score][0]:
        rules, why = limited[score]
        raise InputError(
            f"explain(): rule {chosen.name!r} ({chosen.formula}) is for score 'dot'; score {score!r} {why}. "
            f"Leave the rule out, or use {' or '.join(map(repr, rules))}."
        )
    return chosen


def _check_heads(d_model: int, heads: int, d_k: int | None) -> None:
    if d_model % heads:
        raise InputError(
            f"explain(): `d_model` must be a multiple of `heads`; got {d_model} and {heads}. "
            f"Use {' or '.join(map(str, nearest_divisors(d_model, heads)))} heads, "
            f"or a d_model of {_multiples(d_model, heads)}."
        )
    if d_k is not None and d_k != d_model // heads:
        raise InputError(
            f"explain(): with {heads} heads `d_k` is d_model / heads = {d_model // heads}; got {d_k}. Leave d_k out."
        )


def _multiples(number: int, of: int) -> str:
    """The multiples on either side of a number."""
    below = number // of * of
    return " or ".join(str(multiple) for multiple in (below, below + of) if multiple)


def _whole(name: str, value: object, hint: str, least: int | None = 1) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool) and (least is None or int(value) >= least):
        return int(value)
    required = "a whole number" if least is None else f"a whole number, at least {least}"
    raise InputError(f"explain(): `{name}` must be {required}; got {value!r}. {hint}")


def clean(text: str) -> str:
    """Remove control and direction characters; one that is white space becomes a space."""
    return "".join(letter if letter.isprintable() else " " * letter.isspace() for letter in text)


def label_of(word: str) -> str:
    """A word as a label: a long one ends in an ellipsis, and one without a visible letter becomes a dot."""
    word = clean(word).strip() or "·"
    if cell_len(word) <= MOST_CELLS and len(word) <= MOST_LETTERS:
        return word
    return set_cell_size(word[:MOST_LETTERS], MOST_CELLS - 1).rstrip() + "…"


def fit(word: str, width: int) -> str:
    """A word cut to at most this many cells; one that is cut ends in an ellipsis."""
    return word if cell_len(word) <= width else set_cell_size(word, width - 1).rstrip() + "…"
