"""run(): call a model on its inputs under a watch with examiners, and build the document from what they measured."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from .. import __version__, health
from ..errors import AttemperError, InputError, guarded, internal_error
from ..health.faults import CheckResult
from ..health.judging import is_broken
from ..watch import Record
from ..watch.examine import AttentionCall, Examiner, NoAttentionCall, examine, slow_because, split_number
from .audit.audit import Audit, LayerScale
from .checks.examiner import AttentionChecks
from .checks.numbers import birth, spoiled_rows
from .document import COLUMNS, SIGNS, Document, Json, Layer, Scale, ScanVerdict, WhatIf, plain
from .examiners.items import BatchItems, CurrentInput
from .examiners.maps import AttentionMaps
from .examiners.neighbours import Neighbours
from .examiners.patches import add_patches, images, pixels_of
from .examiners.sinks import Sinks
from .examiners.text_dependence import TextDependence
from .examiners.tokens import TokenWeights
from .experiments.dtype import RowWeights
from .experiments.run import experiments
from .input.batch import Input
from .input.model import Loaded, offline, quiet, reason
from .input.pipes import Progress
from .result import Scan
from .settled import check_declared, settled, settled_scales
from .unchanged import call, evaluating
from .what_if import check_rules, what_if

NO_CHOICE = 'no token can attend to another. Give a longer text: --text "…"'


Tried = tuple[list[CheckResult], list[health.Finding]]
"""The results of the experiments, and their findings."""


class LayerProgress(Examiner):
    """Examiner: reports which layer was just measured."""

    def __init__(self, current: CurrentInput, count: int, progress: Progress) -> None:
        self.current, self.count, self.progress = current, count, progress

    def keep(self, name: str, call: AttentionCall, _looked: object) -> None:
        (number,) = self.current.items.inputs or (0,)
        self.progress(f"input {number + 1} of {self.count}: {name}")


class Examiners:
    """All examiners of one scan."""

    def __init__(
        self, model: nn.Module, inputs: Sequence[Input], token: str | None, maps: bool, deep: bool, progress: Progress
    ) -> None:
        self.current = CurrentInput()
        self.rows = RowWeights() if deep else None
        self.no_calls = ""  # a sentence, if no attention call ran
        # the first input whose output is not finite: its number; NaN or infinity, rows that have it, all rows
        self.spoiled: tuple[int, tuple[str, int, int]] | None = None
        self.audit, self.checks = Audit(), AttentionChecks(model)
        self.tables = (Sinks(self.current), Neighbours(), TextDependence(self.current))
        self.token = None if token is None else _token_weights(token, inputs, self.current)
        self.maps = AttentionMaps(self.current) if maps else None
        self.progress = LayerProgress(self.current, len(inputs), progress)

    def all(self) -> list[Examiner]:
        """In the order in which they examine a call."""
        examiners: list[Examiner | None] = [self.audit, self.checks, *self.tables, self.progress]
        examiners += [self.maps, self.token, self.rows]
        return [examiner for examiner in examiners if examiner is not None]

    def begin(self, number: int, given: Input) -> None:
        """Set the input of the next pass."""
        self.checks.begin(given.batch)
        self.current.items = BatchItems(
            inputs=(number,),
            tokens=None if given.tokens is None else (tuple(given.tokens),),
            special=None if given.special is None else (tuple(given.special),),
            image=pixels_of(given) is not None,
        )


def run(
    loaded: Loaded,
    inputs: Sequence[Input],
    *,
    rules: Sequence[str] = (),
    token: str | None = None,
    pictures: bool = True,
    deep: bool = False,
    declared: Mapping[str, bool] | None = None,
    progress: Progress = lambda words: None,
) -> Scan:
    """Scan a model on its inputs, each by itself. Ctrl-C ends it early with what was measured so far.

    ``rules`` replace the model's own scale in further runs; the attention of ``token`` is reported in full; ``pictures`` keeps
    attention weights for the report; ``deep`` adds experiments on the first input; ``declared`` names designs that look like
    faults; ``progress`` is called with what is being done, in a few words.
    """
    check_rules(rules)
    examiners = Examiners(loaded.model, inputs, token, pictures, deep, progress)
    examiners.checks.declared = check_declared(declared)
    watching = examine(loaded.model, examiners.all(), caller="scan", by_call=True)
    done, interrupted, by = 0, False, ""
    ours = loaded.source != "object"
    with evaluating(loaded.model), offline() if ours else nullcontext(), quiet() if ours else nullcontext():
        try:
            with _without_warnings(), watching:
                for number, given in enumerate(inputs):
                    examiners.begin(number, given)
                    spoiled = spoiled_rows(loaded.model, given.batch, _call(loaded, given))
                    if spoiled is not None and examiners.spoiled is None:
                        examiners.spoiled = number, spoiled
                    done += 1
        except NoAttentionCall as missing:
            if not deep:
                raise
            examiners.no_calls = f"{str(missing).removeprefix('scan(): ')} The experiments saw its outputs alone."
        except KeyboardInterrupt as stop:
            interrupted, by = True, str(stop) or "Ctrl-C"
        slow = slow_because(next((parameter.device.type for parameter in loaded.model.parameters()), "cpu"))
        notes = [*loaded.notes, *_notes_of(inputs), *watching.record.notes, *([] if slow is None else [f"{slow}."])]
        if examiners.no_calls:
            notes.insert(0, examiners.no_calls)
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
    return Scan(document, _by_module(watching.record), interrupted)


def _by_module(record: Record) -> Record:
    """A record by module, as qk_clip() and others take it: the calls of a module become its rows."""
    names = {layer: split_number(layer)[0] for layer in record.layers}
    if all(layer == name for layer, name in names.items()):
        return record
    entries = [entry._replace(layer=names[entry.layer]) for entry in record.entries]
    info = {(names.get(layer, layer), kind): info for (layer, kind), info in record.info.items()}
    return Record(entries, info, record.notes).merge()


def _token_weights(token: str, inputs: Sequence[Input], current: CurrentInput) -> TokenWeights:
    """The examiner of a token, for the first input that has it."""
    known = [(number, given) for number, given in enumerate(inputs) if given.tokens is not None]
    if not known:
        raise InputError(
            "scan: `token` needs the tokens of a text, and none is known. Give a text, with its tokenizer."
        )
    first: InputError | None = None
    for number, given in known:
        try:
            return TokenWeights(token, given.tokens or (), given.special, number, current=current)
        except InputError as error:
            first = first or error
    assert first is not None
    raise first


def _call(loaded: Loaded, given: Input) -> Any:
    """Run the model on an input. An error becomes a sentence if the model was loaded here; an object raises its own."""
    try:
        return call(loaded.model, given.batch)
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
    declared = examiners.checks.declared
    with guarded(_missing(notes, "the audit of the scales")):
        known += settled_scales(declared, examiners.audit.layers())
    audited = {(layer_scale.layer, layer_scale.kind): layer_scale for layer_scale in known}
    layers = [_layer(place, record, audited.get(place)) for place in record.info]
    heads = _heads(record, examiners, notes)
    wrong = [*examiners.checks.findings(), *tried[1]]
    spoiled = examiners.spoiled
    if spoiled is not None or any(map(is_broken, heads)):
        with guarded(_missing(notes, "where NaN was born")), _without_warnings():
            number, rows = spoiled or (0, None)
            what = "NaN or infinity is in the logits"
            if rows is not None:
                what = f"{rows[0]} is in {rows[1]} of {rows[2]} rows of the output"
            wrong.append(birth(loaded.model, inputs[number].batch, what, examiners.checks.empty_rows))
    order = list(record.info)
    findings = health.findings(heads, plain(layers), audited.values(), order, loaded.drawn, wrong, finished=True)
    findings, checks = settled(declared, findings, [*examiners.checks.results(findings), *tried[0]])
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    document = Document(
        attemper=__version__,
        torch=str(torch.__version__),
        created=created,
        model=loaded.about(),
        inputs=[input_.about() for input_ in inputs],
        verdict=_verdict(findings, heads, checks),
        layers=layers,
        heads=heads,
        findings=findings,
        checks=checks,
        token=None if examiners.token is None else examiners.token.result(),
        notes=list(dict.fromkeys(notes)),
    )
    if examiners.maps is not None:
        document.attention = examiners.maps.attention()
        add_patches(document.attention, loaded.model, inputs)
        document.images = images(document.attention, inputs) or None
        document.notes += [f"{note}." for note in examiners.maps.notes]
    return document


def _missing(notes: list[str], part: str) -> Callable[[Exception], None]:
    """A callback that notes which part of the document an error in attemper's own code lost."""
    return lambda error: notes.insert(0, f"{part} is missing: {internal_error(error)}.")


def _verdict(findings: Sequence[health.Finding], heads: Sequence[Json], checks: Sequence[CheckResult]) -> ScanVerdict:
    judged = any(row["evenness"] is not None and math.isfinite(row["evenness"]) for row in heads)
    unjudged = _unjudged(checks)
    if not heads:
        unjudged.insert(0, "scale, softmax, masks and heads, as no attention call was found")
    level, line = health.verdict(findings, len(heads), unjudged)
    if level in ("ok", "note") and not judged and not any(check.deep and check.state == "passed" for check in checks):
        level, line = "note", f"Nothing was judged: {NO_CHOICE if heads else 'no attention call was found'}."
    return ScanVerdict(level=level, line=line, judged=judged or level not in ("ok", "note"))


MANY = 3  # more checks than these are counted, not named


def _unjudged(checks: Sequence[CheckResult]) -> list[str]:
    """The checks that apply to the model but were skipped, grouped by what to pass to run them."""
    needed: dict[str, list[CheckResult]] = {}
    for check in checks:
        if check.needs is not None:
            needed.setdefault(check.needs, []).append(check)
    unjudged = []
    for needs, some in needed.items():
        names = ", ".join(check.name.replace("_", " ") for check in some)
        who = names if len(some) <= MANY else f"{len(some)} experiments, as {some[0].message}"
        unjudged.append(f"{who} (pass {needs})")
    return unjudged


def _layer(place: tuple[str, str], record: Record, scale: LayerScale | None) -> Layer:
    info = record.info[place].to_dict()
    known = {field.name: info[field.name] for field in fields(Layer) if field.name in info and field.name != "scale"}
    number = split_number(place[0])[1]
    known |= {
        "layer": place[0],
        "kind": place[1],
        "biased": info["biased"] or None,
        "call": number if number > 1 else None,
    }
    return Layer(**known | {"scale": UNAUDITED if scale is None else scale.part()})


_NONE: Json = dict.fromkeys(field.name for field in fields(Scale))
UNAUDITED = Scale(**_NONE | {"factors": [], "verdict": "ok", "message": "The scale of this layer could not be read."})


def _heads(record: Record, examiners: Examiners, notes: list[str]) -> list[Json]:
    tables = []
    for examiner in examiners.tables:
        with guarded(_missing(notes, type(examiner).__name__)):
            tables.append(examiner.table())
    heads = []
    for row in record.to_dicts():
        place, head = (row["layer"], row["kind"]), row["head"]
        known = dict.fromkeys(COLUMNS) | {name: row[name] for name in (*SIGNS, "score_peak") if name in row}
        for table in tables:
            rows = table.get(place, [])
            known |= rows[head] if head < len(rows) else {}
        heads.append(known)
    return heads


def _what_if(
    model: nn.Module,
    inputs: Sequence[Input],
    rules: Sequence[str],
    document: Document,
    examiners: Examiners,
    progress: Progress,
) -> bool:
    """Add the signs under other rules, and the attention of a token, to the document; True if Ctrl-C ended it."""
    token = examiners.token
    applied = {(layer.layer, layer.kind): layer.scale.applied for layer in document.layers}
    results: list[WhatIf] = []
    document.what_if = results

    def run_all() -> None:
        for number, given in enumerate(inputs):
            examiners.begin(number, given)
            call(model, given.batch)

    def begin(rule: str) -> None:
        if token is not None:
            token.clear()  # of the run before
        progress(f"what if the scale were {rule}")

    def keep(given: WhatIf) -> None:
        given.token = None if token is None else token.result()
        results.append(given)

    def note(sentence: str) -> None:
        if sentence not in document.notes:
            document.notes.append(sentence)

    progress("what if: once more as it is")
    try:
        with _without_warnings():
            seen = [token] if token is not None else ()
            what_if(model, run_all, rules, applied, begin, keep, seen, note)
    except Exception as error:  # the document so far is kept
        document.notes.insert(0, str(error) if isinstance(error, AttemperError) else f"--what-if: {reason(error)}.")
    except KeyboardInterrupt as stop:
        by, left = str(stop) or "Ctrl-C", ", ".join(map(repr, rules[len(results) :])) or "none"
        document.notes.insert(0, f"stopped by {by}; rules of --what-if that were not tried: {left}.")
        return True
    return False


def _experiments(
    model: nn.Module, batch: Any, examiners: Examiners, record: Record, notes: list[str], progress: Progress
) -> tuple[Tried, bool]:
    """The experiments on the first input, and whether Ctrl-C ended them."""
    sizes = {(info.batch, info.queries) for (_, kind), info in record.info.items() if kind == "self"}
    try:
        with _without_warnings():
            weights = {} if examiners.rows is None else examiners.rows.layers
            results, findings, runner = experiments(
                model, batch, examiners.checks, sizes, progress=progress, weights=weights
            )
    except KeyboardInterrupt as stop:
        notes.insert(
            0, f"stopped by {str(stop) or 'Ctrl-C'} during the experiments of --deep: none of them is in the results."
        )
        return ([], []), True
    if runner is not None and runner.in_place:
        notes.append(
            f"the forward changes its batch in place ({', '.join(runner.in_place)}): every pass was given a copy."
        )
    return (results, findings), False


def _notes_of(inputs: Sequence[Input]) -> Iterator[str]:
    for number, given in enumerate(inputs):
        for note in given.notes:
            yield note if len(inputs) == 1 else f"input {number + 1}: {note}"


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide the warnings of the watch: the notes say what it could not measure and which kernel is missing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"attemper: kernel ")
        warnings.filterwarnings("ignore", message=r"watch\(\): ")
        yield
