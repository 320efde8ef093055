"""The ratios that the documents promise: measured for real, and compared with kept ones, for each verdict."""

import json

import pytest
import torch

from attemper import cli
from attemper_lab.bench import calls, cpu, cuda, host, promises, watch
from attemper_lab.bench.candidates import Case
from scripts import benchmarks


def document(torch_version="2.13.0", cpu_model="A processor", **ratios):
    """As `joined` makes it; a ratio is its median, or its median and the range of its noise."""
    full = {
        name: ratio if isinstance(ratio, tuple) else (ratio, 0.98 * ratio, 1.02 * ratio)
        for name, ratio in ratios.items()
    }
    return {
        "machine": {"system": "Linux x86_64", "cpu": cpu_model, "simd": "AVX2", "gpu": None},
        "versions": {"attemper": "0.1.0", "python": "3.11.7", "torch": torch_version, "triton": None},
        "date": "2026-01-31",
        "load": [],
        "ratios": {name: dict(zip(("median", "low", "high"), ratio, strict=True)) for name, ratio in full.items()},
    }


def words(before, now):
    return {verdict.name: verdict.word for verdict in benchmarks.compared(before, now)}


@pytest.mark.parametrize(
    ("now", "word"),
    [
        ((1.10, 1.08, 1.12), "worse"),
        ((1.04, 1.03, 1.05), "same"),  # beyond noise, but no more than 5 %
        ((1.10, 1.01, 1.20), "same"),  # more than 5 %, but the ranges meet
        ((0.90, 0.88, 0.92), "better"),
        ((0.97, 0.96, 0.975), "same"),
        ((1.00, 0.50, 2.00), "same"),
    ],
)
def test_a_ratio_is_worse_if_it_rose_by_more_than_5_percent_beyond_noise(now, word):
    assert words(document(a=(1.0, 0.98, 1.02)), document(a=now)) == {"a": word}


def test_new_and_missing_ratios_are_named():
    assert words(document(a=1.0, b=1.0), document(b=1.0, c=1.0)) == {"a": "missing", "b": "same", "c": "new"}


@pytest.mark.parametrize(
    ("now", "code", "said"),
    [
        (document(a=1.2, b=1.0), 1, "worse    a: 1.00 (0.98 to 1.02) → 1.20 (1.18 to 1.22)"),
        (document(a=0.8, b=1.0), 0, "better   a: 1.00 (0.98 to 1.02) → 0.80 (0.78 to 0.82)"),
        (document(a=1.01, b=1.0), 0, "None of 2 ratios is worse"),
        (document(a=1.0), 1, "missing  b: 1.00 (0.98 to 1.02) → none"),
        (document(a=1.0, b=1.0, c=2.0), 0, "new      c: none → 2.00 (1.96 to 2.04)"),
        (document(a=1.0, b=1.0, torch_version="2.14.0"), 0, "torch has another version"),
        (
            document(a=1.2, b=1.0, cpu_model="Another"),
            0,
            "Nothing is kept for such a machine: benchmarks/linux-x86-64-another",
        ),
    ],
)
def test_exit_codes_and_sentences(now, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmarks, "KEPT", tmp_path / "benchmarks")
    earlier, later = tmp_path / "earlier.json", tmp_path / "later.json"
    earlier.write_text(json.dumps(document(a=1.0, b=1.0)))
    later.write_text(json.dumps(now))
    assert benchmarks.main(["--read", str(earlier), "--keep"]) == 0
    (kept,) = (tmp_path / "benchmarks").iterdir()
    assert (kept.name, json.loads(kept.read_text())) == ("linux-x86-64-a-processor-avx2.json", document(a=1.0, b=1.0))
    capsys.readouterr()
    assert benchmarks.main(["--read", str(later)]) == code
    assert said in capsys.readouterr().out
    assert json.loads(kept.read_text()) == document(a=1.0, b=1.0)
    assert benchmarks.main(["--read", str(later), "--keep"]) == 0  # whoever keeps it has read it


def test_passes_are_joined_by_their_median_and_their_widest_noise():
    def one(median, low, high):
        environment = {"cpu": {"model": "A processor", "simd": "AVX2"}, "system": "Linux x86_64", "gpus": []}
        environment |= {"attemper": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "triton": None}
        ratio = {"median": median, "low": low, "high": high}
        return {"environment": environment, "load": {}, "promises": [{"name": "a", "ratio": ratio}]}

    found = benchmarks.joined([one(1.0, 0.9, 1.1), one(1.2, 1.1, 1.3), one(1.1, 0.95, 1.15)])
    assert found["ratios"] == {"a": {"median": 1.1, "low": 0.9, "high": 1.3}}
    assert found["machine"] == document()["machine"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(calls, "BATCH", 0.0)
    monkeypatch.setattr(host, "BATCH", 0.0)
    monkeypatch.setattr(host, "CALL_ROUNDS", 1)
    monkeypatch.setattr(watch, "MINILM", {**watch.MINILM, "num_hidden_layers": 1, "hidden_size": 48})
    monkeypatch.setattr(promises, "QUICK_CASES", (Case((1, 2, 32, 8), True), Case((1, 2, 32, 8), False, rows=1)))
    monkeypatch.setattr(promises, "QUICK_ENCODER", (1, 16, False))


def test_a_run_measures_all_of_them_on_one_thread(small, tmp_path, monkeypatch, capsys):
    threads, seen = torch.get_num_threads(), []
    measure = cpu.measure
    monkeypatch.setattr(
        cpu, "measure", lambda *given, **options: seen.append(torch.get_num_threads()) or measure(*given, **options)
    )
    monkeypatch.setenv("COLUMNS", "40")
    target = tmp_path / "found.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "promises", "--quick", "--rounds", "3", "-o", str(target)])
    assert not ended.value.code
    out = capsys.readouterr().out
    found = json.loads(target.read_text())
    names = [row["name"] for row in found["promises"]]
    assert len(set(names)) == len(names)
    assert names[:2] == ["16 tokens: sdpa()", "16 tokens: all signs"]
    for part in ("(1, 2, 32, 8; 1 query) full", "watched, every call", "host, 4 tokens, no_grad, cpu: causal"):
        assert sum(part in name for name in names) >= 1, part
    for row in found["promises"]:
        assert 0 < row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    assert set(seen) == {1}
    assert torch.get_num_threads() == threads
    assert max(map(len, out.splitlines())) <= 40
    monkeypatch.setattr(benchmarks, "KEPT", tmp_path / "benchmarks")
    kept = benchmarks.joined([found, found])
    (tmp_path / "joined.json").write_text(json.dumps(kept))
    assert benchmarks.main(["--read", str(tmp_path / "joined.json"), "--keep"]) == 0
    assert benchmarks.main(["--read", str(tmp_path / "joined.json")]) == 0
    assert f"None of {len(names)} ratios" in capsys.readouterr().out


def test_a_ratio_is_our_time_over_that_of_torch():
    assert promises._inverse({"median": 2.0, "low": 1.6, "high": 2.5}) == {"median": 0.5, "low": 0.4, "high": 0.625}


def test_what_is_measured_in_full_exists():
    assert set(promises.SCENES) <= {scene.name for scene in calls.SCENES}
    directions = {(case.direction, case.causal, case.dtype, bool(case.rows)) for case in promises.CASES}
    assert {("forward", True, "float32", False), ("forward_backward", True, "float32", False)} <= directions
    assert ("forward", False, "float32", True) in directions


def test_rows_of_a_gpu_get_a_name_each(monkeypatch):
    """Without a GPU: the rows are made up, their form is that of cuda.rows (tests/bench/test_cuda.py)."""
    ratio = {"median": 1.0, "low": 1.0, "high": 1.0}
    case = {"head_dim": 128, "length": 4096, "causal": False}
    rows = [{"direction": "forward", **case, "candidate": name, "time_vs_sdpa": ratio} for name in ("sdpa", "attemper")]
    rows.append(
        {"direction": "decode", "head_dim": 128, "length": 32768, "candidate": "attemper_bare", "time_vs_read": ratio}
    )
    monkeypatch.setattr(cuda, "rows", lambda **options: rows)
    monkeypatch.setattr(host, "call_rows", lambda *given, **options: [])
    assert dict(promises._on_gpu(True, 3, 1.0, print)) == {
        "GPU forward, d 128, n 4096, full: all signs": ratio,
        "GPU decode, d 128, n 32768: no signs": ratio,
    }


def test_a_bench_that_fails_ends_the_comparison_with_its_code():
    with pytest.raises(SystemExit, match="ended with 2"):
        benchmarks.measured(["--no-such-option"])


def test_kept_files_are_named_after_their_machine():
    kept = sorted(benchmarks.KEPT.glob("*.json"))
    assert kept
    for path in kept:
        assert path.stem == benchmarks.kind(benchmarks.read(path)["machine"])
