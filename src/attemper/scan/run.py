"""run(): call a model on its inputs under a watch with examiners, and build the document from what they measured."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from .. import __version__, health
from ..errors import AttemperError, InputError, internal_error
from ..health.faults import CheckResult
from ..watch import Record
from ..watch.examine import AttentionCall, Examiner, examine, slow_because
from .audit.audit import Audit, LayerScale
from .checks.examiner import AttentionChecks
from .document import COLUMNS, SIGNS, Document, Json, Layer, Scale, ScanVerdict, WhatIf, plain
from .examiners.items import BatchItems, CurrentInput
from .examiners.maps import AttentionMaps
from .examiners.neighbours import Neighbours
from .examiners.patches import add_patches, images, pixels_of
from .examiners.sinks import Sinks
from .examiners.text_dependence import TextDependence
from .examiners.tokens import TokenWeights
from .experiments.run import experiments
from .input.batch import Input, call
from .input.model import Loaded, offline, quiet, reason
from .input.pipes import Progress
from .result import Scan
from .what_if import check_rules, what_if

NO_CHOICE = 'no token can attend to another. Give a longer text: --text "…"'


Tried = tuple[list[CheckResult], list[health.Finding]]
"""What the experiments answered, and what they found."""


class LayerProgress(Examiner):
    """The examiner that reports which layer was just measured."""

    def __init__(self, current: CurrentInput, count: int, progress: Progress) -> None:
        self.current, self.count, self.progress = current, count, progress

    def keep(self, name: str, call: AttentionCall, found: object) -> None:
        (number,) = self.current.items.inputs or (0,)
        self.progress(f"input {number + 1} of {self.count}: {name}")


class Examiners:
    """All examiners of one scan."""

    def __init__(
        self, model: nn.Module, inputs: Sequence[Input], token: str | None, maps: bool, progress: Progress
    ) -> None:
        self.current = CurrentInput()
        self.audit, self.checks = Audit(), AttentionChecks(model)
        self.tables = (Sinks(self.current), Neighbours(), TextDependence(self.current))
        self.token = None if token is None else _token_weights(token, inputs, self.current)
        self.maps = AttentionMaps(self.current) if maps else None
        self.progress = LayerProgress(self.current, len(inputs), progress)

    def all(self) -> list[Examiner]:
        """In the order in which they look at a call."""
        found: list[Examiner | None] = [self.audit, self.checks, *self.tables, self.progress, self.maps, self.token]
        return [examiner for examiner in found if examiner is not None]

    def begin(self, number: int, one: Input) -> None:
        """Set the input of the coming pass."""
        self.checks.begin(one.batch)
        self.current.items = BatchItems(
            inputs=(number,),
            tokens=None if one.tokens is None else (tuple(one.tokens),),
            special=None if one.special is None else (tuple(one.special),),
            image=pixels_of(one) is not None,
        )


def run(
    loaded: Loaded,
    inputs: Sequence[Input],
    *,
    rules: Sequence[str] = (),
    token: str | None = None,
    pictures: bool = True,
    deep: bool = False,
    progress: Progress = lambda words: None,
) -> Scan:
    """Scan a model on its inputs, each by itself. Ctrl-C ends it early with what was measured so far.

    ``rules`` are tried in place of the model's own scale; the attention of ``token`` is reported in full; ``pictures`` keeps
    attention weights for the report; ``deep`` adds experiments on the first input; ``progress`` is called with what is done.
    """
    check_rules(rules)
    examiners = Examiners(loaded.model, inputs, token, pictures, progress)
    watching = examine(loaded.model, examiners.all(), caller="scan")
    done, interrupted, by = 0, False, ""
    ours = loaded.source != "object"
    with evaluating(loaded.model), offline() if ours else nullcontext(), quiet() if ours else nullcontext():
        try:
            with _without_warnings(), watching:
                for number, one in enumerate(inputs):
                    examiners.begin(number, one)
                    _call(loaded, one)
                    done += 1
        except KeyboardInterrupt as stop:
            interrupted, by = True, str(stop) or "Ctrl-C"
        slow = slow_because(next((one.device.type for one in loaded.model.parameters()), "cpu"))
        notes = [*loaded.notes, *_notes_of(inputs), *watching.record.notes, *([] if slow is None else [f"{slow}."])]
        if interrupted:
            notes.insert(0, f"stopped by {by} after {done} of {len(inputs)} inputs: only these were measured.")
        tried: Tried = ([], [])
        if deep and not interrupted:
            tried, interrupted = _experiments(
                loaded.model, inputs[0].batch, examiners, watching.record, notes, progress
            )
        document = assemble(loaded, inputs, watching.record, examiners, notes, tried)
        if rules and not interrupted:
            interrupted = _what_if(loaded.model, inputs, rules, document, examiners, progress)
    return Scan(document, watching.record, interrupted)


def _token_weights(token: str, inputs: Sequence[Input], current: CurrentInput) -> TokenWeights:
    """The examiner of a token, for the first input that has it."""
    known = [(number, one) for number, one in enumerate(inputs) if one.tokens is not None]
    if not known:
        raise InputError(
            "scan: `token` needs the tokens of a text, and none is known. Give a text, with its tokenizer."
        )
    first: InputError | None = None
    for number, one in known:
        try:
            return TokenWeights(token, one.tokens or (), one.special, number, current=current)
        except InputError as error:
            first = first or error
    assert first is not None
    raise first


def _call(loaded: Loaded, one: Input) -> None:
    """Call the model. If it was loaded here, an error becomes a sentence; a model passed as an object raises its own error."""
    try:
        call(loaded.model, one.batch)
    except (RuntimeError, ValueError, TypeError, LookupError, NotImplementedError) as error:
        if loaded.source == "object" or isinstance(error, AttemperError):
            error.add_note(f"scan(): this was raised while calling {type(loaded.model).__name__} with the batch given.")
            raise
        raise InputError(
            f"scan: {type(loaded.model).__name__} failed on its input: {reason(error)}. Try another "
            "--task, --dtype or --device, or call attemper.scan(model, batch) with a batch of your own."
        ) from error


def assemble(
    loaded: Loaded, inputs: Sequence[Input], record: Record, examiners: Examiners, notes: list[str], tried: Tried
) -> Document:
    """The document, from the record, the examiners and the experiments."""
    known: list[LayerScale] = []
    with _noted(notes, "the audit of the scales"):
        known += examiners.audit.layers()
    audited = {(one.layer, one.kind): one for one in known}
    layers = [_layer(place, record, audited.get(place)) for place in record.facts]
    heads = _heads(record, examiners, notes)
    wrong = [*examiners.checks.findings(), *tried[1]]
    found = health.findings(heads, plain(layers), audited.values(), list(record.facts), loaded.drawn, wrong)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    document = Document(
        attemper=__version__,
        torch=str(torch.__version__),
        created=created,
        model=loaded.about(),
        inputs=[one.about() for one in inputs],
        verdict=_verdict(found, heads),
        layers=layers,
        heads=heads,
        findings=found,
        checks=[*examiners.checks.results(found), *tried[0]],
        token=None if examiners.token is None else examiners.token.result(),
        notes=list(dict.fromkeys(notes)),
    )
    if examiners.maps is not None:
        document.attention = examiners.maps.attention()
        add_patches(document.attention, loaded.model, inputs)
        document.images = images(document.attention, inputs) or None
        document.notes += [f"{note}." for note in examiners.maps.notes]
    return document


@contextmanager
def _noted(notes: list[str], part: str) -> Iterator[None]:
    """An error in attemper's own code loses a part of the document, and not all of it."""
    try:
        yield
    except AttemperError:
        raise
    except Exception as error:
        notes.insert(0, f"{part} is missing: {internal_error(error)}.")


def _verdict(found: Sequence[health.Finding], heads: Sequence[Json]) -> ScanVerdict:
    judged = any(row["evenness"] is not None and math.isfinite(row["evenness"]) for row in heads)
    level, line = health.verdict(found, len(heads))
    if level in ("ok", "note") and not judged:
        level, line = "note", f"Nothing was judged: {NO_CHOICE if heads else 'no attention call was found'}."
    return ScanVerdict(level=level, line=line, judged=judged or level not in ("ok", "note"))


def _layer(place: tuple[str, str], record: Record, scale: LayerScale | None) -> Layer:
    facts = record.facts[place].to_dict()
    known = {field.name: facts[field.name] for field in fields(Layer) if field.name in facts and field.name != "scale"}
    known |= {"layer": place[0], "kind": place[1], "biased": facts["biased"] or None}
    return Layer(**known | {"scale": UNAUDITED if scale is None else scale.part()})


_NONE: Json = dict.fromkeys(field.name for field in fields(Scale))
UNAUDITED = Scale(**_NONE | {"factors": [], "verdict": "ok", "says": "The scale of this layer could not be read."})


def _heads(record: Record, examiners: Examiners, notes: list[str]) -> list[Json]:
    tables = []
    for examiner in examiners.tables:
        with _noted(notes, type(examiner).__name__):
            tables.append(examiner.table())
    found = []
    for row in record.to_dicts():
        place, head = (row["layer"], row["kind"]), row["head"]
        known = dict.fromkeys(COLUMNS) | {name: row[name] for name in (*SIGNS, "score_peak") if name in row}
        for table in tables:
            rows = table.get(place, [])
            known |= rows[head] if head < len(rows) else {}
        found.append(known)
    return found


def _what_if(
    model: nn.Module,
    inputs: Sequence[Input],
    rules: Sequence[str],
    document: Document,
    examiners: Examiners,
    progress: Progress,
) -> bool:
    """Add the signs under other rules, and the attention of a token, to the document; whether Ctrl-C ended it."""
    token = examiners.token
    applied = {(one.layer, one.kind): one.scale.applied for one in document.layers}
    found: list[WhatIf] = []
    document.what_if = found

    def again() -> None:
        for number, one in enumerate(inputs):
            examiners.begin(number, one)
            call(model, one.batch)

    def begin(rule: str) -> None:
        if token is not None:
            token.clear()  # of the run before
        progress(f"what if the scale were {rule}")

    def keep(one: WhatIf) -> None:
        one.token = None if token is None else token.result()
        found.append(one)

    def note(sentence: str) -> None:
        if sentence not in document.notes:
            document.notes.append(sentence)

    progress("what if: once more as it is")
    try:
        with _without_warnings():
            seen = [token] if token is not None else ()
            what_if(model, again, rules, applied, begin, keep, seen, note)
    except Exception as error:  # what was measured is not lost
        document.notes.insert(0, str(error) if isinstance(error, AttemperError) else f"--what-if: {reason(error)}.")
    except KeyboardInterrupt as stop:
        by, left = str(stop) or "Ctrl-C", ", ".join(map(repr, rules[len(found) :])) or "none"
        document.notes.insert(0, f"stopped by {by}; rules of --what-if that were not tried: {left}.")
        return True
    return False


def _experiments(
    model: nn.Module, batch: Any, examiners: Examiners, record: Record, notes: list[str], progress: Progress
) -> tuple[Tried, bool]:
    """The experiments on the first input, and whether Ctrl-C ended them."""
    sizes = {(facts.batch, facts.queries) for (_, kind), facts in record.facts.items() if kind == "self"}
    try:
        with _without_warnings():
            results, found, _ = experiments(model, batch, examiners.checks, sizes, progress=progress)
    except KeyboardInterrupt as stop:
        notes.insert(
            0, f"stopped by {str(stop) or 'Ctrl-C'} during the experiments of --deep: none of them is in the results."
        )
        return ([], []), True
    return (results, found), False


def _notes_of(inputs: Sequence[Input]) -> Iterator[str]:
    for number, one in enumerate(inputs):
        for note in one.notes:
            yield note if len(inputs) == 1 else f"input {number + 1}: {note}"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode it was in."""
    before = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in before:
            part.training = training


@contextmanager
def _without_warnings() -> Iterator[None]:
    """No warnings of the watch: what it could not measure is in the notes, and so is which kernel is missing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"attemper: kernel ")
        warnings.filterwarnings("ignore", message=r"watch\(\): ")
        yield
