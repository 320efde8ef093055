"""docs/checkpoints.md: the vital signs of published models side by side, with a figure, from docs/data/checkpoints.json.

`make checkpoints`                          measures every model of tests/published, then writes the page
`python scripts/checkpoints.py`             the page and its figure alone, from the numbers that are there
`python scripts/checkpoints.py --measure`   the numbers too, of all models or of those named behind it; needs the packages of
                                            tests/published/requirements.txt
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]
DATA, PAGE, FIGURE = (
    ROOT / "docs" / name for name in ("data/checkpoints.json", "checkpoints.md", "figures/checkpoints.svg")
)
Model = dict[str, Any]
Layer = dict[str, Any]
SUBJECTS = {"language": "Natural language", "speech": "Speech", "molecules": "Molecules"}
LARGE, SHARP = 100, 0.5  # a peak that is an error in training; a share of saturated rows that saturates a head


def measure(names: Sequence[str]) -> None:
    """Scan these models, or all, on their inputs, and keep a row per layer; the others keep theirs."""
    import torch
    import transformers

    import attemper
    from published.models import SOURCES

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    kept = json.loads(DATA.read_text(encoding="utf-8"))["models"] if names else []
    measured = {model["name"]: model for model in kept}
    for name in names or SOURCES:
        print(name, file=sys.stderr, flush=True)
        source = SOURCES[name]
        published = source.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scan = attemper.scan(published.model, published.inputs, tokenizer=published.tokenizer, pictures=False)
        found = {"name": name, "title": source.title, "subject": source.subject, "does": source.does}
        found |= {"package": source.package, "licence": source.licence, "format": source.format}
        found |= {"parameters": scan.to_dict()["model"]["parameters"], "verdict": scan.verdict}
        measured[name] = {**found, "layers": rows(scan)}
    document = {
        "schema": "attemper.checkpoints/1",
        "made_by": "make checkpoints",
        "attemper": attemper.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": machine(),
        "models": [measured[name] for name in SOURCES if name in measured],
    }
    DATA.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def rows(scan: Any) -> list[Layer]:
    from attemper.scan.show.format import short_names

    short = short_names((layer["layer"], layer["kind"]) for layer in scan.layers)
    found = []
    for layer in scan.layers:
        place, scale = (layer["layer"], layer["kind"]), layer["scale"]
        heads = [head for head in scan.heads if (head["layer"], head["kind"]) == place]
        named = Counter(finding["name"] for finding in scan.findings if (finding["layer"], finding["kind"]) == place)
        row = {"layer": short[place], "kind": layer["kind"], "causal": layer["causal"], "keys": layer["keys"]}
        row |= {
            "heads": layer["heads"],
            "head_dim": layer["head_dim"],
            "rule": scale["rule"],
            "qk_norm": scale["qk_norm"],
        }
        row |= {"logit_std": short_number(scale["logit_std"])}
        row |= {
            "alignment": short_number(scale["logit_std"] / scale["predicted_std"] if scale["predicted_std"] else None)
        }
        row |= {"peak": short_number(max(head["peak"] for head in heads))}
        for sign in ("evenness_without_sinks", "effective_keys", "saturated"):
            row[sign] = short_number(mean(head[sign] for head in heads))
        most = max(heads, key=lambda head: head["peak"])
        row |= {"saturated_at_peak": short_number(most["saturated"])}
        row |= {"sinks": named["sink"], "positional": named["positional"]}
        found.append(row)
    return found


def mean(numbers: Iterable[float | None]) -> float | None:
    there = [number for number in numbers if number is not None]
    return sum(there) / len(there) if there else None


def short_number(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


def machine() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
        named = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name"))
    except (OSError, subprocess.CalledProcessError, StopIteration):
        named = platform.machine()
    return f"{named}, {os.cpu_count()} cores"


# the page


def figure(models: Sequence[Model], title: str, note: str) -> Any:
    """A dot per layer: sinks, alignment, the largest logit and saturation, a row per model."""
    from attemper_lab.figures import alt, theme

    values = [
        {
            "model": model["title"],
            "reads": SUBJECTS[model["subject"]].lower(),
            "attention": {"self": "self-attention", "cross": "cross-attention"}[layer["kind"]],
            "sinks": layer["sinks"] / layer["heads"],
            **{sign: layer[sign] for sign in ("alignment", "peak", "saturated")},
        }
        for model in models
        for layer in model["layers"]
    ]
    names = [model["title"] for model in models]
    colour = theme.series("reads", "reads", [name.lower() for name in SUBJECTS.values()])
    shape = alt.Shape(
        "attention:N",
        title=None,
        scale=alt.Scale(domain=["self-attention", "cross-attention"], range=["circle", "triangle-up"]),
    )

    def panel(sign: str, words: str, first: bool = False, **scale: Any) -> Any:
        axis = alt.Axis(labels=first, ticks=first, domain=first, title=None, labelLimit=190, grid=True)
        form = ".0%" if sign in ("sinks", "saturated") else "~g"
        ticks = {"values": scale.pop("ticks")} if "ticks" in scale else {}
        x = alt.X(f"{sign}:Q", title=words, scale=alt.Scale(**scale), axis=alt.Axis(format=form, grid=True, **ticks))
        base = alt.Chart(theme.data([value for value in values if value[sign] is not None]))
        points = base.mark_point(size=46, filled=True, opacity=0.55)
        drawn = points.encode(x=x, y=alt.Y("model:N", sort=names, axis=axis), color=colour, shape=shape)
        return drawn.properties(width=132, height=24 * len(names))

    chart = alt.hconcat(
        panel("sinks", "heads with a sink", first=True, domain=[0, 1]),
        panel("alignment", "alignment of q and k", type="log", domain=[0.3, 6], ticks=[0.5, 1, 2, 4]),
        panel("peak", "largest logit", type="log", domain=[2, 600], ticks=[3, 10, 30, 100, 300]),
        panel("saturated", "saturated rows", domain=[0, 1]),
        spacing=14,
    )
    return theme.finish(chart, title, note)


def in_order(models: Sequence[Model]) -> list[Model]:
    """By what they read."""
    return sorted(models, key=lambda model: list(SUBJECTS).index(model["subject"]))


def share(model: Model) -> float:
    """The share of a model's heads with a sink."""
    return sum(layer["sinks"] for layer in model["layers"]) / sum(layer["heads"] for layer in model["layers"])


def reading(models: Sequence[Model], subject: str) -> list[Model]:
    return [model for model in models if model["subject"] == subject]


def listed(models: Sequence[Model], say: Callable[[Model], str]) -> str:
    return ", ".join(f"{model['title']} {say(model)}" for model in models)


def percent(number: float) -> str:
    return f"{number:.0%}".replace("%", " %")


def shared(model: Model) -> str:
    return percent(share(model))


def sinks_of(model: Model) -> str:
    return f"{sum(layer['sinks'] for layer in model['layers'])} of {sum(layer['heads'] for layer in model['layers'])}"


def about_sinks(models: Sequence[Model]) -> tuple[str, str]:
    """The title, and a paragraph: who has sinks, as the numbers have it."""
    words, speech, molecules = (sorted(reading(models, one), key=share, reverse=True) for one in SUBJECTS)
    many, few = ([model for model in words if (share(model) > SHARP) == side] for side in (True, False))
    most = percent(share(molecules[0]))
    title = (
        f"In {len(many)} of {len(words)} models of natural language most heads have an attention sink; "
        f"in models of molecules at most {most} of them do"
    )
    said = [
        f"Heads with a sink, natural language: {listed(words, sinks_of)}; speech: {listed(speech, sinks_of)}; "
        f"molecules: {listed(molecules, sinks_of)}."
    ]
    causal = [model for model in models if all(layer["causal"] for layer in model["layers"])]
    without = [model for model in causal if share(model) <= SHARP]
    both_sides = [model for model in many if model not in causal]
    if without and both_sides:
        said.append(
            f"A causal mask does not make them ({listed(without, shared)} are causal too), nor do they need one "
            f"({listed(both_sides, shared)}, sees both sides)."
        )
    if few:
        said.append(f"Nor does every model of natural language have them: {listed(few, shared)}.")
    said.append(f"These are {len(models)} models, so this is an observation and no law.")
    return title, " ".join(said)


def about_alignment(models: Sequence[Model]) -> str:
    known = [(model, layer) for model in models for layer in model["layers"] if layer["alignment"]]
    above = [one for one in known if one[1]["alignment"] > 1]
    (high, top), (low, bottom) = (choose(known, key=lambda one: one[1]["alignment"]) for choose in (max, min))
    rules = Counter("QK-norm" if layer["qk_norm"] else layer["rule"] for model in models for layer in model["layers"])
    counted = ", ".join(f"{'1/√d_k' if rule == 'sqrt_dk' else rule} in {count}" for rule, count in rules.most_common())
    return (
        "*Alignment* is the logit std over the one that q and k of the same lengths have in random directions. It is above 1 in "
        f"{len(above)} of {len(known)} layers, and lies between {bottom['alignment']:.2g} ({low['title']}, layer "
        f"{bottom['layer']}) and {top['alignment']:.2g} ({high['title']}, layer {top['layer']}): training changes the directions "
        f"of q and k, and not only their lengths. The scale of the layers: {counted}."
    )


def about_peaks(models: Sequence[Model]) -> str:
    known = [(model, layer) for model in models for layer in model["layers"]]
    large = sorted((one for one in known if one[1]["peak"] > LARGE), key=lambda one: -one[1]["peak"])
    sharp = [one for one in known if (one[1]["saturated"] or 0) > SHARP]
    (model, layer), shares = large[0], [one[1]["saturated_at_peak"] or 0.0 for one in large]
    cross = sum(one[1]["kind"] == "cross" for one in large)
    titles = list(dict.fromkeys(one[0]["title"] for one in large))
    said = (
        f"{len(large)} layers have a logit above {LARGE}, the level at which a *training* is in trouble, "
        f"{'all' if cross == len(large) else cross} of them in cross-attention, in {' and '.join(titles)}. "
        f"The largest is {layer['peak']:.0f} ({model['title']}, layer {layer['layer']}). "
        f"These models work. In the heads with these logits {percent(min(shares))} to {percent(max(shares))} of the rows are "
        "saturated: other keys have logits that are almost as large."
    )
    if sharp:
        places = ", ".join(f"{model['title']} layer {layer['layer']}" for model, layer in sharp)
        peaks = sorted(layer["peak"] for _, layer in sharp)
        reach = f"{peaks[0]:.0f}" if len(peaks) == 1 else f"{peaks[0]:.0f} to {peaks[-1]:.0f}"
        said += (
            f" Saturation comes without large logits: the layers with most rows saturated ({places}) have largest logits of "
            f"{reach}. "
            f"Of the heads there {sum(layer['positional'] for _, layer in sharp)} of {sum(layer['heads'] for _, layer in sharp)} "
            "attend to one place, at most two tokens away, which is sharp by design."
        )
    return said


def ends(model: Model, sign: str, digits: int = 3) -> str:
    known = [layer[sign] for layer in model["layers"] if layer[sign] is not None]
    low, high = (f"{number:.{digits}g}" for number in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"


SUMMARY = (
    "model",
    "what it does",
    "layers × heads × d_k",
    "logit std",
    "alignment",
    "largest logit",
    "evenness without sinks",
    "heads with a sink",
    "saturated rows",
    "scan",
)
DETAILS = ("layer", *SUMMARY[3:8], "attend to a neighbour", "saturated rows")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    for cells in (titles, ["---"] * len(titles), *rows):
        yield f"| {' | '.join(cells)} |"


def summary(model: Model) -> list[str]:
    layers = model["layers"]
    width = Counter(layer["head_dim"] for layer in layers).most_common(1)[0][0]
    cells = [model["title"], model["does"], f"{len(layers)} × {layers[0]['heads']} × {width}"]
    cells += [ends(model, "logit_std"), ends(model, "alignment", 2), f"{max(layer['peak'] for layer in layers):.3g}"]
    saturated = percent(mean(layer["saturated"] for layer in layers) or 0.0)
    return [*cells, ends(model, "evenness_without_sinks", 2), sinks_of(model), saturated, model["verdict"]["level"]]


def details(model: Model) -> Iterable[str]:
    packages = ", ".join(f"`{one}`" for one in model["package"].split())
    yield f"### {model['title']}"
    yield ""
    yield (
        f"{model['does'][0].upper()}{model['does'][1:]}; {model['parameters'] / 1e6:.1f} M parameters, {model['format']}; "
        f"{packages} ({model['licence']})."
    )
    yield ""
    rows = []
    for layer in model["layers"]:
        numbers = [layer[sign] for sign in ("logit_std", "alignment", "peak", "evenness_without_sinks")]
        cells = [layer["layer"], *("–" if number is None else f"{number:.3g}" for number in numbers)]
        cells += [f"{layer['sinks']} of {layer['heads']}", str(layer["positional"])]
        rows.append([*cells, "–" if layer["saturated"] is None else percent(layer["saturated"])])
    yield from table(DETAILS, rows)
    yield ""


NOTE = (
    "A dot is a layer. A sink is a first or special token with over 0.3 of a head's weight; alignment is the logit std over "
    "that of q and k in random directions; a row is saturated if one key has over 99 % of its weight."
)
OPENING = """
# Published models

What a scan measures in models with published, trained weights, side by side: for every layer the spread of the logits, the
alignment of q and k, the largest logit, how even the weights are without sinks, the heads with a sink, and the saturated
rows. `make checkpoints` makes this page; its numbers are in [checkpoints.json](data/checkpoints.json).
"""
MEANS = """
So a scan says of a large logit of a finished model what it does, and keeps the levels for [training](training-guide.md),
where a logit that grows is a warning ([findings](scan.md#findings)).
"""
MEASURED = """
Each model was loaded from files inside a package of the Python or npm index; no code of these packages ran, and the sha256
of the files is in `tests/published/models.py`. Which checkpoint a file is rests on the word of its package. Weights of 4 and
8 bits were widened to float32: they are close to the original ones, not equal. Each model ran on two or three inputs of its
own kind: English or Russian sentences, reactions, antibodies. The models of speech heard a generated buzz, because no
recorded speech is inside these packages, so their numbers on speech may differ. *Evenness without sinks* is entropy over
ln(keys) with first and special tokens left out, the mean of a layer's heads. The other columns are explained in
[scan.md](scan.md).
"""


def page(document: dict[str, Any]) -> str:
    models = in_order(document["models"])
    title, sinks = about_sinks(models)
    lengths = [layer["keys"] for model in models for layer in model["layers"]]
    made = f"attemper {document['attemper']}, torch {document['torch']}, transformers {document['transformers']}"
    lines = [
        OPENING.strip(),
        "",
        f"![{title}](figures/checkpoints.svg)",
        "",
        *table(SUMMARY, map(summary, models)),
        "",
        "## What it shows",
        "",
        f"**Sinks.** {sinks}",
        "",
        f"**Alignment.** {about_alignment(models)}",
        "",
        f"**Large logits.** {about_peaks(models)}",
        "",
        MEANS.strip(),
        "",
        "## How it was measured",
        "",
        MEASURED.strip(),
        "",
        f"The last inputs had {min(lengths)} to {max(lengths):,} keys. {made}; {document['machine']}.",
        "",
        "## Layer by layer",
        "",
        *(line for model in models for line in details(model)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    document = json.loads(DATA.read_text(encoding="utf-8"))
    import vl_convert

    models = in_order(document["models"])
    drawn = figure(models, about_sinks(models)[0], NOTE)
    FIGURE.write_text(vl_convert.vegalite_to_svg(drawn.to_dict()), encoding="utf-8")
    PAGE.write_text(page(document), encoding="utf-8")
    size = math.ceil(DATA.stat().st_size / 1000)
    print(f"{PAGE.relative_to(ROOT)} and {FIGURE.relative_to(ROOT)} written, from {size} kB of numbers")


if __name__ == "__main__":
    main()
