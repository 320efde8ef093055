"""scanning: run a model on its inputs under a watch whose examiners look closer, and put together what they saw."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__, health
from ..errors import AttemperError, InputError
from ..vitals import Vitals
from ..watch import Record
from ..watch.examine import AttentionCall as Call
from ..watch.examine import Examiner, examine
from .audit.audit import Audit, LayerScale
from .document import SCHEMA, Scan
from .examiners.items import Reading
from .examiners.maps import Pictures
from .examiners.neighbours import Neighbours
from .examiners.sinks import Sinks
from .examiners.text_dependence import Texts
from .examiners.tokens import TokenWeights
from .input.batch import Input
from .input.model import Loaded, offline, quiet, reason
from .input.patches import add_patches, images, pixels_of
from .what_if import SIGNS, check_rules, what_if

FACTS = (
    *("route", "dtype", "heads", "kv_heads", "head_dim", "queries", "keys", "causal", "masked", "softcap", "window"),
    "implementation",
)
NO_CHOICE = 'no token sees another one. Give a longer text: --text "…"'
Progress = Callable[[str], object]
"""Told what is being done, in a few words, whenever that changes."""


class Passing:
    """The examiner that says which layer was just measured."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.doing = progress, ""

    def look(self, call: Call, vitals: Vitals, rows: Tensor | None) -> None:
        """Nothing to look at."""

    def keep(self, name: str, call: Call, seen: object) -> None:
        self.progress(f"{self.doing} {name}")


class Examiners:
    """Everybody who looks closer, and what they saw."""

    def __init__(self, pictures: bool, progress: Progress) -> None:
        self.audit, self.passing = Audit(), Passing(progress)
        self.closer = (Sinks(), Neighbours(), Texts())
        self.pictures = Pictures() if pictures else None

    def all(self) -> list[Examiner]:
        """In the order in which they look."""
        found: list[Examiner] = [self.audit, *self.closer, self.passing]
        return found if self.pictures is None else [*found, self.pictures]

    def begin(self, number: int, count: int, one: Input) -> None:
        """Tell them what the coming pass reads."""
        reading = Reading(
            inputs=(number,),
            tokens=None if one.tokens is None else (tuple(one.tokens),),
            special=None if one.special is None else (tuple(one.special),),
            image=pixels_of(one) is not None,
        )
        for examiner in self.closer:
            examiner.reading = reading
        if self.pictures is not None:
            self.pictures.reading = reading
        self.passing.doing = f"input {number + 1} of {count}:"


def run(
    loaded: Loaded,
    inputs: Sequence[Input],
    *,
    rules: Sequence[str] = (),
    token: str | None = None,
    pictures: bool = True,
    progress: Progress = lambda words: None,
) -> Scan:
    """Scan a model on its inputs, each by itself. Ctrl-C ends it early with what was measured so far.

    Args:
        loaded: the model and what is known of it.
        inputs: what it is run on.
        rules: rules to try in the place of the model's own scale.
        token: a token whose attention is told in full.
        pictures: keep weights, which the report shows.
        progress: told what is being done.
    """
    check_rules(rules)
    examiners = Examiners(pictures, progress)
    about = None if token is None else _about(token, inputs)
    looking = examiners.all()
    watching = examine(loaded.model, looking, caller="scan")
    done, interrupted, by = 0, False, ""
    ours = loaded.source != "object"
    with _as_in_use(loaded.model), offline() if ours else nullcontext(), quiet() if ours else nullcontext():
        try:
            with _unheard(), watching:
                for number, one in enumerate(inputs):
                    examiners.begin(number, len(inputs), one)
                    looking[:] = examiners.all()
                    if about is not None and about.input == number:
                        looking.append(about)
                    _call(loaded, one)
                    done += 1
        except KeyboardInterrupt as stop:
            interrupted, by = True, str(stop) or "Ctrl-C"
        notes = [*loaded.notes, *_notes_of(inputs), *watching.record.notes]
        if interrupted:
            notes.insert(0, f"stopped by {by} after {done} of {len(inputs)} inputs: what follows is what was measured.")
        document = assemble(loaded, inputs, watching.record, examiners, notes)
        if about is not None:
            document["token"] = about.to_dict()
        if rules and not interrupted:
            document["what_if"], interrupted = _what_if(loaded.model, inputs, rules, document, progress)
    return Scan(document, watching.record, interrupted)


def _about(token: str, inputs: Sequence[Input]) -> TokenWeights:
    """Who looks at a token, in the first input that has it."""
    known = [(number, one) for number, one in enumerate(inputs) if one.tokens is not None]
    if not known:
        raise InputError(
            "scan: `token` needs the tokens of a text, and none is known. Give a text, with its tokenizer."
        )
    first: InputError | None = None
    for number, one in known:
        try:
            return TokenWeights(token, one.tokens or (), one.special, number)
        except InputError as error:
            first = first or error
    assert first is not None
    raise first


def call(model: nn.Module, batch: Any) -> object:
    """Run a model as its batch says: keywords, positions, or one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _call(loaded: Loaded, one: Input) -> None:
    """Run it; a model that was loaded here and fails on its input gets a sentence, one's own its own error."""
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
    loaded: Loaded, inputs: Sequence[Input], record: Record, examiners: Examiners, notes: list[str]
) -> dict[str, Any]:
    """The document, from what was recorded and seen."""
    audited = {(one.layer, one.kind): one for one in examiners.audit.layers()}
    layers = [_layer(place, record, audited.get(place)) for place in record.facts]
    heads = _heads(record, examiners)
    found = health.findings(heads, layers, audited.values(), list(record.facts), loaded.drawn)
    judged = any(row["evenness"] is not None and math.isfinite(row["evenness"]) for row in heads)
    level, line = health.verdict(found, len(heads))
    if level in ("ok", "note") and not judged:
        level = "note"
        line = f"Nothing was judged: {NO_CHOICE if heads else 'no attention was seen'}."
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "attemper": __version__,
        "torch": str(torch.__version__),
        "created": created,
        "model": loaded.to_dict(),
        "inputs": [one.to_dict() for one in inputs],
        "verdict": {"level": level, "line": line, "judged": judged or level not in ("ok", "note")},
        "layers": layers,
        "heads": heads,
        "findings": [one.to_dict() for one in found],
        "notes": list(dict.fromkeys(notes)),
    }
    if examiners.pictures is not None:
        document["attention"] = drawn = examiners.pictures.attention()
        add_patches(drawn, loaded.model, inputs)
        if pixels := images(drawn, inputs):
            document["images"] = pixels
        document["notes"] += [f"{note}." for note in examiners.pictures.notes]
    return document


def _layer(place: tuple[str, str], record: Record, scale: LayerScale | None) -> dict[str, Any]:
    facts = record.facts[place].to_dict()
    return {
        "layer": place[0],
        "kind": place[1],
        **{name: facts[name] for name in FACTS},
        "scale": UNAUDITED if scale is None else scale.to_dict(),
    }


UNAUDITED: dict[str, Any] = {
    **dict.fromkeys(
        ("declared", "declared_by", "applied", "measured_by", "rule", "formula", "qk_norm", "after_softmax")
    ),
    **dict.fromkeys(("predicted_std", "logit_std")),
    "factors": [],
    "verdict": "ok",
    "says": "The scale of this layer could not be read.",
}


def _heads(record: Record, examiners: Examiners) -> list[dict[str, Any]]:
    closer = [examiner.table() for examiner in examiners.closer]
    found = []
    for row in record.to_dicts():
        place, head = (row["layer"], row["kind"]), row["head"]
        known: dict[str, Any] = {"layer": row["layer"], "kind": row["kind"], "head": head}
        known |= {name: row[name] for name in SIGNS}
        known |= dict.fromkeys(CLOSER)
        for table in closer:
            rows = table.get(place, [])
            known |= rows[head] if head < len(rows) else {}
        found.append(known)
    return found


CLOSER = (
    *("sink_weight", "sink_token", "sink_position", "evenness_without_sinks"),
    *("neighbour_weight", "neighbour_offset", "text_distance"),
)


def _what_if(
    model: nn.Module, inputs: Sequence[Input], rules: Sequence[str], document: dict[str, Any], progress: Progress
) -> tuple[list[dict[str, Any]], bool]:
    """The signs under other rules, and whether Ctrl-C ended them."""
    applied = {(one["layer"], one["kind"]): one["scale"]["applied"] for one in document["layers"]}
    found: list[dict[str, Any]] = []

    def again() -> None:
        for one in inputs:
            call(model, one.batch)

    progress("what if: once more as it is")
    try:
        with _unheard():
            what_if(
                model,
                again,
                rules,
                applied,
                progress=lambda rule: progress(f"what if the scale were {rule}"),
                keep=lambda one: found.append(one.to_dict()),
            )
    except KeyboardInterrupt as stop:
        by, left = str(stop) or "Ctrl-C", ", ".join(map(repr, rules[len(found) :])) or "none"
        document["notes"].insert(0, f"stopped by {by}; of --what-if were not tried: {left}.")
        return found, True
    return found, False


def _notes_of(inputs: Sequence[Input]) -> Iterator[str]:
    for number, one in enumerate(inputs):
        for note in one.notes:
            yield note if len(inputs) == 1 else f"input {number + 1}: {note}"


@contextmanager
def _as_in_use(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no graph; afterwards every part is in the mode it was in."""
    before = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in before:
            part.training = training


@contextmanager
def _unheard() -> Iterator[None]:
    """A watch says aloud what it could not measure; here it is in the notes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"watch\(\): ")
        yield
