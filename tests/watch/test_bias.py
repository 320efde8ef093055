"""Numbers that are added to the scores of visible keys: the record has the largest scale · q·k without them, by every route."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import attemper
from attemper import health
from close import in_float64

HEADS, EACH, LENGTH, SCALE = 3, 4, 7, 0.5
SLOPES = torch.tensor([40.0, 5.0, 0.5], dtype=torch.float64).view(3, 1, 1)
LATE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
ADDED = {
    "ALiBi by the key's position": SLOPES * torch.arange(LENGTH).double(),
    "ALiBi by the distance": SLOPES * (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).double(),
    "relative positions": torch.sin(torch.arange(HEADS * LENGTH**2).double() ** 2).view(HEADS, LENGTH, LENGTH) * 30,
    "one number": torch.tensor(17.0, dtype=torch.float64),
}
HIDING = {"nothing": 0.0, "-inf": -torch.inf, "-1e9": -1e9, "the lowest": torch.finfo(torch.float64).min, "-1e4": -1e4}


def hand_written(q, k, v, bias, hidden):
    return (q @ k.mT * SCALE + bias).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def one_mask(q, k, v, bias, hidden):
    return (q @ k.mT * SCALE + bias.masked_fill(hidden, -1e9)).softmax(-1) @ v


def scaled_after_it(q, k, v, bias, hidden):
    scores = (q @ k.mT + bias / SCALE) * SCALE
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def taken_away_in_place(q, k, v, bias, hidden):
    scores = (q * SCALE) @ k.mT
    scores -= -bias
    scores += torch.zeros(LENGTH, LENGTH).double().masked_fill(hidden, -1e9)
    return scores.softmax(-1) @ v


def baddbmm(q, k, v, bias, hidden):
    bias = bias.expand(q.shape[0], HEADS, LENGTH, LENGTH).flatten(0, 1)
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, beta=1.0, alpha=SCALE)
    return scores.unflatten(0, (-1, HEADS)).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def nothing_times_baddbmm(q, k, v, bias, hidden):
    garbage = torch.full((q.shape[0] * HEADS, LENGTH, LENGTH), torch.nan, dtype=q.dtype)
    scores = torch.baddbmm(garbage, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.0, alpha=SCALE)
    return (scores.unflatten(0, (-1, HEADS)) + bias).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def in_windows(q, k, v, bias, hidden):
    """A mask that is added in another shape, as Swin does."""
    scores = (q @ k.mT * SCALE + bias).view(1, -1, HEADS, LENGTH, LENGTH)
    mask = torch.zeros(LENGTH, LENGTH).double().masked_fill(hidden, -1e9)
    return (scores + mask).view(-1, HEADS, LENGTH, LENGTH).softmax(-1) @ v


def with_a_sink(q, k, v, bias, hidden):
    scores = (q @ k.mT * SCALE + bias).masked_fill(hidden, -torch.inf)
    sink = torch.full((*scores.shape[:-1], 1), 99.0, dtype=q.dtype)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


def sdpa(q, k, v, bias, hidden):
    return scaled_dot_product_attention(q, k, v, bias.masked_fill(hidden, -torch.inf), scale=SCALE)


def own(q, k, v, bias, hidden):
    return attemper.attention(q, k, v, mask=bias.masked_fill(hidden, -1e30), scale=SCALE).output


def own_causal(q, k, v, bias, hidden):
    return attemper.attention(q, k, v, mask=bias, causal=bool(hidden.any()), scale=SCALE).output


FORMS = [
    *(hand_written, one_mask, scaled_after_it, taken_away_in_place, baddbmm, nothing_times_baddbmm, in_windows),
    *(with_a_sink, sdpa, own, own_causal),
]


class Biased(nn.Module):
    """Attention that keeps the largest scale · q·k of its heads, by plain arithmetic."""

    num_heads = HEADS

    def __init__(self, form, bias, hidden):
        super().__init__()
        self.form, self.hidden = form, hidden
        self.qkv = nn.Linear(HEADS * EACH, 3 * HEADS * EACH, dtype=torch.float64)
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, EACH)).permute(2, 0, 3, 1, 4)
        scores = q.detach() @ k.detach().mT * SCALE
        self.scores = scores.masked_fill(self.hidden, -torch.inf).amax((0, 2, 3)).tolist()
        self.logits = (scores + self.bias.detach()).masked_fill(self.hidden, -torch.inf).amax((0, 2, 3)).tolist()
        bias = self.bias.expand(HEADS, LENGTH, LENGTH) if self.form is not hand_written else self.bias
        return self.form(q, k, v, bias, self.hidden).transpose(1, 2).flatten(2)


def built(form, bias, causal=True):
    torch.manual_seed(3)
    model = Biased(form, ADDED[bias], LATE if causal else torch.zeros_like(LATE))
    return model, torch.randn(2, LENGTH, HEADS * EACH, dtype=torch.float64) * 3


@pytest.mark.parametrize(("bias", "causal"), [(bias, number % 2 == 0) for number, bias in enumerate(ADDED)])
@pytest.mark.parametrize("form", FORMS)
def test_the_largest_score_without_it(form, bias, causal):
    model, x = built(form, bias, causal)
    for no_gradients in (False, True):
        with torch.inference_mode(no_gradients), attemper.watch(model) as watch:
            model(x), model(x)  # the second is an intercepted pass where there are any
        rows = watch.record.to_dicts()
        size = ADDED[bias].abs().max().item()
        assert [row["peak"] for row in rows] == [in_float64(one, size=size) for one in model.logits]
        assert [row["score_peak"] for row in rows] == [in_float64(score, size=size) for score in model.scores]
        assert not any(info.biased for info in watch.record.info.values())


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("form", [one_mask, sdpa, own, in_windows])
def test_a_mask_that_only_hides_adds_nothing(form, hiding):
    model, x = built(form, "one number")
    with torch.no_grad():
        model.bias.zero_()
    model.bias.requires_grad_(False)
    plain = model.form
    model.form = lambda q, k, v, bias, hidden: plain(
        q, k, v, bias.masked_fill(hidden, HIDING[hiding]), torch.zeros_like(hidden)
    )
    with attemper.watch(model) as watch:
        model(x)
    assert not any("score_peak" in row for row in watch.record.to_dicts())
    assert "score_peak" not in watch.record.signs
    assert not any(info.biased for info in watch.record.info.values())


def unknown_scale(q, k, v, bias, hidden):
    """Multiplied by numbers that differ by head, after it was added."""
    scores = (q @ k.mT * SCALE + bias) * torch.ones(HEADS, 1, 1, dtype=q.dtype)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def capped(q, k, v, bias, hidden):
    return (90 * ((q @ k.mT * SCALE + bias) / 90).tanh()).masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("form", [unknown_scale, capped])
def test_where_it_is_not_known_nothing_is_judged_by_it(form):
    model, x = built(form, "ALiBi by the key's position")
    with torch.no_grad():
        model.bias.mul_(2)
    attemper.projections(model, x)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with torch.no_grad(), attemper.watch(model) as watch:
        model(x)
    record = watch.record
    assert all(info.biased for info in record.info.values())
    assert max(row["peak"] for row in record.to_dicts()) > 80
    clip = attemper.qk_clip(model, record, 1.0)
    assert not clip.heads
    assert "numbers may be added to its scores" in str(clip)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    high = [one for one in health.check(record) if one.name == "peak"]
    assert {one.level for one in high} <= {"note"}
    assert all("may hold numbers that are added" in one.message for one in high)


def test_alerts_and_numbers_judge_by_it():
    model, x = built(sdpa, "ALiBi by the key's position")
    with attemper.watch(model) as watch:
        model(x)
    assert max(row["peak"] for row in watch.record.to_dicts()) > 100
    assert not [one for one in health.check(watch.record) if one.name == "peak" and one.level != "note"]
    assert not [alert for alert in attemper.integrations.alerts(watch.record) if "logit" in alert.title]
    assert attemper.integrations.summary(watch.record)["attemper/heads_over_50"] == 0
    with torch.no_grad():
        model.qkv.weight.mul_(9)
    with attemper.watch(model) as watch:
        model(x)
    high = [one for one in health.check(watch.record) if one.name == "peak"]
    assert max(one.value for one in high) == max(row["score_peak"] for row in watch.record.to_dicts()) > 50
    assert "without the numbers that are added to it" in high[0].message
    assert attemper.integrations.summary(watch.record)["attemper/heads_over_50"] > 0


def peaks(record):
    return [(row["head"], row["peak"], row.get("score_peak")) for row in record.to_dicts()]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_and_joined_records_keep_it(tmp_path, suffix):
    model, x = built(sdpa, "relative positions")
    plain, _ = built(sdpa, "relative positions")
    plain.form = lambda q, k, v, bias, hidden: scaled_dot_product_attention(q, k, v, ~hidden, scale=SCALE)
    records = []
    for one in (model, plain):
        with torch.no_grad(), attemper.watch(one) as watch:
            one(x)
        records.append(watch.record)
    with_it, without = records
    both = with_it.merge(without)
    largest = [max(a, b) for a, b in zip(model.scores, plain.scores, strict=True)]
    assert [row["score_peak"] for row in both.to_dicts()] == [in_float64(one) for one in largest]
    assert [row["score_peak"] for row in without.merge(with_it).to_dicts()] == [in_float64(one) for one in largest]
    assert peaks(with_it.filter(heads=1)) == [peaks(with_it)[1]]
    for number, record in enumerate((with_it, without, both)):
        path = tmp_path / f"{number}{suffix}"
        record.write(path)
        read = attemper.Record.read(path)
        assert peaks(read) == peaks(record)
        assert set(read.merge(read).signs) == set(record.signs)


def test_a_file_from_before_it_is_read(tmp_path):
    path = tmp_path / "run.jsonl"
    model, x = built(sdpa, "relative positions")
    with torch.no_grad(), attemper.watch(model, path=path) as watch:
        model(x)
    assert peaks(attemper.Record.read(path)) == peaks(watch.record)
    old = path.read_text().replace(', "biased": false', "")
    lines = [line.partition(', "score_peak"')[0] + "}" if '"score_peak"' in line else line for line in old.splitlines()]
    path.write_text("\n".join(lines) + "\n")
    read = attemper.Record.read(path)
    assert not read.notes
    assert [row["peak"] for row in read.to_dicts()] == [row["peak"] for row in watch.record.to_dicts()]
    assert "score_peak" not in read.signs


def test_instrumented_models_say_that_they_do_not_know():
    class Own(nn.Module):
        num_heads = HEADS

        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(HEADS * EACH, 3 * HEADS * EACH, dtype=torch.float64)

        def forward(self, x, mask):
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, EACH)).permute(2, 0, 3, 1, 4)
            return attemper.attention(q, k, v, mask=mask).output

    model, x = Own(), torch.randn(1, LENGTH, HEADS * EACH, dtype=torch.float64)
    attemper.projections(model, (x, None))
    attemper.instrument(model)
    for mask, biased in ((ADDED["relative positions"], True), (~LATE, False), (None, False)):
        with attemper.watch(model) as watch:
            model(x, mask)
        assert {info.biased for info in watch.record.info.values()} == {biased}
        clip = attemper.qk_clip(model, watch.record, 1e-9)
        assert bool(clip.heads) != biased
        assert ("numbers may be added" in str(clip)) == biased
