"""claims: common claims about √d_k, each with the evidence it needs and the function that judges it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import env
from ..._files import finite
from ...errors import MissingExtra
from .. import experiment, stored
from ..engine.command import measure
from ..engine.experiment import Row, Rows, Value
from ..notes.sentences import said
from ..training import charlm
from . import judge_exact, judge_gradients, judge_real_model, judge_training
from .judgement import NOT_RUN, Evidence, Judgement
from .note_claims import EMBEDDED, NOTE_CLAIMS, NOTE_EVIDENCE

SweepSettings = dict[str, tuple[Value, ...]]

# rows by name: which experiment, with which settings; all of it takes well under a minute
EVIDENCE: dict[str, tuple[str, SweepSettings]] = {
    "worked": ("worked", {}),
    "variance": ("variance", {"d": (2, 5, 16, 64, 256, 1024), "init": ("unit",), "samples": (100_000,)}),
    "inits": ("variance", {"d": (64,), "init": ("fan_in", "linear", "xavier", "gpt2", "t5")}),
    "nonunit": ("variance", {"d": (1, 64), "init": ("unit",), "a": (0.25, 9.0), "samples": (100_000,)}),
    "saturation": ("saturation", {"n": (16, 1024, 8192), "rows": (320,)}),
    "jacobian": ("jacobian", {"n": (1024,), "d": (16, 33, 64, 256, 1024), "batches": (24,), "rule": ("none",)}),
    "gradient": ("gradient", {"d": (64, 128, 1024), "rule": ("none", "sqrt_dk"), "batches": (16,)}),
    "gradient_long": (
        "gradient",
        {"d": (128,), "n": (1024,), "rule": ("none", "sqrt_dk"), "batches": (4,), "projected": (0,)},
    ),
    "divisors": ("divisors", {"d": (16, 128, 512), "heads": (96,), "batches": (12,)}),
    "bounded": ("bounded", {"score": ("additive",), "bound": (1.0, 10.0), "n": (1024,)}),
    "precision": ("precision", {}),
    "additive_cost": ("additive_cost", {"n": (512,), "d": (16, 256), "rounds": (3,)}),
    "parallel": ("parallel", {"n": (512,), "rounds": (3,)}),
    "real_heads": ("real_heads", {"rule": ("none", "sqrt_dk")}),
    "subspaces": ("subspaces", {}),
    **NOTE_EVIDENCE,
}
STORED = "trained"
"""The name of the rows that come with the package: a language model, trained on a GPU with 1/√d_k and without a scale."""
TRAINING: dict[str, tuple[str, SweepSettings]] = {
    "recall": ("recall", {}),
    "charlm": ("charlm", {}),
    "memorise": ("charlm", dict(charlm.MEMORISE)),
    "depth": ("depth", {}),
}
"""The same for what `--train` adds."""


@dataclass(frozen=True)
class Claim:
    """One claim: its sentence, the evidence, the function that judges it, and a command that shows more.

    ``missing`` says why it was not run where there is no evidence.
    """

    id: str
    sentence: str
    needs: tuple[str, ...]
    judge: Callable[[Evidence], Judgement]
    look: str
    missing: str = "a claim about training: add --train"

    @property
    def trains(self) -> bool:
        return any(name in TRAINING for name in self.needs)


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with what this run says about it."""

    claim: Claim
    verdict: str
    numbers: dict[str, float]
    condition: str
    context: Mapping[str, float] = field(default_factory=dict)


CLAIMS = (
    Claim("C1", "Var(q·k) = d_k for independent entries of variance 1, so the std is √d_k.",
          ("variance", "inits"), judge_exact.variance_is_d, "run variance"),
    Claim("C2", "Dividing by √d_k brings the variance to 1, whatever d_k.",
          ("variance", "inits"), judge_exact.scaling_gives_one, "run variance"),
    Claim("C3", "More dimensions give a wider range of scores.",
          ("variance",), judge_exact.range_grows, "run variance --d 2,5"),
    Claim("C4", "softmax([7, 3]) = [0.98, 0.02] and softmax([25, 2, −3]) ≈ [1, 0, 0].",
          ("worked",), judge_exact.softmax_examples, "run worked"),
    Claim("C5", "Large logits make softmax nearly one-hot.",
          ("saturation", "jacobian"), judge_exact.large_logits_saturate, "run saturation"),
    Claim("C6", "Softmax's gradient is p(1−p), and vanishes at saturation.",
          ("gradient", "gradient_long", "jacobian", "trained"), judge_gradients.gradients_vanish, "run gradient"),
    Claim("C7", "Without scaling gradients explode.",
          ("gradient", "gradient_long", "trained"), judge_gradients.gradients_explode, "run gradient"),
    Claim("C8", "exp of a large score overflows, so softmax does.",
          ("precision",), judge_exact.exp_overflows, "run precision"),
    Claim("C9", "Without scaling training falls apart.",
          ("recall", "charlm"), judge_training.falls_apart, "run recall"),
    Claim("C10", "Dividing by d_k shrinks too much: attention is too flat.",
          ("divisors",), judge_exact.dk_is_too_flat, "run divisors"),
    Claim("C11", "√d_model is the wrong divisor (GPT-3: width 12288, 96 heads, d_k = 128).",
          ("divisors",), judge_exact.sqrt_dmodel_is_wrong, "run divisors --d 128"),
    Claim("C12", "Additive scores lie between −1 and 1.",
          ("bounded",), judge_exact.additive_within_one, "run bounded --score additive"),
    Claim("C13", "Additive attention is stable but slower.",
          ("additive_cost",), judge_exact.additive_stable_but_slow, "run additive_cost"),
    Claim("C14", "Without scaling one token gets almost all the attention.",
          ("real_heads",), judge_real_model.one_token_gets_all, "run real_heads", EMBEDDED),
    Claim("C15", "Scaling improves convergence.",
          ("recall", "charlm"), judge_training.converges_faster, "run recall"),
    Claim("C16", "With the scale all weights contribute during training: effective keys stay many.",
          ("divisors", "trained"), judge_exact.keys_stay_many, "run divisors"),
    Claim("C17", "Attention's output has the same shape as its input.",
          ("worked",), judge_exact.output_has_the_input_shape, "run worked"),
    Claim("C18", "Heads attend to different subspaces.",
          ("subspaces",), judge_real_model.heads_differ, "run subspaces", EMBEDDED),
    Claim("C19", "Saturated attention commits too early and generalises worse.",
          ("memorise",), judge_training.commits_early, "run charlm --text 10000 --steps 400"),
    Claim("C20", "Leaving the scale out limits learning in deeper models.",
          ("depth",), judge_training.limits_depth, "run depth"),
    Claim("C21", "Attention computes a long sequence in parallel.",
          ("parallel",), judge_exact.runs_in_parallel, "run parallel"),
    Claim("C22", "Without the scale only a few weights get updated.",
          ("gradient",), judge_gradients.few_weights_move, "run gradient"),
    Claim("C23", "Variance a at d_k = 1 becomes 64 a at d_k = 64.",
          ("nonunit",), judge_exact.variance_scales_with_a, "run variance --d 1,64 --init unit --a 0.25,9"),
    *(Claim(*one) for one in NOTE_CLAIMS),
)  # fmt: skip


def run(
    train: bool = False, note: Callable[[str], None] = lambda line: None, results: Path | None = None
) -> list[JudgedClaim]:
    """Measure what the claims need and judge them; ``results`` is the folder in which runs that train are kept."""
    return judge(gather(train, note, results), train)


def gather(train: bool, note: Callable[[str], None], results: Path | None = None) -> dict[str, list[Row]]:
    """The rows by name, with a note on how long each experiment took. Training takes minutes: it is a sweep on every core, with a
    progress bar, and continues from ``results`` after a kill. An experiment of which a run failed is left out."""
    found: dict[str, list[Row]] = {STORED: stored.rows()}
    note(f"{STORED}: {len(found[STORED])} rows of a language model, measured on a GPU, come with the package")
    for name, (home, settings) in {**EVIDENCE, **(TRAINING if train else {})}.items():
        started, one = time.perf_counter(), experiment(home)
        try:
            if one.trains:
                swept = measure(one, {**one.settings(), **settings}, results, None, note)
                if swept.failures:
                    note("\n".join(f"{name}: failed: {failure}" for failure in swept.failures))
                    continue
            found[name] = swept.rows if one.trains else one.run(**settings)
        except MissingExtra as error:
            note(f"{name}: not run. {error}")
            continue
        note(f"{name}: {len(found[name])} rows in {time.perf_counter() - started:.1f} s")
    return found


FAILED = "a run that it needs failed, see above; the same command continues from those that did not"


def judge(evidence: Mapping[str, Rows], train: bool = False) -> list[JudgedClaim]:
    """Every claim, from the evidence alone; ``train``: whether evidence on training was asked for."""
    judged = []
    for claim in CLAIMS:
        if not set(claim.needs) <= set(evidence):
            judged.append(JudgedClaim(claim, NOT_RUN, {}, FAILED if train and claim.trains else claim.missing))
        else:
            judged.append(JudgedClaim(claim, *claim.judge(evidence)))
    return judged


def document(judged: list[JudgedClaim]) -> dict[str, Any]:
    """The claims as plain data for JSON, with the machine they were measured on."""
    found = {
        "environment": env.describe(),
        "claims": [
            {
                "id": one.claim.id,
                "claim": one.claim.sentence,
                "said": [{"note": note, "says": words} for note, words in said(one.claim.id)],
                "verdict": one.verdict,
                "condition": one.condition,
                "numbers": dict(one.numbers),
                "context": dict(one.context),
                "look": f"attemper {one.claim.look}" if one.claim.look else None,
            }
            for one in judged
        ],
    }
    return dict(finite(found))
