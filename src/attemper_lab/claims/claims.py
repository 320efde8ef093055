"""claims: common claims about √d_k (claims.toml), each with the evidence it needs and the function that judges it."""

from __future__ import annotations

import importlib
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from attemper.errors import InputError, MissingExtra
from attemper.extension.files import finite
from attemper.extension.machine import env

from .. import experiment, stored
from ..engine.command import measure
from ..engine.experiment import Row, Rows, Value
from ..notes.sentences import said
from .judgement import NOT_RUN, VERDICTS, Evidence, Judgement

CONTENT = tomllib.loads((files(__package__) / "claims.toml").read_text(encoding="utf-8"))
SweepSettings = dict[str, tuple[Value, ...]]
NUMBER = re.compile(r"\{([^{}|]+)\|([^{}]*)\}")
"""In `shown` of claims.toml: {the beginning of a number's name|how it is written}."""


def _evidence(part: str) -> dict[str, tuple[str, SweepSettings]]:
    tables = {name: dict(table) for name, table in CONTENT[part].items()}
    return {
        name: (table.pop("experiment"), {option: tuple(values) for option, values in table.items()})
        for name, table in tables.items()
    }


EVIDENCE = _evidence("evidence")
TRAINING = {**_evidence("training"), "memorise": ("charlm", dict(experiment("charlm").presets["memorise"]))}
"""Rows by name: the experiment that measures them, and its settings; the second is what `--train` measures."""
STORED = ("trained", "recall", "charlm", "depth", "dmodel", "memorise", "larger")
"""Rows that come with the package, of models that were trained before. Of what `--train` measures too, it takes its own."""


@dataclass(frozen=True)
class Claim:
    """One claim: its sentence, the evidence, the function that judges it, and a command that shows more.

    ``short`` is the sentence and ``shown`` the one number in a table with a line per claim. ``also`` names evidence that is used
    where it was measured. ``missing`` names the package without which there is no evidence; ``from_notes`` marks what only the
    notes say, in passing.
    """

    id: str
    sentence: str
    needs: list[str]
    judge: Callable[[Evidence], Judgement]
    look: str
    shown: str
    short: str = ""
    also: list[str] = field(default_factory=list)
    missing: str = ""
    from_notes: bool = False

    def unavailable_reason(self, train: bool) -> str:
        """Why evidence for it is missing; ``train``: whether evidence on training was asked for."""
        if train and any(name in TRAINING for name in self.needs):
            return FAILED
        return self.missing or "what it needs was not measured"


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with what this run says about it."""

    claim: Claim
    verdict: str
    numbers: dict[str, float]
    condition: str
    context: Mapping[str, float] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The one number, in words; empty if the claim was not run."""

        def filled(place: re.Match[str]) -> str:
            deciding, beside = (
                [of[name] for name in of if name.startswith(place[1])] for of in (self.numbers, self.context)
            )
            (value,) = deciding or beside
            return "∞" if value == math.inf else format(value, place[2])

        return NUMBER.sub(filled, self.claim.shown) if self.verdict != NOT_RUN else ""


def _claim(table: dict[str, Any]) -> Claim:
    module, _, name = table.pop("judge").partition(".")
    return Claim(**table, judge=getattr(importlib.import_module(f".{module}", __package__), name))


CLAIMS = tuple(_claim(dict(table)) for table in CONTENT["claims"])
NOTE_CLAIMS = tuple(claim for claim in CLAIMS if claim.from_notes)
"""Those that only the five notes make."""


def of_id(name: str) -> Claim:
    """The claim of that id, however it is written: C6, c6, 6."""
    known = {claim.id: claim for claim in CLAIMS}
    wanted = f"C{name.upper().removeprefix('C')}"
    if wanted not in known:
        raise InputError(
            f"claims: unknown claim {name!r}. They are C1 to C{len(CLAIMS)}; `attemper claims` lists them."
        )
    return known[wanted]


def judging(
    wanted: Sequence[Claim] = CLAIMS,
    train: bool = False,
    note: Callable[[str], None] = lambda line: None,
    results: Path | None = None,
    busy: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> Iterator[JudgedClaim]:
    """Judge each claim as soon as what it needs is measured. ``results`` is the folder in which runs that train are kept;
    ``busy`` shows what is being measured."""
    rows: dict[str, list[Row]] = {}
    tried: set[str] = set()
    for claim in wanted:
        for name in (*claim.needs, *claim.also):
            if name not in tried:
                tried.add(name)
                measured = _measured(name, train, note, results, busy)
                rows |= {} if measured is None else {name: measured}
        yield _judged(claim, rows, train)


def run(
    train: bool = False, note: Callable[[str], None] = lambda line: None, results: Path | None = None
) -> list[JudgedClaim]:
    """Measure what the claims need and judge them."""
    return list(judging(CLAIMS, train, note, results))


def gather(train: bool, note: Callable[[str], None], results: Path | None = None) -> dict[str, list[Row]]:
    """All rows by name. An experiment of which a run failed is left out."""
    measured = {name: _measured(name, train, note, results) for name in dict.fromkeys((*EVIDENCE, *STORED, *TRAINING))}
    return {name: rows for name, rows in measured.items() if rows is not None}


def _measured(
    name: str,
    train: bool,
    note: Callable[[str], None],
    results: Path | None,
    busy: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> list[Row] | None:
    """The rows of that name; None if they cannot be had. Training takes minutes: it is a sweep on every core, with a progress
    bar, and continues from ``results`` after a kill."""
    if name in STORED and not (train and name in TRAINING):
        return stored.rows(name)
    if name in TRAINING:
        home, settings = TRAINING[name]
        question = experiment(home)
        swept = measure(question, {**question.settings(), **settings}, results, None, note)
        if swept.failures:
            note("\n".join(f"{name}: failed: {failure}" for failure in swept.failures))
            return None
        note(f"{name}: {len(swept.rows)} rows of models that were trained here")
        return swept.rows
    home, settings = EVIDENCE[name]
    try:
        with busy(f"measuring: {experiment(home).question}"):
            return experiment(home).run(**settings)
    except MissingExtra as error:
        note(f"{name}: not run. {error}")
        return None


FAILED = "a run that it needs failed, see above; the same command continues from those that did not"


def judge(evidence: Mapping[str, Rows], train: bool = False) -> list[JudgedClaim]:
    """Every claim, from the evidence alone; ``train``: whether evidence on training was asked for."""
    return [_judged(claim, evidence, train) for claim in CLAIMS]


def _judged(claim: Claim, evidence: Mapping[str, Rows], train: bool) -> JudgedClaim:
    if not set(claim.needs) <= set(evidence):
        return JudgedClaim(claim, NOT_RUN, {}, claim.unavailable_reason(train))
    return JudgedClaim(claim, *claim.judge(evidence))


def tally(judged: Iterable[JudgedClaim]) -> dict[str, int]:
    """How many claims have each verdict."""
    counts = Counter(claim.verdict for claim in judged)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def document(judged: list[JudgedClaim]) -> dict[str, Any]:
    """The claims as plain data for JSON, with the machine they were measured on."""
    content = {
        "environment": env.describe(),
        "claims": [
            {
                "id": judgement.claim.id,
                "claim": judgement.claim.sentence,
                "said": [{"note": note, "says": words} for note, words in said(judgement.claim.id)],
                "verdict": judgement.verdict,
                "condition": judgement.condition,
                "numbers": dict(judgement.numbers),
                "context": dict(judgement.context),
                "look": f"attemper {judgement.claim.look}" if judgement.claim.look else None,
            }
            for judgement in judged
        ],
    }
    return dict(finite(content))
