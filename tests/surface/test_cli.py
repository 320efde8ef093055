"""The command: every subcommand, its options, where it prints, how it exits, and how fast `--help` is."""

import getpass
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import attemper
from attemper import env, kernels
from attemper.errors import KernelUnavailable
from attemper.kernels.contract import Capabilities
from attemper_lab.bench import memory, run

REPO = Path(__file__).parents[2]


@pytest.fixture
def fake_memory(monkeypatch):
    """The memory probe without its processes: a linear answer at once."""
    asked = []

    def peak(candidate, case):
        asked.append(case)
        return memory.Peak(candidate, case, 1024 * case.shape[2], 512, "blockwise")

    monkeypatch.setattr(memory, "peak", peak)
    return asked


def test_help_is_quick_and_loads_no_torch():
    code = (
        "import json, sys, time\n"
        "from attemper.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: code = ended.code\n"
        "heavy = [name for name in ('torch', 'numpy', 'triton') if name in sys.modules]\n"
        "print(json.dumps({'heavy': heavy, 'seconds': time.process_time(), 'code': code}))"
    )
    seconds = []
    for arguments in (["--help"], ["scan", "--help"], ["bench", "--help"], ["explain", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        last = json.loads(done.stdout.splitlines()[-1])
        assert last["heavy"] == []
        assert last["code"] == 0
        assert "Usage: attemper" in done.stdout
        seconds.append(last["seconds"])
    assert min(seconds) < 1  # 0.2 on a quiet machine; torch alone would take more than this


def test_version_and_the_module_form(attemper_command):
    for option in ("--version", "-V"):
        assert attemper_command(option) == (0, f"{attemper.__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "attemper", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{attemper.__version__}\n"


@pytest.mark.parametrize("quiet", [(), ("-q",), ("--quiet",)])
def test_quiet_prints_errors_and_why_a_command_failed_alone(quiet, attemper_command, tmp_path):
    file, why = tmp_path / "o.json", "a finding is at 'note' or above\n"
    words = ("scan", "demo:unscaled", "--fail-on", "note", "-o", file, *quiet)
    code, out, err = attemper_command(*words)
    assert (code, bool(out), file.is_file()) == (1, True, True)
    assert err == (why if quiet else f"{file} written\n{why}")
    code, _, err = attemper_command(*words)
    assert code == 2
    assert "already exists" in err


@pytest.mark.parametrize("words", [(), ("-v",), ("--verbose",), ("-v", "-q")])
def test_verbose_prints_where_an_error_came_from(words, attemper_command, tmp_path):
    """Also the error of another library that became a sentence."""
    (tmp_path / "old.json").write_text("{")
    code, out, err = attemper_command("scan", "--baseline", tmp_path / "old.json", *words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("Error: --baseline: ")
    assert ("json.decoder.JSONDecodeError" in err) == ("Traceback (most recent call last)" in err) == bool(words)


def test_completion_is_printed_and_completes_without_torch(tmp_path):
    def complete(typed):
        asked = {"_ATTEMPER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
        code = "import sys\nfrom attemper.cli import main\ntry: main([])\nfinally: assert 'torch' not in sys.modules"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **asked, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert complete("attemper sc") == ["scan"]
    assert complete("attemper report --f") == ["--force"]
    shown = subprocess.run(
        [sys.executable, "-m", "attemper", "--show-completion", "bash"],
        env={**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_ATTEMPER_COMPLETE=complete_bash" in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_installed_command_is_ours():
    scripts = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"attemper": "attemper.cli:main"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bnch"], "bench"),
        (["bench", "--shap", "1,2,3,4"], "--shape"),
        (["bench", "--rounds", "0"], "--rounds"),
        (["explane", "Love"], "explain"),
        (["scna"], "scan"),
        (["scan", "--what_if", "none"], "--what-if"),
        (["explain", "Love", "--rul", "dk"], "--rule"),
        (["explain", "Love", "--d_model", "8"], "--d-model"),
        (["run", "worked", "--d_model", "8"], "--d-model"),
    ],
)
def test_a_misspelling_is_met_with_the_right_spelling(attemper_command, arguments, words):
    code, out, err = attemper_command(*arguments)
    assert code == 2
    assert out == ""
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--shape", "1,8,2048"],
            "bench: --shape must be four whole numbers B,H,L,E above 0; got '1,8,2048'. Type --shape 1,8,2048,64.",
        ),
        (
            ["--shape", "1,0,16,16"],
            "bench: --shape must be four whole numbers B,H,L,E above 0; got '1,0,16,16'. Type --shape 1,8,2048,64.",
        ),
        (
            ["memry"],
            "bench: unknown part 'memry'. Did you mean 'memory'? Known: 'speed', 'memory', 'cpu', 'cuda', 'watch', 'host', "
            "'promises'. Leave it out for the first two.",
        ),
        (
            ["--dtype", "float23"],
            "bench: unknown --dtype 'float23'. Did you mean 'float32'? "
            "Known: 'float16', 'bfloat16', 'float32', 'float64'.",
        ),
        (
            ["--device", "warp"],
            "bench: --device 'warp' is not usable here; `attemper env` lists what is. Type --device cpu.",
        ),
        (
            ["watch", "--shape", "1,2,3,4"],
            "bench watch: --shape does nothing there; it is for speed. Leave it out, or type attemper bench speed --shape …",
        ),
        (
            ["cpu", "--full"],
            "bench cpu: --causal does nothing there; it is for speed. Leave it out, or type attemper bench speed --causal …",
        ),
        (
            ["memory", "--rounds", "3"],
            "bench memory: --rounds does nothing there; it is for speed and cuda and watch and host and promises. "
            "Leave it out, or type attemper bench speed --rounds …",
        ),
        (["-o", "rows.xls"], "-o must end in .json; got 'rows.xls'. Use -o out.json, for example."),
        (["-o", "no/such/rows.json"], "-o: there is no folder 'no/such'. Make it first."),
    ],
)
def test_wrong_use_is_one_sentence_on_stderr(attemper_command, arguments, sentence):
    assert attemper_command("bench", *arguments) == (2, "", f"Error: {sentence}\n")


def test_an_unknown_kernel_is_named(attemper_command):
    code, out, err = attemper_command("bench", "--kernel", "blokwise")
    assert (code, out) == (2, "")
    assert "unknown --kernel 'blokwise'. Did you mean 'blockwise'?" in err


def test_env_prints_a_table_and_the_same_as_json(attemper_command):
    code, out, err = attemper_command("env", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found == env.describe()
    assert set(found["kernels"]) == set(kernels.KERNELS)
    code, table, err = attemper_command("env")
    assert (code, err) == (0, "")
    for word in (found["attemper"], found["torch"], found["cpu"]["simd"], *found["kernels"], *found["extras"]):
        assert word in table


def test_env_names_no_host_user_or_path(attemper_command):
    text = attemper_command("env", "--json")[1] + attemper_command("env")[1]
    words = set(text.replace('"', " ").split())
    assert not {platform.node(), getpass.getuser()} & words
    for path in (Path.home(), Path.cwd(), sys.prefix, Path(attemper.__file__).parent):
        assert str(path) == "/" or str(path) not in text


def test_env_says_why_a_kernel_is_not_there(monkeypatch):
    def load(name):
        if name == "sentence":
            raise KernelUnavailable("kernel='sentence' needs a compiler.")
        raise ImportError("/home/somebody/lib.so: cannot open")

    monkeypatch.setattr(kernels, "load", load)
    monkeypatch.setattr(
        kernels,
        "KERNELS",
        {"far": Capabilities(devices=("nowhere",)), "sentence": Capabilities(), "path": Capabilities()},
    )
    found = env.describe()["kernels"]
    assert found == {
        "far": {"available": False, "reason": "needs nowhere; none here"},
        "sentence": {"available": False, "reason": "kernel='sentence' needs a compiler."},
        "path": {"available": False, "reason": "does not load: ImportError"},
    }


def test_env_gives_the_pip_line_for_what_is_missing(monkeypatch, attemper_command):
    monkeypatch.setattr(env, "EXTRAS", {"hf": ("transformers", "no-such-package")})
    found = env.describe()["extras"]["hf"]
    assert found["packages"]["no-such-package"] is None
    assert found["install"] == "pip install 'attemper[hf]'"
    assert "pip install 'attemper[hf]'" in attemper_command("env")[1]


def test_env_knows_the_extras_of_the_project():
    declared = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    bare = {name: tuple(re.split(r"[<>=]", one)[0] for one in packages) for name, packages in declared.items()}
    assert {name: packages for name, packages in bare.items() if name != "dev"} == env.EXTRAS


def test_bench_json_is_one_document_with_rows_and_the_machine(attemper_command, fake_memory, tmp_path):
    target = tmp_path / "rows.json"
    arguments = ["--shape", "1,2,64,16", "--rounds", "3", "--length", "512", "--length", "256", "--json"]
    code, out, err = attemper_command("bench", *arguments, "-o", str(target))
    assert code == 0
    document = json.loads(out)
    assert out.count("\n") == 1
    assert document == json.loads(target.read_text(encoding="utf-8"))
    assert document["environment"]["cpu"] == env.describe()["cpu"]
    # forward on both masks, and one forward and backward, five candidates each
    cells = [(row["causal"], row["direction"]) for row in document["speed"]][::5]
    assert cells == [(False, "forward"), (True, "forward"), (True, "forward_backward")]
    assert len(document["speed"]) == 15
    ours = [row for row in document["memory"] if row["candidate"] == "attemper" and row["direction"] == "forward"]
    assert [(row["length"], row["growth"]) for row in ours] == [(256, None), (512, 2.0)]
    assert "(1, 2, 64, 16) causal, float32 on cpu, forward" in err


def test_bench_keeps_a_file_that_is_there(attemper_command, fake_memory, tmp_path):
    target = tmp_path / "rows.json"
    target.write_text("precious")
    words = ["bench", "memory", "--length", "256", "--json", "-o", str(target)]
    code, out, err = attemper_command(*words)
    assert (code, out, fake_memory) == (2, "", [])
    assert "already exists. Add --force to overwrite it" in err
    assert target.read_text() == "precious"
    code, out, _ = attemper_command(*words, "--force")
    assert code == 0
    assert json.loads(out) == json.loads(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("before", "after", "threads", "warnings"),
    [(0.1, 2.0, 2, 0), (5.0, 2.0, 2, 1), (0.1, 5.0, 2, 1), (5.0, 5.0, 2, 2), (5.0, 5.0, 1, 0)],
)
def test_bench_says_when_others_use_the_machine(
    attemper_command, fake_memory, monkeypatch, before, after, threads, warnings
):
    found = env.describe()
    found["cpu"] |= {"cores": 2, "threads": threads}
    monkeypatch.setattr(env, "describe", lambda: found)
    monkeypatch.setattr(run, "_load", iter([before, after]).__next__)
    _, _, err = attemper_command("bench", "memory", "--length", "256", "--json")
    assert err.count("OMP_NUM_THREADS=1 attemper bench") == warnings


def test_bench_one_mask_one_part(attemper_command, fake_memory):
    code, out, _ = attemper_command(
        "bench", "speed", "--shape", "1,1,32,8", "--full", "--rounds", "1", "--dtype", "float64", "--json"
    )
    document = json.loads(out)
    assert code == 0
    assert {row["causal"] for row in document["speed"]} == {False}
    assert {row["dtype"] for row in document["speed"]} == {"float64"}
    assert document["memory"] == fake_memory == []


@pytest.mark.parametrize("columns", [80, 120])
def test_bench_tables_fit_the_terminal(attemper_command, fake_memory, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = attemper_command("bench", "--quick", "--shape", "1,1,64,8")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    for label in ("attemper, all vitals", "torch SDPA", "eager, same statistics"):
        assert sum(line.startswith(label) for line in lines) >= 4  # three times, and memory
    assert "…" not in out  # nothing was cut off


def test_quick_is_smaller_and_gives_way_to_what_is_asked():
    assert run.settings(False) == run.DEFAULT
    quick = run.settings(True, rounds=9, shapes=())
    assert (quick.shapes, quick.rounds) == (run.QUICK.shapes, 9)


def test_memory_of_eager_stops_before_it_hurts(attemper_command, fake_memory):
    code, out, _ = attemper_command("bench", "memory", "--length", "8192", "--length", "65536", "--json")
    assert code == 0
    lengths = [row["length"] for row in json.loads(out)["memory"] if row["candidate"] == "eager_statistics"]
    assert lengths == [8192]


def test_explain_prints_the_flow_or_its_json(attemper_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = attemper_command("explain", "Love Apple phones", "--seed", "3", "--d-k", "16")
    assert (code, err) == (0, "")
    explanation = attemper.explain("Love Apple phones", seed=3, d_k=16)
    assert out == f"{explanation}\n"  # no line of a pipe ends in spaces
    code, out, err = attemper_command("explain", "Love Apple phones", "--seed", "3", "--d-k", "16", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(explanation.to_dict()))


def test_wrong_use_of_explain_is_one_sentence_on_stderr(attemper_command):
    code, out, err = attemper_command("explain", "Love Apple phones", "--heads", "7")
    assert (code, out) == (2, "")
    assert err == (
        "Error: explain(): `d_model` must be a multiple of `heads`; got 512 and 7. "
        "Use 4 or 8 heads, or a d_model of 511 or 518.\n"
    )
    assert attemper_command("explain", "")[0] == 2
    assert attemper_command("explain")[0] == 2
    code, out, err = attemper_command("explain", "a b", "--rule", "layer")
    assert (code, out) == (2, "")
    assert "rule 'layer' (q·k / ((layer + 1) √d_k)) needs `layer`" in err
    assert err.endswith("Add layer=3, or --layer 3 on the command line.\n")
    assert attemper_command("explain", "a b", "--rule", "layer", "--layer", "3")[0] == 0


def test_explain_takes_words_without_quotes(attemper_command):
    quoted = attemper_command("explain", "Love Apple phones", "--heads", "8", "--json")
    assert attemper_command("explain", "Love", "Apple", "--heads", "8", "phones", "--json") == quoted


def test_explain_is_coloured_and_wide_in_a_terminal_only(attemper_command, monkeypatch):
    for name, value in {"COLUMNS": "60", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in attemper_command("explain", "a b")[1]
    monkeypatch.delenv("FORCE_COLOR")
    out = attemper_command("explain", "a b")[1]
    assert "\x1b" not in out
    assert out == "\n".join(line.rstrip() for line in out.splitlines()) + "\n"
    assert 40 < max(map(len, out.splitlines())) <= 60


def test_a_pipe_that_cannot_encode_gets_question_marks():
    command = [sys.executable, "-m", "attemper", "explain", "a", "私", "--d-k", "4", "--d-model", "8"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "cp1252"})
    assert (done.returncode, done.stderr) == (0, b"")
    out = done.stdout.decode("cp1252")
    assert "q·k / ?d_k" in out
    assert " a ?\n" in out.replace("\r\n", "\n")
