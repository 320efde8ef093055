"""Stacked runs: a stack equals runs on their own, keeps its rows, continues them, and stops in time."""

import contextlib
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attemper.errors import InputError
from attemper.scale import rule
from attemper_lab.training.recall import Recall
from close import assert_float64, in_float64
from research.stacked import recall
from research.stacked.adam import StackedAdam
from research.stacked.parameters import StackedParameters
from research.stacked.repeated import Repeated
from research.stacked.study import Deadline, missing, work
from research.stacked.text import sources
from research.studies import STUDIES, collapse, study

CELLS = [
    {"d": 8, "pairs": 4, "rule": "sqrt_dk", "lr": 0.01, "seed": 0},
    {"d": 8, "pairs": 6, "rule": "none", "lr": 0.03, "seed": 1},
    {"d": 8, "pairs": 4, "rule": "none", "lr": 0.003, "seed": 0},
]


class OneRecall(nn.Module):
    """`Recall` of lab/training in float64, with the vocabulary of the stack."""

    forward = Recall.forward

    def __init__(self, cell):
        super().__init__()
        values = recall.initial(cell["d"], cell["pairs"], cell["seed"], "cpu", torch.float64)
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value))
        scale = rule(cell["rule"]).scale(head_dim=cell["d"])
        self.attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale)


def alone(cell, steps, batch):
    """One run by torch's own Adam, sequence by sequence; its parameters."""
    model = OneRecall(cell)
    optimizer = torch.optim.Adam(model.parameters(), cell["lr"])
    stream = recall.generator("cpu", "stacked recall data", cell["pairs"], cell["seed"])
    for step in range(steps):
        if step % recall.DRAWN == 0:
            drawn = recall.sequences(recall.DRAWN * batch, cell["pairs"], cell["pairs"], stream)
        at = step % recall.DRAWN * batch
        *inputs, answer = (part[at : at + batch] for part in drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(*inputs), answer).backward()
        optimizer.step()
    return dict(model.named_parameters())


def test_a_stack_of_recall_is_its_runs():
    stack = recall.RecallStack(8, CELLS, batch=4, device="cpu", dtype=torch.float64)
    for _ in range(12):
        stack.train()
    stack.keep([0, 2])  # and goes on without one of them
    for _ in range(8):
        stack.train()
    for index, cell in enumerate((CELLS[0], CELLS[2])):
        for name, expected in alone(cell, 20, 4).items():
            assert_float64(stack.parameters.views[name][index].detach(), expected.detach(), name)


def test_the_gradient_is_that_at_the_softmax():
    """J·dL/dp, by hand, of the sequences of the first step."""
    stack = recall.RecallStack(8, CELLS[:1], batch=4, device="cpu", dtype=torch.float64)
    stack.train()
    model, drawn = OneRecall(CELLS[0]), recall.generator("cpu", "stacked recall data", 4, 0)
    *inputs, answer = (part[:4] for part in recall.sequences(recall.DRAWN * 4, 4, 4, drawn))
    seen = []

    def attention(query, key, value):
        weights = (query @ key.mT * 8**-0.5).softmax(-1)
        weights.retain_grad()
        seen.append(weights)
        return weights @ value

    model.attention = attention
    F.cross_entropy(model(*inputs), answer, reduction="sum").backward()
    weights, upstream = seen[0][:, 0, 0], seen[0].grad[:, 0, 0]
    sizes = (weights * (upstream - (weights * upstream).sum(-1, keepdim=True))).norm(dim=-1)
    assert_float64(stack.gradient[0], torch.stack([sizes.sort().values[2], sizes.square().mean().sqrt()]).detach())


def test_adam_is_torchs_with_clipping_and_decay():
    torch.manual_seed(0)
    shapes, runs, steps = {"a": (3, 5), "b": (7,)}, 2, 6
    stack = StackedParameters(shapes, runs, "cpu", torch.float64)
    models = [{name: nn.Parameter(torch.randn(shape).double()) for name, shape in shapes.items()} for _ in range(runs)]
    rates = torch.rand(runs, steps, dtype=torch.float64)
    decay = rates * 0.1  # torch's takes the rate times a factor
    mine = StackedAdam(stack, rates, (0.9, 0.95), clip=1.0, decay=decay, decayed=torch.ones(stack.flat.shape[1]))
    theirs = [torch.optim.AdamW(model.values(), 1.0, betas=(0.9, 0.95), weight_decay=0.1) for model in models]
    for run, model in enumerate(models):
        stack.fill(run, model)
    for step in range(steps):
        gradients = {name: torch.randn(runs, *shape).double() for name, shape in shapes.items()}
        mine.update(stack.gathered(list(gradients.values())))
        for run, model in enumerate(models):
            for name, parameter in model.items():
                parameter.grad = gradients[name][run].clone()
            norm = torch.nn.utils.clip_grad_norm_(model.values(), 1.0)
            assert_float64(mine.norm[run], norm)
            theirs[run].param_groups[0]["lr"] = float(rates[run, step])
            theirs[run].step()
    for run, model in enumerate(models):
        for name, parameter in model.items():
            assert_float64(stack.views[name][run].detach(), parameter.detach(), name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if name in ("ablation", "sensitivity") else name
        for name in STUDIES
    ],
)
def test_a_study_is_measured_whole(name, tmp_path):
    subject = study(name)
    rows = work(subject, "tiny", tmp_path, "cpu", 60)
    assert subject.plan(rows, subject.presets["tiny"]) == []
    assert subject.question.endswith("?")
    assert isinstance(subject.summary(rows), list)
    title = subject.draw(rows, subject.finding(rows)).to_dict()["title"]["text"]
    assert "".join(title).replace(" ", "") == subject.finding(rows).replace(" ", "")


def test_a_study_continues_what_is_there(tmp_path):
    subject = study("rescue")
    whole = work(subject, "tiny", tmp_path / "whole", "cpu", 60)
    lines = (tmp_path / "whole" / "rescue.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "rescue.jsonl").write_text("".join(lines[:3]))
    continued = work(subject, "tiny", tmp_path / "part", "cpu", 60)
    assert {(row["number"], row["treatment"], row["delay"]) for row in continued} == {
        (row["number"], row["treatment"], row["delay"]) for row in whole
    }
    assert (tmp_path / "part" / "rescue.jsonl").read_text().startswith("".join(lines[:3]))


def test_a_study_does_not_mix_two_texts(tmp_path):
    subject = study("rescue")
    work(subject, "tiny", tmp_path, "cpu", 60)
    path = tmp_path / "rescue.jsonl"
    path.write_text(path.read_text().replace(sources()[1], "1 bytes, sha256 0"))
    with pytest.raises(InputError, match="trained on a text of 1 bytes"):
        work(subject, "tiny", tmp_path, "cpu", 60)


def test_a_study_stops_when_its_time_is_over(tmp_path, capsys):
    assert work(study("collapse"), "tiny", tmp_path, "cpu", 0) == []
    assert "the time is over; the same command continues" in capsys.readouterr().err


def planted(slope, by):
    """Rows of runs that are as slow as a power of a variable says."""
    rows = []
    for d in (16, 64, 256, 1024):
        for pairs in (8, 64, 512):
            for name in collapse.RULES:
                for seed in (0, 1, 2):
                    for factor, lr in ((2.0, 0.001), (1.0, 0.003), (2.0, 0.01)):
                        steps = 100 * factor * (by(d, pairs) ** slope if name == "none" else 1.0)
                        row = {"d": d, "pairs": pairs, "rule": name, "lr": lr, "seed": seed, "accuracy": 0.9}
                        rows.append({**row, "steps_test": steps, "steps_validation": steps})
    return rows


def test_the_fit_tells_a_collapse_from_none():
    joint = planted(1.5, lambda d, n: math.sqrt(d / (2 * math.log(n))))
    assert collapse.fits(joint)[0]["slope"] == "1.50"
    assert collapse.finding(joint).startswith(
        "Where it learns, the slow-down without a scale grows with √d_k / √(2 ln n) (R² 1.00), not"
    )
    product = planted(1.5, lambda d, n: math.sqrt(d * 2 * math.log(n)))
    found = {row["variable"]: row for row in collapse.fits(product)}
    assert found[collapse.PRODUCT]["slope"] == "1.50"
    assert found[collapse.PRODUCT]["left out"] == in_float64(1.0)
    assert found[collapse.RATIO]["p"] < 1e-6
    assert collapse.finding(product).startswith(
        "Where it learns, the slow-down without a scale grows with √d_k · √(2 ln n) (R² 1.00), not"
    )
    width = planted(1.5, lambda d, n: math.sqrt(d))
    assert collapse.fits(width)[1]["slope"] == "1.50"
    assert collapse.finding(width).startswith("Without a scale training slows down with √d_k")
    assert all(row["at_edge"] == "neither" for row in collapse.summary(joint))
    slow = [row for row in joint if (row["d"], row["pairs"], row["rule"]) != (16, 8, "sqrt_dk")]
    never = dict.fromkeys(("steps_test", "steps_validation"), math.inf)
    lost = [{**row, **never} for row in joint if row not in slow]
    assert collapse.dropped(slow + lost) == [(16, 8)]


def test_cells_that_never_learned_count_as_at_least_so_slow():
    """Runs that end before they have learned hide a slope of ln n from a fit without them; the last fit finds it again."""
    rows = planted(1.5, lambda d, n: math.sqrt(d) * math.log(n) / 8)
    ended = [
        {
            **row,
            "step": 4000,
            **(dict.fromkeys(("steps_test", "steps_validation"), math.inf) if row["steps_test"] > 4000 else {}),
        }
        for row in rows
    ]
    lost = [row for row in collapse.summary(ended) if not math.isfinite(row["slower"])]
    assert 2 <= len(lost) <= 6
    assert all(row["slower_least"] == 40 for row in lost)
    product, last = collapse.fits(ended)[-2:]
    assert last["cells"] == product["cells"] == 12
    assert product["p"] < 1e-6  # planted as √d_k · ln n
    assert [round(float(slope), 1) for slope in last["slope"].split(" and ")] == [1.5, 1.5]
    least = [math.log(row["slower_least"]) for row in lost]
    xs = [[math.log(row["d"]) / 2, math.log(math.log(row["pairs"]))] for row in lost]
    slopes, *_ = collapse._regression([[x] for x, _ in xs], least)
    assert abs(slopes[0]) < 0.1  # taken at their word the limits would say that nothing grows


def test_a_rate_at_the_edge_gets_a_neighbour():
    powers = collapse.first_rates(16, "none")

    def row(power, steps):
        return {"lr": collapse.rate(power), "seed": 0, "steps_validation": steps, "accuracy": 0.9}

    rising = [row(power, 100 - index) for index, power in enumerate(powers)]
    assert collapse.extended(rising, powers, (0,), collapse.promising) == [*powers, powers[-1] + 1]
    assert collapse.extended([*rising, row(powers[-1] + 1, 500)], powers, (0,), collapse.promising) == [
        *powers,
        powers[-1] + 1,
    ]
    assert collapse.extended(rising[1:], powers, (0,), collapse.promising) == powers  # not all are measured
    lost = [{**one, "steps_validation": math.inf, "accuracy": 0.03} for one in rising]
    assert collapse.extended(lost, powers, (0,), collapse.promising) == powers  # none learns


def test_a_deadline_counts_down():
    assert not Deadline(60).over
    assert Deadline(0).over


class Recording:
    """In the place of torch's CUDA graph: what is done while it records is not done, and a replay does it."""

    now = None

    def __init__(self):
        self.steps = []

    def replay(self):
        for step in self.steps:
            step()


@contextlib.contextmanager
def record(graph, pool=None):
    Recording.now = graph
    try:
        yield
    finally:
        Recording.now = None


@pytest.mark.parametrize(
    "error", [None, RuntimeError("operation not permitted when stream is capturing"), MemoryError()]
)
def test_every_call_on_a_gpu_is_one_step(monkeypatch, capsys, error):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    count = []

    def step():
        if Recording.now is None:
            count.append(1)
        elif error is not None:
            raise error
        else:
            Recording.now.steps.append(lambda: count.append(1))

    repeated = Repeated(step, "cuda")
    if isinstance(error, MemoryError):  # a smaller stack may fit
        repeated()
        repeated()
        with pytest.raises(MemoryError):
            repeated()
        return
    for _ in range(7):
        repeated()
    assert len(count) == 7
    assert (repeated.graph is None) == (error is not None)
    assert ("steps are not recorded" in capsys.readouterr().err) == (error is not None)


def test_a_stack_that_does_not_fit_is_halved(tmp_path, capsys):
    asked = []

    def train(cells, rows, settings, device, deadline):
        asked.append(len(cells))
        if len(cells) > 2:
            raise MemoryError
        for cell in cells:
            yield cell, [{"value": 1}]

    def plan(rows, settings):
        return missing(rows, [{"number": number} for number in range(6)])

    found = dataclasses.replace(study("rescue"), plan=plan, train=train, total=lambda settings: 6.0)
    assert len(work(found, "tiny", tmp_path, "cpu", 60)) == 6
    assert asked == [6, 3, 1, 1, 1, 1, 1, 1]
    assert "not enough memory for 6 runs: stacks of 3 from here on" in capsys.readouterr().err
