"""A sweep: resumed after a kill with the same rows, parallel, and honest about workers that die."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked
from attemper.errors import InputError
from attemper_lab import experiment
from attemper_lab.engine.experiment import Experiment, Parameter
from attemper_lab.engine.fingerprint import fingerprint
from attemper_lab.engine.store import Store
from attemper_lab.engine.sweep import sweep

CELLS = "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16"
KILLED = """
import os, signal
from attemper import cli
from attemper_lab.engine.experiment import Experiment

measure, measured = Experiment.rows, []


def rows(self, cell):
    if len(measured) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    measured.append(cell)
    return measure(self, cell)


Experiment.rows = rows
cli.main(["run", "two_keys", "--d", argv[0], "--samples", "1000", "--json", "--results", argv[1]])
"""


def toy(measure, values=(1, 2, 3, 4)) -> Experiment:
    """An experiment of one parameter; what it is made of travels to workers by value."""
    return Experiment(
        name="toy",
        question="?",
        claims=(),
        parameters=(Parameter("x", values, "a number"),),
        measure=measure,
        expect=lambda rows: [],
        finding=lambda rows: "",
        draw=lambda rows, finding: None,
    )


def test_a_killed_sweep_resumes_and_gives_the_same_rows(tmp_path):
    subject = experiment("two_keys")
    settings = subject.settings({"d": CELLS, "samples": "1000"})
    kept = tmp_path / "two_keys.jsonl"
    forked.run(KILLED, [(CELLS, tmp_path)], tmp_path, expected=signal.SIGKILL)
    finished = kept.read_bytes().count(b"\n") - 1
    assert finished == 5  # each is written before the next is measured
    with open(kept, "ab") as file:  # what a kill in the middle of a write leaves
        file.write(b'{"cell": {"d": 16, "sam')
    notes = []
    again = sweep(subject, settings, results=tmp_path, note=notes.append)
    assert notes == [f"{finished} of 16 cells were already measured"]
    assert again.rows == sweep(subject, settings).rows
    assert len(kept.read_bytes().splitlines()) == 17


def test_finished_cells_are_not_measured_again(tmp_path):
    seen = []
    subject = toy(lambda cell: seen.append(cell["x"]) or [{"y": cell["x"] * 10}])
    sweep(subject, {"x": (1, 2)}, results=tmp_path)
    swept = sweep(subject, {"x": (1, 2, 3)}, results=tmp_path)
    assert seen == [1, 2, 3]
    assert swept.resumed == 2
    assert [row["y"] for row in swept.rows] == [10, 20, 30]


def test_results_of_another_version_are_said_and_not_mixed(tmp_path):
    subject = toy(lambda cell: [{"y": 1}])
    sweep(subject, {"x": (1,)}, results=tmp_path)
    path = tmp_path / "toy.jsonl"
    text = path.read_text(encoding="utf-8")
    other = json.loads(text.splitlines()[0])
    path.write_text(text.replace(other["torch"], "2.0.0"), encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(InputError) as error:
        sweep(subject, {"x": (1,)}, results=tmp_path)
    assert "were made by torch 2.0.0; this is torch " in str(error.value)
    assert "choose another --results" in str(error.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["not json\n", "[]\n[1]\n", '{"format": 1}\n{"rows": []}\n'])
def test_a_foreign_file_is_not_touched(tmp_path, content):
    path = tmp_path / "toy.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="is not a results file of attemper"):
        sweep(toy(lambda cell: [{}]), {"x": (1,)}, results=tmp_path)
    assert path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    "damage", [b"\x00\xff\n", b"not json\n", b"[]\n", b'{"cell": {"x": 1}}\n', b'{"cell": 1, "rows": []}\n']
)
def test_a_damaged_line_is_named_and_its_cell_measured_again(tmp_path, damage):
    seen, notes = [], []
    subject = toy(lambda cell: seen.append(cell["x"]) or [{"y": cell["x"]}])
    sweep(subject, {"x": (1, 2, 3)}, results=tmp_path)
    path = tmp_path / "toy.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, lines[3]]))
    swept = sweep(subject, {"x": (1, 2, 3)}, results=tmp_path, note=notes.append)
    assert [row["y"] for row in swept.rows] == [1, 2, 3]
    assert seen == [1, 2, 3, 2]
    assert notes[0] == f"{str(path)!r}: line 3 cannot be read and is left out: those cells are measured again"
    assert sweep(subject, {"x": (1, 2, 3)}, results=tmp_path).resumed == 3


def test_a_full_disk_does_not_end_a_sweep(tmp_path):
    """What was measured is given, what could be kept is whole, and the next run measures the rest."""
    resource = pytest.importorskip("resource")
    subject, notes = toy(lambda cell: [{"y": "long " * 2000 if cell["x"] == 2 else cell["x"]}]), []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        swept = sweep(subject, {"x": (1, 2, 3)}, results=tmp_path, note=notes.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(swept.rows) == 3
    assert swept.save_error.startswith(f"run: not every cell could be kept in {str(tmp_path)!r}: File too large.")
    assert len(notes) == 1
    assert sweep(subject, {"x": (1, 2, 3)}, results=tmp_path).resumed == 2
    assert len((tmp_path / "toy.jsonl").read_bytes().splitlines()) == 4


@pytest.mark.parametrize("kept", [True, False])
def test_a_sweep_that_is_stopped_says_what_is_kept(tmp_path, kept):
    def measure(cell):
        if cell["x"] == 3:
            raise KeyboardInterrupt
        return [{"y": cell["x"]}]

    with pytest.raises(KeyboardInterrupt) as stopped:
        sweep(toy(measure), {"x": (1, 2, 3, 4)}, results=tmp_path if kept else None)
    where = f"2 of 4 cells are kept in {str(tmp_path)!r}: type the same command to continue from them."
    lost = "2 of 4 cells were measured, and none is kept: --results FOLDER keeps them."
    assert stopped.value.__notes__ == [where if kept else lost]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs POSIX, and a user other than root")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot keep results in"):
        Store(tmp_path, "toy")


def test_a_results_path_that_is_a_file(tmp_path):
    target = tmp_path / "file"
    target.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"run: cannot keep results in .* Choose another --results"):
        Store(target, "toy")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
def test_two_runs_do_not_write_one_file(tmp_path):
    with Store(tmp_path, "toy"), pytest.raises(InputError, match=r"another run is writing .* Wait for it"):
        Store(tmp_path, "toy")
    Store(tmp_path, "toy").close()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
def test_a_file_that_another_run_is_writing_is_not_touched(tmp_path):
    """A line without an end may be a line that is being written: only who holds the lock may drop it."""
    with Store(tmp_path, "toy") as store:
        store.add({"x": 1}, [{"y": 1}])
        path = tmp_path / "toy.jsonl"
        with open(path, "ab") as file:
            file.write(b'{"cell": {"x": 2}, "ro')
        before = path.read_bytes()
        with pytest.raises(InputError, match="another run is writing"):
            Store(tmp_path, "toy")
        assert path.read_bytes() == before


def test_results_of_edited_code_are_not_mixed_in(tmp_path):
    sweep(toy(lambda cell: [{"y": cell["x"]}]), {"x": (1,)}, results=tmp_path)
    assert sweep(toy(lambda cell: [{"y": cell["x"]}]), {"x": (1,)}, results=tmp_path).resumed == 1
    with pytest.raises(InputError, match=r"were made by code [0-9a-f]+; this is code [0-9a-f]+\."):
        sweep(toy(lambda cell: [{"y": cell["x"] + 1}]), {"x": (1,)}, results=tmp_path)


def test_the_fingerprint_follows_what_measuring_uses_and_nothing_else(monkeypatch):
    from attemper_lab.exact import gradient, variance
    from attemper_lab.maths import stats

    before = {one: fingerprint(one.measure) for one in (variance, gradient)}
    monkeypatch.setattr(variance, "finding", lambda rows: "another title")
    assert fingerprint(variance.measure) == before[variance]
    monkeypatch.setattr(variance, "TOKENS", 32)
    assert fingerprint(variance.measure) != before[variance]
    assert fingerprint(gradient.measure) == before[gradient]
    monkeypatch.setattr(stats, "_inside", lambda t, freedom: 0.0)
    assert fingerprint(gradient.measure) != before[gradient]


def test_the_fingerprint_is_the_same_in_another_process(capsys, monkeypatch):
    """Whatever order sets of words have there (dataclasses of Python 3.12 hold such sets), and whatever the library has kept
    here meanwhile: a killed sweep must go on."""
    from attemper.watch.routes import replace
    from attemper_lab.training import recall

    monkeypatch.setitem(replace.ATTENDING, 0, [])
    code = (
        "from attemper_lab.engine.fingerprint import fingerprint; from attemper_lab.training.recall import measure; "
        "print(fingerprint(measure), fingerprint(lambda cell: cell in {'a', 'b', ('c', None)}))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another than here
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}
    )
    assert there.stdout, there.stderr
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == there.stdout
    assert there.stdout.split()[0] == fingerprint(recall.measure)


def test_bad_input_in_a_cell_fails_that_cell_alone():
    def measure(cell):
        if cell["x"] == 2:
            raise InputError("run toy: this x does not fit. Type --x 1.")
        return [{"y": cell["x"]}]

    swept = sweep(toy(measure), {"x": (1, 2, 3)})
    assert [row["y"] for row in swept.rows] == [1, 3]
    assert [str(failure) for failure in swept.failures] == ["x=2: run toy: this x does not fit. Type --x 1."]


def test_an_error_in_a_cell_is_reported_and_the_others_go_on():
    def measure(cell):
        if cell["x"] == 2:
            raise ZeroDivisionError("one over nothing")
        return [{"y": cell["x"]}]

    swept = sweep(toy(measure), {"x": (1, 2, 3)})
    assert [row["y"] for row in swept.rows] == [1, 3]
    assert [str(failure) for failure in swept.failures] == ["x=2: ZeroDivisionError: one over nothing"]


def test_two_processes_give_the_rows_of_one():
    subject = experiment("two_keys")
    settings = {**subject.settings(), "d": (2, 3, 4), "samples": (1000,)}
    assert sweep(subject, settings, jobs=2).rows == sweep(subject, settings).rows


@pytest.mark.filterwarnings("ignore:A worker stopped while some jobs were given")
def test_a_worker_that_dies_once_is_retried_and_one_that_always_dies_is_reported(tmp_path):
    folder = str(tmp_path)

    def measure(cell):
        import os
        import signal

        with open(Path(folder) / f"tries-{cell['x']}", "a", encoding="utf-8") as file:
            file.write("x")
        tries = len((Path(folder) / f"tries-{cell['x']}").read_text(encoding="utf-8"))
        if cell["x"] == 3 or (cell["x"] == 2 and tries == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"y": cell["x"]}]

    notes = []
    swept = sweep(toy(measure), {"x": (1, 2, 3, 4)}, jobs=2, results=tmp_path / "results", note=notes.append)
    assert [row["y"] for row in swept.rows] == [1, 2, 4]
    assert len(swept.failures) == 1
    assert str(swept.failures[0]).startswith("x=3: its worker died 2 times")
    assert any("a worker died" in note for note in notes)
    # alone it was tried once and retried once; before that the pool may have started it too
    assert len((tmp_path / "tries-3").read_text(encoding="utf-8")) in (2, 3)
    # the failed cell was not kept, so the next run tries it again
    assert len((tmp_path / "results" / "toy.jsonl").read_text(encoding="utf-8").splitlines()) == 4


IMPORTING = """
import os, sys
from attemper_lab.engine.experiment import Experiment, Parameter
from attemper_lab.engine.sweep import sweep

sys.path.insert(0, sys.argv[1])  # which workers take over
parts = (lambda cell: [__import__("torch")], lambda rows: [], lambda rows: "", "none")
toy = Experiment("toy", "?", (), (Parameter("x", (1, 2), "?"),), *parts)
sweep(toy, {"x": (1, 2)}, jobs=2)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
def test_workers_that_still_import_torch_end_with_a_caller_that_is_killed(tmp_path):
    """They hold its stdout, so a pipe behind it would wait for them: here the import takes ten minutes."""
    slow = f"import os, time; open({str(tmp_path)!r} + f'/{{os.getpid()}}.pid', 'x').close(); time.sleep(600)"
    (tmp_path / "torch.py").write_text(slow, encoding="utf-8")
    caller = subprocess.Popen([sys.executable, "-c", IMPORTING, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 300
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert caller.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        caller.kill()
        caller.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        for path in tmp_path.glob("*.pid"):
            os.kill(int(path.stem), signal.SIGKILL)
        pytest.fail("workers were left")
    finally:
        caller.kill()


def test_more_processes_need_joblib(monkeypatch):
    monkeypatch.setitem(sys.modules, "joblib", None)
    subject = toy(lambda cell: [{"y": cell["x"]}])
    assert [row["y"] for row in sweep(subject, {"x": (1, 2)}).rows] == [1, 2]
    from attemper.errors import MissingExtra

    with pytest.raises(MissingExtra, match=r"pip install 'attemper\[lab\]'"):
        sweep(subject, {"x": (1, 2)}, jobs=2)
