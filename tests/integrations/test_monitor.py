"""monitor(): what is logged and when, alerts once, stopping, clipping, bad input; and memory that stays flat."""

import logging
import math
import re
import statistics

import pytest
import torch

import attemper
from attemper.errors import InputError
from attemper.integrations import alerts, monitor, monitoring, picture, summary
from integrations.trained import Tiny, batches, optimizer_of, plain
from watched import Block, stack

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")
X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))
EIGHT = [
    *("effective_keys", "evenness_p05", "heads_over_50", "level"),
    *("logit_std", "peak", "peak_p90", "saturated"),
]


def watched(factor=1.0, **options):
    """A record of one step whose logits grow with the factor."""
    torch.manual_seed(0)
    model = stack()
    with torch.no_grad():
        model[0].packed.weight.mul_(factor)
    with attemper.watch(model, **options) as watch:
        model(X).sum().backward()
    return watch.record


def test_eight_numbers_of_a_step_and_three_of_each_layer():
    record = watched()
    rows, found = record.to_dicts(), summary(record)
    assert sorted(found) == [f"attemper/{name}" for name in EIGHT]
    assert all(type(number) is float for number in found.values())
    peaks = sorted(row["peak"] for row in rows)
    assert found["attemper/peak"] == peaks[-1]
    assert peaks[-2] <= found["attemper/peak_p90"] <= peaks[-1]
    assert found["attemper/logit_std"] == max(row["variance"] for row in rows) ** 0.5
    evenness = sorted(row["evenness"] for row in rows)
    assert evenness[0] <= found["attemper/evenness_p05"] <= evenness[1]
    keys = sorted(row["effective_keys"] for row in rows)
    assert keys[1] <= found["attemper/effective_keys"] <= keys[2]
    assert found["attemper/saturated"] == found["attemper/heads_over_50"] == 0.0
    per_layer = summary(record, layers=True)
    assert sorted(set(per_layer) - set(found)) == sorted(
        f"attemper/{sign}/{layer}" for sign in ("evenness", "logit_std", "peak") for layer in "01"
    )
    assert per_layer["attemper/evenness/1"] == min(row["evenness"] for row in rows if row["layer"] == "1")
    assert "attemper/grad_q_rms" in summary(watched(gradients=True))


OF_A_LAYER = {"peak": max, "variance": max, "logit_std": max, "grad_q_rms": max, "evenness": min}


@pytest.mark.parametrize("heads", [False, True, [1], 0, range(2)])
@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("signs", [None, "entropy", ("entropy", "peak"), ["logit_std", "grad_q_rms"], "all"])
def test_signs_of_layers_and_heads(signs, layers, heads):
    """Every number is that of the record's row, under a name with the sign first."""
    record = watched(gradients=True)
    every = [*record.signs, "logit_std"]
    every.remove("rows")
    named = {"all": every, None: ["peak", "evenness", "logit_std"], "entropy": ["entropy"]}
    chosen = named[signs] if signs is None or isinstance(signs, str) else signs
    shown = {True: [0, 1], False: []}.get(heads, heads) if isinstance(heads, bool) else [heads] if heads == 0 else heads
    expected = {}
    for layer in record.layers:
        rows = record.filter(layers=layer).to_dicts()
        for sign in chosen:
            values = [row["variance"] ** 0.5 if sign == "logit_std" else row[sign] for row in rows]
            if layers or (signs is not None and not shown):
                reduce = OF_A_LAYER.get(sign, OF_A_LAYER["peak"] if sign.startswith("grad_") else statistics.fmean)
                expected[f"attemper/{sign}/{layer}"] = reduce(values)
            expected |= {f"attemper/{sign}/{layer}/head_{head}": values[head] for head in shown}
    found = summary(record, layers=layers, signs=signs, heads=heads)
    assert {name: found[name] for name in found if name not in summary(record)} == expected


def test_the_logger_gets_what_summary_gives():
    """Also where signs and heads can be read only once, and where a layer has fewer heads than another."""
    seen, model = {}, torch.nn.Sequential(Block(heads=4), Block(heads=2))
    options = {"signs": ("entropy", "top_weight"), "heads": [0, 3], "layers": True}
    once = {"signs": iter(options["signs"]), "heads": iter(options["heads"]), "layers": True}
    with monitor(model, every=1, log=lambda metrics, step: seen.update({step: metrics}), **once) as watching:
        for _ in range(2):
            model(X)
            watching.step()
    for step in (0, 1):
        assert seen[step] == summary(watching.record, step, **options)
    assert {name for name in seen[1] if "entropy" in name} == {
        *("attemper/entropy/0", "attemper/entropy/0/head_0", "attemper/entropy/0/head_3"),
        *("attemper/entropy/1", "attemper/entropy/1/head_0"),
    }


def test_cross_attention_has_names_of_its_own():
    layer = torch.nn.TransformerDecoderLayer(16, 2, 16, 0.0, batch_first=True)
    with attemper.watch(layer) as watch:
        layer(X, X[:, :4])
    names = {
        f"attemper/entropy/{part}/head_{head}" for part in ("self_attn", "multihead_attn/cross") for head in (0, 1)
    }
    assert set(summary(watch.record, signs="entropy", heads=True)) - set(summary(watch.record)) == names


def test_what_a_record_lacks_is_an_error_in_a_summary():
    record = watched(signs="peak")
    with pytest.raises(InputError, match="this record has no 'entropy' for `signs`"):
        summary(record, signs="entropy")
    with pytest.raises(InputError, match="no layer has head 7; `heads` may be some of 0 … 1"):
        summary(record, signs="peak", heads=[0, 7])
    assert len(summary(record, signs="all")) == len(summary(record)) + 2


def test_numbers_that_are_missing_or_too_many_are_said_once(caplog, monkeypatch):
    monkeypatch.setattr(monitoring, "MANY", 9)
    model = stack()
    with monitor(model, every=1, signs="entropy", heads=(1, 5), log=lambda metrics, step: None) as watching:
        for _ in range(2):
            model(X)
            watching.step()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "attemper: 10 numbers are logged of each measured step. So many make a logger's pages slow: name fewer signs= or heads=, "
        "or write them to a file with path= for attemper report.",
        "attemper: no layer has head 5; `heads` may be some of 0 … 1.",
    ]


def test_what_was_not_measured_or_is_not_finite_is_left_out():
    assert sorted(summary(watched(signs="peak"))) == [
        f"attemper/{name}" for name in ("heads_over_50", "level", "peak", "peak_p90")
    ]
    model = stack()
    with attemper.watch(model) as watch:
        model(X * math.nan)
    found = summary(watch.record, layers=True, signs="all", heads=True)
    assert found["attemper/level"] == 5.0
    assert all(map(math.isfinite, found.values()))


def test_names_fit_every_logger():
    model = torch.nn.ModuleDict({"a b": torch.nn.ModuleDict({"ü:1": Block()})})
    with attemper.watch(model) as watch:
        model["a b"]["ü:1"](X)
    assert "attemper/peak/a_b.__1" in summary(watch.record, layers=True)


def test_alerts_are_told_once_and_again_when_the_level_rises():
    alerted = {}
    (first,) = alerts(watched(8), alerted=alerted)
    assert (first.level, first.severity) == ("warn", "warning")
    assert re.fullmatch(r"attemper warn: large logits( in 2 heads)?, step 0", first.title)
    assert re.match(r"Step 0, 0 head \d.*\. The largest logit is \d\d\.", first.text)
    assert alerts(watched(8), alerted=alerted) == []
    risen, *_ = alerts(watched(20), alerted=alerted)
    assert (risen.level, risen.severity) == ("error", "error")
    assert alerts(watched(20), alerted=alerted) == []
    assert alerts(watched(8), alerted=alerted) == []  # it fell, and is not told again


def test_many_heads_are_one_alert_with_a_short_title():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(64, 32) for _ in range(3)))
    for block in model:
        torch.nn.init.normal_(block.packed.weight, std=20.0)
    with attemper.watch(model) as watch:
        model(torch.randn(1, 9, 64))
    found = alerts(watch.record)
    assert sum(len(alert.findings) for alert in found) > 90
    assert len(found) <= 4
    assert all(len(alert.title) < 64 and "more." in alert.text for alert in found)


def test_the_picture_has_a_cell_for_each_head_on_one_scale():
    small, large = picture(watched(1)), picture(watched(30))
    assert small.shape == large.shape == (2 * 14 + 2, 2 * 14 + 2, 3)
    assert small.dtype.name == "uint8"
    cells = [image[8, 8].astype(int).sum() for image in (small, large)]
    assert cells[1] < cells[0]  # darker is more
    assert (small[8, 8] != 255).any()
    assert (small[0, 0] == 255).all()
    with pytest.raises(InputError, match=r"picture\(\): `sign` must have a fixed scale; got 'peek'. Did you mean"):
        picture(watched(), sign="peek")


@pytest.mark.parametrize("every", [1, 3])
def test_numbers_are_logged_for_the_steps_that_were_measured(every):
    seen, losses = {}, {}
    model = Tiny().train()
    optimizer = optimizer_of(model)
    with monitor(model, every=every, log=lambda metrics, step: seen.update({step: metrics}), start=4) as watching:
        for step, batch in enumerate(batches(), 4):
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watching.step(loss=loss)
            losses[step] = loss.item()
    expected = [step for step in range(4, 16) if step % every == 0]
    assert list(seen) == watching.record.steps == expected
    assert watching.record.logged == {step: {"loss": losses[step]} for step in expected}
    assert seen[expected[-1]] == summary(watching.record)


@pytest.mark.parametrize("sizes", [(1e-3, 0.3, 1e-3, 9.0, 1e-3), (1e-3, 0.45, 0.2, 0.45, 1e-3)])
def test_a_head_that_was_never_more_than_flat_is_no_alert(caplog, sizes):
    """An untrained head leaves 0.99 and comes back; one that was at work and is flat again is told, once."""
    torch.manual_seed(0)
    model, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 9, 16)
    weight = model.in_proj_weight.detach().clone()
    lowest, told = [], []
    with attemper.integrations.monitor(model, every=1, pictures=0) as monitor:
        for size in sizes:
            with torch.no_grad():
                model.in_proj_weight[:32] = weight[:32] * size
            model(x, x, x)[0].sum().backward()
            caplog.clear()
            monitor.step()
            lowest.append(min(row["evenness"] for row in monitor.record.filter(steps=len(lowest)).to_dicts()))
            told.append([record.message for record in caplog.records if "flat" in record.message])
    at_work = max(sizes) > 1
    assert (min(lowest) < 0.9) == at_work
    assert not any(told[:-1])
    assert len(told[-1]) == at_work


def test_a_clip_that_frozen_weights_prevent_is_told_when_training_begins(caplog):
    model, x = torch.nn.MultiheadAttention(16, 2, batch_first=True, kdim=16, vdim=8), torch.randn(2, 9, 16)
    for weight in (model.q_proj_weight, model.k_proj_weight, model.in_proj_bias):
        weight.requires_grad_(False)
    with attemper.integrations.monitor(model, every=1, pictures=0, clip=1e-3) as monitor:
        for _ in range(2):
            model(x, x, x[..., :8])[0].sum().backward()
            monitor.step()
    said = [record.message for record in caplog.records if "clip" in record.message]
    assert len(said) == 1
    assert "clip=0.001 has no effect on this model: weights of MultiheadAttention are frozen" in said[0]


def test_a_model_that_begins_flat_is_no_alert(caplog):
    model = stack()
    with torch.no_grad():
        for block in model:
            block.packed.weight.mul_(0.01)
    with caplog.at_level(logging.WARNING, "attemper"), monitor(model, every=1) as watching:
        model(X).sum().backward()
        watching.step()
    assert [one.level for one in attemper.health.check(watching.record)][:1] == ["note"]
    assert caplog.records == []


def test_alerts_go_to_the_logger_and_to_python_s_own(caplog, tmp_path):
    path = tmp_path / "log.jsonl"
    model = stack()
    with torch.no_grad():
        model[0].packed.weight.mul_(20)
    with monitor(model, every=1, log=path, stop_on="error") as watching:
        for _ in range(2):
            model(X).sum().backward()
            assert watching.should_stop == bool(watching.record.steps)
            watching.step()
    lines = path.read_text().splitlines()
    assert sum('"attemper/peak"' in line for line in lines) == 2
    assert sum('"alert"' in line for line in lines) >= 1
    said = [record.getMessage() for record in caplog.records]
    assert sum("attemper error: large logits" in line for line in said) == 1
    assert sum("the training should stop" in line for line in said) == 1
    assert watching.reason.startswith("The largest logit is")


def test_a_clip_that_finds_nothing_changes_nothing():
    free, record = plain(every=1)
    clipped, other = plain(every=1, clip=1e6)
    assert repr(record.to_dicts()) == repr(other.to_dicts())
    assert all(map(torch.equal, free.state_dict().values(), clipped.state_dict().values()))


def test_clipped_heads_come_down():
    seen = {}
    _, record = plain(every=1, clip=2.0, log=lambda metrics, step: seen.update({step: metrics}))
    assert sum(metrics["attemper/clipped"] for metrics in seen.values()) > 3
    last = max(row["peak"] for row in record.filter(steps=record.steps[-1]).to_dicts())
    free = max(row["peak"] for row in plain(every=1)[1].filter(steps=record.steps[-1]).to_dicts())
    assert last < free


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "`every` must be a whole number, at least 1; got 0"),
        ({"every": True}, "`every` must be a whole number"),
        ({"keep_steps": 0}, "`keep_steps` must be a whole number, at least 1; got 0. Leave it out for 100"),
        ({"pictures": -1}, "`pictures` must be a whole number, at least 0; got -1. Use 0 for none"),
        ({"layers": 1}, "`layers` must be True or False; got 1"),
        ({"signs": "entrpy"}, "`signs` must be 'all', a sign's name or several; got 'entrpy'. Did you mean 'entropy'?"),
        ({"signs": ("peak", 3)}, "`signs` must be 'all', a sign's name or several; got 3. Known: 'all', 'peak'"),
        ({"signs": 3}, "`signs` must be 'all', a sign's name or several; got 3"),
        ({"signs": [["peak"]]}, "`signs` must be 'all', a sign's name or several; got ['peak']"),
        ({"signs": "grad_q_rms"}, "'grad_q_rms' in `signs` is measured only with gradients=True. Add it"),
        ({"heads": "all"}, "`heads` must be True for all, or the numbers of heads, such as [0, 3]; got 'all'"),
        ({"heads": [0, True]}, "`heads` must be True for all, or the numbers of heads"),
        ({"heads": 0.5}, "`heads` must be True for all, or the numbers of heads, such as [0, 3]; got 0.5"),
        ({"heads": None}, "`heads` must be True for all, or the numbers of heads, such as [0, 3]; got None"),
        ({"clip": 0}, "`clip` must be a logit above 0, such as 100; got 0. Leave it out for no clip"),
        ({"clip": math.nan}, "`clip` must be a logit above 0"),
        ({"clip": True}, "`clip` must be a logit above 0"),
        ({"clip": math.inf}, "`clip` must be a logit above 0"),
        ({"stop_on": "critcal"}, "`stop_on` must be a level of a finding; got 'critcal'. Did you mean 'critical'?"),
        ({"path": "run.txt"}, "`path` must end in .jsonl; got 'run.txt'"),
        ({"log": "run.csv"}, "`log` must end in .jsonl; got 'run.csv'"),
        ({"log": 3}, "`log` must be a function (metrics, step), a run of W&B"),
        ({"log": dict}, "`log` must be a function (metrics, step)"),
        ({"start": -1}, "`start` must be the number of a step"),
    ],
)
def test_bad_input_gets_a_sentence_before_the_training(options, words):
    with pytest.raises(InputError) as error:
        monitor(stack(), **options)
    assert words in str(error.value)


def test_two_monitors_of_one_model_are_an_error():
    model = stack()
    with monitor(model, every=1) as watching:
        with pytest.raises(InputError, match="this model has a monitor already"):
            monitor(model).__enter__()
        model(X)
        watching.step()
    with monitor(model, every=1) as watching:  # and one after the other is fine
        model(X)
        watching.step()


def test_ranks_that_could_stop_at_different_steps_are_refused(monkeypatch):
    monkeypatch.setattr("attemper.integrations.monitoring.are_many", lambda: True)
    with pytest.raises(InputError, match=r"^monitor\(\): `stop_on` needs the rows of all ranks"):
        monitor(stack(), stop_on="error").__enter__()


def test_a_record_without_that_step_is_named():
    for ask in (summary, alerts, picture):
        with pytest.raises(InputError, match=r"the record has no step 7. It has: 0."):
            ask(watched(), 7)
        with pytest.raises(InputError, match=r"the record has no steps\. Watch one first\."):
            ask(attemper.Record())


def test_memory_stays_flat_over_many_steps():
    """scripts/training_cost.py does 10,000; here the record, what was logged and what was told have their bounds."""
    model, x = Block(64, 32), torch.randn(1, 2, 64)
    with monitor(model, every=1, keep_steps=5, log=lambda metrics, step: None) as watching:
        for _ in range(120):
            model(x).sum().backward()
            watching.step(loss=torch.tensor(1.0))
    assert watching.record.steps == list(range(115, 120))
    assert sorted(watching.record.logged) == list(range(115, 120))
    assert len(watching.record._buffer.blocks) <= 2
    assert len(watching.record.notes) == 1


def test_a_clip_that_is_not_possible_is_refused_before_the_first_step():
    model = stack()
    model[0].packed.weight.ds_id = 0  # as DeepSpeed ZeRO-3 marks it
    with monitor(model, every=1):
        model(X).sum().backward()  # it can be watched
    with pytest.raises(InputError, match=r"^monitor\(clip=30\): 0\.packed\.weight belongs to DeepSpeed ZeRO"):
        monitor(model, clip=30.0).__enter__()
    with monitor(model, every=1):  # nothing is open
        model(X).sum().backward()
