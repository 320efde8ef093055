"""The interleaved timer: every round runs everyone, ratios are paired, time is bounded."""

from collections import Counter
from itertools import pairwise, permutations
from types import SimpleNamespace

import pytest

from attemper_lab import timing
from attemper_lab.bench import speed
from attemper_lab.bench.candidates import CANDIDATES, Case
from attemper_lab.timing import Times, interleave, median_interval
from close import assert_float64, in_float64


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde"])
def test_every_round_runs_each_candidate_once_and_each_follows_each_as_often(names):
    calls, count = [], len(names)
    times = interleave({name: lambda name=name: calls.append(name) for name in names}, rounds=2 * count, warmup=1)
    assert times.rounds == 2 * count
    assert all(len(seconds) == 2 * count for seconds in times.seconds.values())
    rounds = ["".join(calls[at : at + count]) for at in range(count, len(calls), count)]
    assert all(sorted(one) == sorted(names) for one in rounds)
    followed = Counter(pair for one in rounds for pair in pairwise(one))
    assert set(followed) == set(permutations(names, 2))
    assert set(followed.values()) == {2}


def test_a_slower_call_is_seen_to_be_slower(monkeypatch):
    """On a clock of its own: on a busy machine a short sleep takes as long as a long one."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def sleep(seconds):
        now[0] += seconds

    times = interleave({"a": lambda: sleep(0.002), "b": lambda: sleep(0.02)}, rounds=3)
    assert times.spread("b").median == in_float64(0.02, size=1.0)
    assert times.speed("a", than="b").median > 2


def test_ratios_are_paired_within_rounds():
    # the machine slows down tenfold after the second round; b always takes twice as long as a
    times = Times({"a": [1.0, 1.0, 10.0, 10.0, 10.0], "b": [2.0, 2.0, 20.0, 20.0, 20.0]})
    ratio = times.speed("a", than="b")
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    assert times.speed("b", than="a").median == 0.5
    # one candidate alone was disturbed, in two rounds of five: the median of the ratios stays
    disturbed = Times({"a": [1.0, 9.0, 1.0, 9.0, 1.0], "b": [2.0, 2.0, 2.0, 2.0, 2.0]})
    assert disturbed.speed("a", than="b").median == 2.0
    assert disturbed.speed("a", than="b").low < 0.5  # and the interval says so


def test_spread_is_the_quartiles():
    spread = Times({"a": [5.0, 1.0, 2.0, 4.0, 3.0]}).spread("a")
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)
    assert Times({"a": [7.0]}).spread("a").high == 7.0


def test_interval_is_repeatable_and_narrows_with_more_rounds():
    values = [1 + 0.1 * ((7 * i) % 10) for i in range(10)]
    few, many = median_interval(values), median_interval(values * 10)
    assert few == median_interval(values)
    assert few.low <= few.median <= few.high
    assert many.high - many.low < few.high - few.low


def test_time_is_bounded_but_never_below_three_rounds():
    counted = []
    times = interleave({"a": lambda: counted.append(0)}, rounds=1000, warmup=5, budget=0.0)
    assert times.rounds == 3
    assert len(counted) == 4  # one warm-up, then three


def test_a_row_per_candidate_with_both_baselines():
    rows = speed.measure(Case((1, 2, 96, 16), True), rounds=3, budget=5.0)
    assert [row["candidate"] for row in rows] == list(CANDIDATES)
    by_name = {row["candidate"]: row for row in rows}
    assert by_name["sdpa"]["speed_vs_sdpa"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert by_name["eager_statistics"]["speed_vs_eager_statistics"]["median"] == 1.0
    assert {row["kernel"] for row in rows} == {by_name["attemper"]["kernel"], None}
    for row in rows:
        assert row["rounds"] == 3
        assert row["ms"]["low"] <= row["ms"]["median"] <= row["ms"]["high"]
        assert row["of_gemm"]["median"] > 0


def test_eager_is_left_out_when_its_matrix_is_too_large(monkeypatch):
    monkeypatch.setattr(speed, "EAGER_LIMIT", 4 * 96 * 96 - 1)
    notes = []
    rows = speed.measure(Case((1, 1, 96, 16), False), rounds=3, budget=5.0, note=notes.append)
    assert [row["candidate"] for row in rows] == ["attemper", "attemper_bare", "sdpa"]
    assert "speed_vs_eager_statistics" not in rows[0]
    assert "eager left out" in notes[0]


@pytest.mark.parametrize(("direction", "products"), [("forward", 2), ("forward_backward", 6)])
def test_flops_are_those_of_the_matrix_products(direction, products):
    case = Case((2, 3, 128, 16), False, direction)
    assert case.flops == products * 2 * 2 * 3 * 128 * 128 * 16
    assert Case((2, 3, 128, 16), True, direction).flops == case.flops / 2
    side = speed.gemm_side(1e12, "cpu")
    assert 2 * side**3 == pytest.approx(1e12, rel=0.05)


def test_candidates_agree_on_the_output_and_the_gradients():
    from attemper_lab.bench.candidates import call

    tensors = Case((1, 2, 64, 16), True, "forward_backward", "float64").tensors()
    found = {name: call(name, tensors)() for name in CANDIDATES}
    for name, results in found.items():
        assert_float64(results[0], found["sdpa"][0], name)
    for with_entropy in (("attemper", "eager_statistics"), ("attemper_bare", "sdpa", "eager")):
        for name in with_entropy:
            assert_float64(tuple(found[name][-3:]), tuple(found[with_entropy[0]][-3:]), name)
