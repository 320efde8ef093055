"""Bad days: full and read-only disks, streams that nobody reads, signals, absurd numbers. `make hostile` runs all of it."""

import csv
import errno
import io
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import forked
from attemper import _files, cli
from attemper.cli import stopping
from attemper.cli.stopping import Stopped, Stopping
from attemper.errors import InputError

SCRIPT = Path(__file__).parents[2] / "scripts" / "hostile.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def test_no_command_ends_in_a_traceback_or_a_hang(tmp_path):
    code = (
        f"import runpy, sys; sys.argv = ['hostile.py', '--quick']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    forked.run(code, [()], tmp_path, timeout=3600)
    assert (tmp_path / "0.out").read_text().splitlines()[-1].endswith("cases, 0 wrong")


def test_a_read_only_disk_is_said(tmp_path, monkeypatch):
    """There even taking away what is not there is an error."""

    def refuse(*words, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(_files, "open", refuse, raising=False)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(InputError, match=r"-o: cannot write '.*': Read-only file system. Choose another file."):
        _files.check(tmp_path / "a.json", (".json", ".csv"), force=False)


def test_a_file_is_replaced_as_it_was(tmp_path):
    """Through a link, with the rights of the old one, and the old one stays where the new one does not fit."""
    target, link = tmp_path / "a.json", tmp_path / "b.json"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    _files.save(link, b"new")
    assert (target.read_bytes(), target.stat().st_mode & 0o777, link.is_symlink()) == (b"new", 0o600, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    _files.save(tmp_path / f"{'x' * 250}.json", b"whole")  # a name beside it must not be longer


@pytest.mark.parametrize("force", [False, True])
def test_of_two_runs_that_write_one_new_file_the_second_says_so(force, tmp_path):
    path = tmp_path / "a.json"
    _files.check(path, (".json",), force)
    path.write_text("of another run")
    if force:
        with pytest.raises(InputError, match="already exists"):
            _files.check(path, (".json",), False)
        _files.check(path, (".json",), True)
        _files.save(path, b"whole")
        assert path.read_bytes() == b"whole"
        return
    with pytest.raises(InputError, match=r"another program wrote .* while this one worked.*with --force"):
        _files.save(path, b"whole")
    assert path.read_text() == "of another run"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
    _files.save(path, b"whole")  # a later one is a choice
    assert path.read_bytes() == b"whole"


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_text_that_a_spreadsheet_would_run_is_made_a_text(start):
    rows = [{"layer": f"{start}cmd|' /C calc'!A0", "peak": -1.5}, {"layer": "layers.0-attn", "peak": 2.0}]
    read = list(csv.DictReader(io.StringIO(_files.csv_bytes(rows).decode(), newline="")))
    assert [row["layer"] for row in read] == [f"'{start}cmd|' /C calc'!A0".replace("\r", "\n"), "layers.0-attn"]
    assert [row["peak"] for row in read] == ["-1.5", "2.0"]


def test_signals_have_their_handlers_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    hook = sys.unraisablehook
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert sys.unraisablehook is hook


def test_a_signal_that_a_destructor_swallows_comes_again():
    """An exception raised in a __del__, or in a callback such as those of imports, goes no further."""

    class Deaf:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    with Stopping() as stop, pytest.raises(Stopped):  # noqa: PT012
        Deaf()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.01)
    assert (stop.number, stop.code, stop.name) == (signal.SIGTERM, 143, "SIGTERM")


def test_what_is_ignored_stays_ignored(monkeypatch):
    """nohup, and jobs that a shell has put into the background."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_leaves_at_once(monkeypatch):
    """One key press may arrive twice; another after a second is meant."""
    left, now = [], [0.0]
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    monkeypatch.setattr(Stopping, "_exit", lambda self, why: left.append(why))
    with Stopping():
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert left == []
        now[0], deadline = 1.1 * stopping.SECOND_AFTER, time.monotonic() + 60
        while not left and time.monotonic() < deadline:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.05)
    assert left[0].startswith("a second time")


def test_an_import_that_a_signal_broke_is_told_as_stopped(monkeypatch, capsys):
    """An extension module may turn the exception of a signal into one of its own."""
    from attemper import env

    def describe():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Stopped:
            raise ImportError("initialization failed") from None

    monkeypatch.setattr(env, "describe", describe)
    with pytest.raises(SystemExit) as ended:
        cli.main(["env"])
    assert ended.value.code == 143
    assert capsys.readouterr().err == "Stopped by SIGTERM. Nothing was kept.\n"
