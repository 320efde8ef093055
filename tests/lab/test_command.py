"""`attemper run`, `claims` and `cards`: what they print, write and refuse."""

import json
from pathlib import Path

import pytest

from attemper_lab import NAMES, stored
from attemper_lab.claims import cards, claims
from attemper_lab.engine import command

SMALLER = {
    "worked": {},
    "variance": {"d": (2, 5, 64, 1024), "init": ("unit",), "samples": (1000,)},
    "inits": {"d": (64,), "init": ("fan_in", "linear", "xavier", "gpt2", "t5")},
    "nonunit": {"d": (1, 64), "init": ("unit",), "a": (0.25,), "samples": (1000,)},
    "saturation": {"n": (16, 1024), "rows": (32,)},
    "jacobian": {"n": (1024,), "d": (64,), "batches": (8,), "rule": ("none",)},
    "gradient": {"d": (128, 1024), "n": (128,), "rule": ("none", "sqrt_dk"), "batches": (2,)},
    "gradient_long": {"d": (128,), "n": (1024,), "rule": ("none", "sqrt_dk"), "batches": (2,), "projected": (0,)},
    "divisors": {"d": (128,), "heads": (96,), "batches": (8,)},
    "bounded": {"score": ("additive",), "bound": (10.0,), "n": (16,)},
    "precision": {},
    "parallel": {"n": (8,), "rounds": (1,)},
}


@pytest.fixture(scope="module")
def small_evidence():
    rows = {name: claims.experiment(claims.EVIDENCE[name][0]).run(**settings) for name, settings in SMALLER.items()}
    spread = {
        "additive_variance_fan_in": 0.3,
        "additive_variance_unit": 5.0,
        "dot_variance": 16.0,
        "factor": 9.0,
        "factor_low": 8.0,
        "additive_mib": 1.0,
        "dot_mib": 1.0,
    }
    rows |= {name: stored.rows(name) for name in claims.STORED}
    wider = {name: 16 * value for name, value in spread.items()}
    rows["additive_cost"] = [{"n": 512, "d": 16, **spread}, {"n": 512, "d": 256, **wider}]
    return rows


@pytest.fixture
def little(monkeypatch, small_evidence):
    """Claims and cards on little evidence: what is printed is tested here, what is measured in test_claims.py."""

    monkeypatch.setattr(claims, "_measured", lambda name, *rest: small_evidence.get(name))
    monkeypatch.setattr(claims, "gather", lambda *rest: small_evidence)


@pytest.fixture
def training_alone(monkeypatch):
    """Of what claims need, only models that train are measured."""
    measured = claims._measured
    monkeypatch.setattr(
        claims, "_measured", lambda name, *rest: measured(name, *rest) if name in claims.TRAINING else None
    )


SMALL = ["run", "two_keys", "--d", "16", "--samples", "1000"]


def test_run_prints_the_finding_and_writes_rows(attemper_command, tmp_path):
    target = tmp_path / "rows.json"
    code, out, err = attemper_command(*SMALL, "-o", str(target))
    assert (code, err) == (0, "")
    assert "closed form" in out
    assert json.loads(target.read_text(encoding="utf-8"))["rows"][0]["d"] == 16


def test_where_nothing_is_expected_no_empty_table_is_shown(attemper_command):
    code, out, _ = attemper_command("run", "precision", "--dtype", "bfloat16", "--size", "8")
    assert code == 0
    assert "No closed form or published number is known for these settings." in out
    assert "0 of 0" not in out
    assert "quantity" not in out


def test_run_json_is_one_document(attemper_command):
    code, out, _ = attemper_command(*SMALL, "--seed=1,2", "--json")
    assert code == 0
    assert out.count("\n") == 1
    document = json.loads(out)
    assert [row["seed"] for row in document["rows"]] == [1, 2]
    assert document["expectations"][0]["source"]


def test_list_says_what_every_experiment_asks(attemper_command):
    code, out, _ = attemper_command("run", "--list")
    assert code == 0
    for name in NAMES:
        assert f"\n{name} " in f"\n{out}"
    assert "--kappa" in out


def test_run_without_a_name_lists_and_is_wrong_use(attemper_command):
    code, out, _ = attemper_command("run")
    assert code == 2
    assert "two_keys" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tow_keys"], "run: unknown experiment 'tow_keys'. Did you mean 'two_keys'?"),
        (["two_keys", "--dd", "3"], "run two_keys: unknown option '--dd'. Did you mean '--d'?"),
        (["two_keys", "--forse"], "run two_keys: unknown option '--forse'. Did you mean '--force'?"),
        (["two_keys", "--d"], "run two_keys: --d needs a value. For example: --d 16,64."),
        (["two_keys", "16"], "run two_keys: '16' belongs to no option."),
        (["two_keys", "--d", "0"], "run two_keys: --d must be a whole number of at least 1; got '0'."),
        (["recall", "--lr", "-1"], "run recall: --lr must be a number above 0; got '-1'."),
        (
            ["recall", "--pairs", "300"],
            "run recall: --pairs must be a whole number of at least 2 and at most 256 (one pair",
        ),
        (["recall", "--preset", "ful"], "run recall: unknown --preset 'ful'. Did you mean 'full'?"),
        (["two_keys", "-o", "no/such/x.csv"], "-o: there is no folder 'no/such'. Make it first."),
        (
            ["charlm", "--heads", "3"],
            "run charlm: --d-model must be a multiple of --heads; got 64 and 3. Type --heads 2.",
        ),
        (
            ["worked", "--heads", "7"],
            "run worked: --d-model must be a multiple of --heads; got 512 and 7. Type --heads 4.",
        ),
        (["two_keys", "-o", "x.xls"], "-o must end in .json, .csv, .parquet, .svg, .png, .pdf or .html; got 'x.xls'."),
    ],
)
def test_wrong_use_is_one_sentence_on_stderr(attemper_command, arguments, sentence):
    code, out, err = attemper_command("run", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: {sentence}")


def test_an_existing_output_is_kept_without_force(attemper_command, tmp_path):
    target = tmp_path / "rows.csv"
    target.write_text("mine", encoding="utf-8")
    code, out, err = attemper_command(*SMALL, "-o", str(target))
    assert (code, out) == (2, "")
    assert "already exists. Add --force to overwrite it, or choose another file." in err
    assert target.read_text(encoding="utf-8") == "mine"
    assert attemper_command(*SMALL, "-o", str(target), "--force")[0] == 0
    assert target.read_text(encoding="utf-8").startswith("experiment,")


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs Linux")
def test_an_output_that_cannot_be_written_is_said_before_the_work(attemper_command, monkeypatch):
    monkeypatch.setattr(command, "sweep", lambda *a, **b: pytest.fail("it measured first"))
    code, out, err = attemper_command(*SMALL, "-o", "/proc/rows.json")
    assert (code, out) == (2, "")
    assert err.startswith("Error: -o: cannot write '/proc/rows.json': ")


def test_a_suffix_may_be_upper_case(attemper_command, tmp_path):
    assert attemper_command(*SMALL, "-o", str(tmp_path / "ROWS.CSV"))[0] == 0
    assert (tmp_path / "ROWS.CSV").read_text(encoding="utf-8").startswith("experiment,")


@pytest.mark.parametrize(
    "arguments",
    [
        ["two_keys", "--d", "16,16", "--samples", "1000"],
        ["divisors", "--rule", "sqrt_dmodel", "--d", "8", "--n", "16"],
        ["variance", "--a", "4", "--d", "2,4", "--samples", "1000"],
        ["precision", "--size", "1e-5"],
        ["precision", "--size", "1e30"],
        ["bounded", "--bound", "10000", "--n", "8"],
        ["saturation", "--s", "1e6", "--n", "4", "--rows", "32"],
        ["gradient", "--d", "4", "--n", "8", "--batches", "2", "--rule", "dk"],
        ["jacobian", "--d", "4", "--n", "8", "--batches", "8", "--rule", "dk"],
    ],
)
def test_odd_settings_give_a_finding_strict_json_and_a_figure(attemper_command, tmp_path, arguments):
    code, out, err = attemper_command("run", *arguments, "--json", "-o", str(tmp_path / "figure.svg"))
    assert (code, err) == (0, "")
    document = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert "nan" not in document["finding"]
    assert (tmp_path / "figure.svg").read_bytes().startswith(b"<svg")


def test_failed_cells_are_reported_and_the_exit_code_says_so(attemper_command):
    code, _, err = attemper_command("run", "charlm", "--steps", "1", "--results", "/dev/null/x")
    assert code == 2
    assert "cannot keep results" in err
    code, _, err = attemper_command(*SMALL, "--device", "meta")
    assert code == 1
    assert err.startswith("failed: d=16")


def test_training_takes_every_core_unless_told(attemper_command, monkeypatch, tmp_path):
    from attemper_lab.engine import command
    from attemper_lab.engine.sweep import Swept

    asked = []

    def sweep(found, settings, *, jobs, **others):
        asked.append(jobs)
        return Swept([], 0, [])

    monkeypatch.setattr(command, "sweep", sweep)
    monkeypatch.setattr(command, "_cores", lambda: 4)
    tiny = ["run", "recall", "--results", str(tmp_path)]
    attemper_command(*tiny)
    attemper_command(*tiny, "--jobs", "3")
    attemper_command("run", "two_keys")
    assert asked == [4, 3, None]
    # processes beyond the cells and the cores would only wait, and be waited for
    lowered = attemper_command(*tiny, "--jobs", "300")[2]
    assert "--jobs 300 is lowered to 4: there are 36 cells to measure and 4 cores" in lowered
    few = attemper_command(*tiny, "--jobs", "3", "--seed", "0", "--lr", "1e-3", "--rule", "none,dk")[2]
    assert "--jobs 3 is lowered to 2: there are 2 cells to measure and 4 cores" in few
    assert asked[3:] == [4, 2]
    code, _, err = attemper_command(*tiny, "--jobs", "99999999999")
    assert code == 2
    assert "4096" in err
    assert len(asked) == 5


def test_claims_prints_a_line_each_and_writes_a_page(attemper_command, tmp_path, little):
    page = tmp_path / "claims.html"
    code, out, _ = attemper_command("claims", "-o", str(page))
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("C")] == [claim.id for claim in claims.CLAIMS]
    assert len(lines) <= 60
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.count("<article>") == len(claims.CLAIMS)


def test_one_claim_has_its_whole_story(attemper_command, little):
    code, out, _ = attemper_command("claims", "c8")
    assert code == 0
    assert out.startswith("C8  exp of a large score overflows")
    assert "Verdict: false" in out
    assert "Softmaxes of torch that overflowed, of 27: 0." in out
    code, out, err = attemper_command("claims", "C99")
    assert (code, out) == (2, "")
    assert "C1 to C36" in err


def test_the_file_is_whole_where_the_reader_of_stdout_left(attemper_command, little, monkeypatch, tmp_path):
    """`attemper claims -o claims.json | head`: the verdicts that nobody read are measured and written too."""
    from attemper_lab.claims import show

    def left(one, console):
        raise BrokenPipeError

    monkeypatch.setattr(show, "line", left)
    code, _, _ = attemper_command("claims", "-o", str(tmp_path / "claims.json"))
    assert code == 141
    written = json.loads((tmp_path / "claims.json").read_text(encoding="utf-8"))["claims"]
    assert [one["id"] for one in written] == [claim.id for claim in claims.CLAIMS]


def test_claims_train_measures_what_training_claims_need(attemper_command, monkeypatch, tmp_path, training_alone):
    tiny = {
        "recall": {"d": (16,), "steps": (2,), "batch": (4,), "rule": ("sqrt_dk", "none"), "lr": (1e-3,)},
        "charlm": {"steps": (3,), "batch": (2,), "length": (8,), "d_model": (16,), "lr": (1e-3,)},
        "depth": {"steps": (2,), "batch": (2,), "length": (8,), "d_model": (16,), "layers": (1, 2), "lr": (1e-3,)},
    }
    tiny["memorise"] = {**tiny["charlm"], "init": ("unit",), "rule": ("sqrt_dk", "none"), "text": (6000,)}
    tiny["dmodel"] = {**tiny["charlm"], "init": ("unit",), "rule": ("sqrt_dk", "sqrt_dmodel")}
    assert set(tiny) == set(claims.TRAINING)
    homes = {name: claims.TRAINING[name][0] for name in tiny}
    monkeypatch.setattr(claims, "TRAINING", {name: (homes[name], settings) for name, settings in tiny.items()})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_cores", lambda: 1)  # in this process: how many take part is tested above
    code, out, err = attemper_command("claims", "--train", "--json")
    assert code == 0
    assert "recall: " in err
    judged = {one["id"]: one["verdict"] for one in json.loads(out)["claims"]}
    assert [name for name, verdict in judged.items() if verdict != "not run"] == ["C9", "C14", "C15", "C19", "C20"]
    # minutes must not hang on one process: finished runs are kept, and a second call measures none of them again
    _, again, err = attemper_command("claims", "--train", "--json", "--results", "attemper-results")
    measured = len(tiny) - 1  # nothing else that C11 needs is measured here, so nor is its model
    assert err.count("cells were already measured") >= measured
    assert json.loads(again)["claims"] == json.loads(out)["claims"]


def test_results_without_train_is_refused(attemper_command):
    code, out, err = attemper_command("claims", "--results", "kept")
    assert (code, out) == (2, "")
    assert "Add --train, or leave --results out." in err


def test_a_claim_whose_run_failed_says_so(attemper_command, monkeypatch, training_alone):
    from attemper_lab.engine.sweep import Failure, Swept

    monkeypatch.setattr(claims, "measure", lambda *rest: Swept([], 0, [Failure({"d": 4}, "its worker died 2 times")]))
    code, out, err = attemper_command("claims", "--train", "--json")
    assert code == 0
    assert "recall: failed: d=4: its worker died 2 times" in err
    conditions = {one["id"]: one["condition"] for one in json.loads(out)["claims"]}
    assert conditions["C9"].startswith("a run that it needs failed, see above")


def test_claims_json(attemper_command, little):
    code, out, _ = attemper_command("claims", "--json")
    assert code == 0
    assert len(json.loads(out)["claims"]) == len(claims.CLAIMS)


def test_cards(attemper_command, tmp_path, little):
    target = tmp_path / "cards.tsv"
    code, out, _ = attemper_command("cards", "-o", str(target))
    assert code == 0
    assert "measured now" in out
    assert target.read_text(encoding="utf-8").startswith("#separator:tab\n")
    assert cards.Card("a", "b", "c").measured == "c"
