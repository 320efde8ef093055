"""note_claims: the claims C24 to C36, which the five notes make in passing: their sentences, evidence and judges."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..engine.experiment import Value
from . import judge_notes
from .judgement import Evidence, Judgement

EMBEDDED = "it needs the embedded model: pip install 'attemper[demo]'"
CONFIGS = "it needs transformers: pip install 'attemper[hf]'"

NOTE_EVIDENCE: dict[str, tuple[str, dict[str, tuple[Value, ...]]]] = {
    "antecedent": ("antecedent", {"by": ("meaning",), "query": ("pronoun",), "permutations": (1999,)}),
    "antecedent_agreement": (
        "antecedent",
        {"by": ("agreement",), "rule": ("sqrt_dk",), "query": ("pronoun",), "permutations": (1999,)},
    ),
    "antecedent_control": (
        "antecedent",
        {"by": ("meaning",), "rule": ("sqrt_dk",), "query": ("word before",), "permutations": (1999,)},
    ),
    "own_key": ("own_key", {}),
    "by_heads": (
        "divisors",
        {"d": (64,), "heads": (1, 2, 8, 96), "rule": ("sqrt_dmodel",), "n": (256,), "batches": (8,)},
    ),
    "width": ("width", {"d_model": (256, 4096)}),
    "scale_cost": ("scale_cost", {"n": (1024,), "rounds": (15,)}),
    "match": ("divisors", {"d": (16, 64, 128, 512), "heads": (8,), "rule": ("sqrt_dk",), "batches": (8,)}),
    "head_dims": ("head_dims", {"families": (100,)}),
    "ranges": ("ranges", {"tokens": (3, 32), "draws": (1000,)}),
    "three_scores": ("three_scores", {"d": (256,), "n": (256,)}),
    "plateau": ("plateau", {"gap": (2.0, 8.0), "steps": (500,)}),
    "similarity": ("similarity", {"d": (16, 64), "batches": (32,)}),
}
"""Rows by name: which experiment, with which settings. All of it takes a few seconds."""


class NoteClaim(NamedTuple):
    """The arguments of a claim, in their order."""

    id: str
    sentence: str
    needs: tuple[str, ...]
    judge: Callable[[Evidence], Judgement]
    look: str
    missing: str = "what it needs was not measured"


NOTE_CLAIMS = (
    NoteClaim("C24", "Attention from 'it' shows what it refers to: the dog that was fast, or the ball that was round.",
              ("antecedent", "antecedent_agreement", "antecedent_control"), judge_notes.attention_resolves_pronouns,
              "run antecedent", EMBEDDED),
    NoteClaim("C25", "The keys are those of all other tokens.",
              ("own_key",), judge_notes.keys_are_of_others, "run own_key", EMBEDDED),
    NoteClaim("C26", "Dividing by √d_model corrects too little or too much, depending on the number of heads.",
              ("by_heads",), judge_notes.sqrt_dmodel_under_corrects, "run divisors --rule sqrt_dmodel --heads 1,8,96"),
    NoteClaim("C27", "The scale keeps attention stable across embedding dimensions.",
              ("width",), judge_notes.stable_across_widths, "run width"),
    NoteClaim("C28", "The scale makes attention faster.",
              ("scale_cost",), judge_notes.scaling_is_faster, "run scale_cost"),
    NoteClaim("C29", "With the scale, similarity is measured fairly whatever the dimension.",
              ("match",), judge_notes.measured_fairly, "run divisors --rule sqrt_dk"),
    NoteClaim("C30", "√d_k is the perfect divisor.",
              ("inits", "real_heads"), judge_notes.sqrt_dk_is_perfect, "run variance", EMBEDDED),
    NoteClaim("C31", "Common head dims d_k are 64, 128 and 512.",
              ("head_dims",), judge_notes.is_512_common, "run head_dims", CONFIGS),
    NoteClaim("C32", "Scores of 2-d vectors lie between −23 and 23, those of 5-d vectors between −49 and 122.",
              ("ranges",), judge_notes.ranges_as_said, "run ranges"),
    NoteClaim("C33", "Additive attention is slow because it has no matrix multiplication.",
              ("three_scores",), judge_notes.additive_has_no_products, "run three_scores"),
    NoteClaim("C34", "Very small gradients make training unstable.",
              ("plateau",), judge_notes.small_gradients_are_unstable, "run plateau"),
    NoteClaim("C35", "Dot-product attention is faster than additive attention, but needs the scale.",
              ("three_scores", "additive_cost"), judge_notes.dot_needs_scaling, "run three_scores"),
    NoteClaim("C36", "The dot product measures similarity: the larger, the more relevant.",
              ("similarity",), judge_notes.dot_is_similarity, "run similarity"),
)  # fmt: skip
