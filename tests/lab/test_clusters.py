"""`attemper run --backend`: on Dask and Ray, with workers that are killed, a Ctrl-C, and addresses where no cluster is."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

import forked
from attemper.errors import InputError
from attemper_lab.engine import clusters
from attemper_lab.engine.experiment import Experiment, Parameter
from attemper_lab.engine.sweep import sweep

SMALL = ["run", "two_keys", "--d", "16", "--samples", "1000"]


def toy(measure) -> Experiment:
    """An experiment of one parameter; what it is made of travels to workers by value."""
    parts = (lambda rows: [], lambda rows: "", lambda rows, finding: None)
    return Experiment("toy", "?", (), (Parameter("x", (1, 2, 3, 4), "a number"),), measure, *parts)


def dies(folder, dying, once):
    """A cell's measurement: when all others are kept, the worker of this one is killed, the first time or every time."""
    folder, kept = str(folder), str(folder / "results" / "toy.jsonl")

    def measure(cell):
        import os
        import signal
        import time
        from pathlib import Path

        tries = Path(folder) / f"tries-{cell['x']}"
        with open(tries, "a", encoding="utf-8") as file:
            file.write("x")
        if cell["x"] == dying and not (once and len(tries.read_text(encoding="utf-8")) > 1):
            # a worker takes with it what nobody has fetched yet: the other cells are fetched, and so kept, first
            while not Path(kept).exists() or Path(kept).read_bytes().count(b"\n") < 4:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"y": cell["x"]}]

    return toy(measure)


@contextlib.contextmanager
def one_worker(backend, folder, **settings):
    pytest.importorskip(clusters.PACKAGES[backend], reason=f"needs the package {clusters.PACKAGES[backend]}")
    with contextlib.ExitStack() as stack:
        if backend == "dask":
            import dask

            stack.enter_context(dask.config.set({"temporary-directory": str(folder), **settings}))
        stack.enter_context(clusters.opened(backend, None, 1, lambda line: None))
        if backend == "dask":
            import distributed

            ends = threading.Timer(300, distributed.default_client().close)  # an error, in place of waiting for ever
            ends.start()
            stack.callback(ends.cancel)
        yield


@pytest.mark.filterwarnings("ignore")  # of distributed, about a worker that did not end as it should
@pytest.mark.parametrize("backend", clusters.PACKAGES)
def test_a_killed_worker_loses_nothing(backend, tmp_path, monkeypatch):
    """The cells that were finished are measured once and kept; the lost one is measured again; the run ends right."""
    # no worker is back in a millisecond: attemper must not let Dask give up on it
    with one_worker(backend, tmp_path, **{"distributed.deploy.lost-worker-timeout": "1ms"}):
        notes = []
        swept = sweep(
            dies(tmp_path, 4, once=True), {"x": (1, 2, 3, 4)}, results=tmp_path / "results", note=notes.append
        )
        assert [row["y"] for row in swept.rows] == [1, 2, 3, 4]
        assert (swept.failures, notes) == ([], [])
        tries = [len((tmp_path / f"tries-{x}").read_text(encoding="utf-8")) for x in (1, 2, 3, 4)]
        assert tries == [1, 1, 1, 2]

        # in the same cluster, a caller with another torch than its worker
        real = clusters.origin
        monkeypatch.setattr(clusters, "origin", lambda name: {**real(name), "torch": "2.0.0"})
        with pytest.raises(InputError, match=r"a worker has torch .*, not 2\.0\.0; rows of both must not be mixed"):
            sweep(toy(lambda cell: [{"y": 1}]), {"x": (1,)})


@pytest.mark.filterwarnings("ignore")
def test_a_cell_that_kills_every_worker_is_reported_and_the_others_go_on(tmp_path):
    with one_worker("dask", tmp_path, **{"distributed.scheduler.allowed-failures": 0}):
        swept = sweep(dies(tmp_path, 4, once=False), {"x": (1, 2, 3, 4)}, results=tmp_path / "results")
    assert [row["y"] for row in swept.rows] == [1, 2, 3]
    assert [str(failure) for failure in swept.failures] == ["x=4: its worker died 2 times (KilledWorker)"]


STOPPED = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
import attemper_lab
from attemper import cli
from attemper_lab.engine.experiment import Experiment, Parameter

backend, folder = argv

def measure(cell):
    import os, time
    with open(f"{folder}/{os.getpid()}.pid", "x"):
        time.sleep(600)

def interrupt():
    while not [name for name in os.listdir(folder) if name.endswith(".pid")]:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

parts = (lambda rows: [], lambda rows: "", lambda rows, finding: None)
toy = Experiment("toy", "?", (), (Parameter("x", (1, 2), "a number"),), measure, *parts)
attemper_lab.experiment = lambda name: toy
threading.Thread(target=interrupt, daemon=True).start()
cli.main(["run", "toy", "--backend", backend, "--jobs", "1", "--results", folder + "/results"])
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc, to look at processes")
@pytest.mark.parametrize("backend", clusters.PACKAGES)
def test_ctrl_c_leaves_no_worker(backend, tmp_path):
    pytest.importorskip(clusters.PACKAGES[backend], reason=f"needs the package {clusters.PACKAGES[backend]}")
    forked.run(STOPPED, [(backend, tmp_path)], tmp_path, expected=130 * 256, timeout=120)
    assert "Stopped by Ctrl-C. 0 of 2 cells are kept" in (tmp_path / "0.out").read_text(encoding="utf-8")
    (worker,) = (int(path.stem) for path in tmp_path.glob("*.pid"))
    deadline = time.monotonic() + 60
    while is_there(worker):
        assert time.monotonic() < deadline, os.kill(worker, signal.SIGKILL)
        time.sleep(0.05)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def silent_port():
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--backend", "dusk"], "run: unknown --backend 'dusk'. Did you mean 'dask'?"),
        (["--address", "tcp://a:1"], "run: --address 'tcp://a:1' belongs to a cluster. Add --backend dask"),
        (
            ["--backend", "dask", "--address", "tcp://a:1", "--jobs", "2"],
            "run: --jobs starts workers here; a cluster at",
        ),
        (["--backend", "dask", "--address", "here"], "run: --address must be a host and a port; got 'here'."),
        (
            ["--backend", "dask", "--address", "tcp://127.0.0.1:1"],
            "run: no dask cluster answers at tcp://127.0.0.1:1: Conn",
        ),
        (["--backend", "dask", "--address", "127.0.0.1:PORT"], "run: no dask cluster answers at 127.0.0.1:"),
    ],
)
def test_what_is_wrong_is_said_within_seconds(attemper_command, monkeypatch, silent_port, words, sentence):
    pytest.importorskip("distributed", reason="needs the package distributed")
    monkeypatch.setattr(clusters, "PATIENCE", 0.2)
    code, out, err = attemper_command(*SMALL, *(word.replace("PORT", str(silent_port)) for word in words))
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: {sentence}")
    assert not Path("attemper-results").exists()


@pytest.mark.parametrize(("backend", "package"), clusters.PACKAGES.items())
def test_a_missing_package_is_named_with_its_pip_line(attemper_command, monkeypatch, backend, package):
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = attemper_command(*SMALL, "--backend", backend)
    assert (code, out, err) == (
        2,
        "",
        f"Error: run: --backend {backend} needs {package}. Type pip install {package}.\n",
    )


@pytest.mark.parametrize("backend", clusters.PACKAGES)
def test_another_service_at_the_address_is_told_apart(backend):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            there, _ = server.accept()
            with there:
                there.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(InputError, match="something else listens there"):
            clusters._check_address(backend, f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
