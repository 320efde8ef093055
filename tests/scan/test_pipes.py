"""Pipes as files: what a slow command writes arrives whole, and a FIFO that nobody opens is refused with a sentence."""

import os
import sys
import threading
import time

import pytest

from attemper.errors import InputError
from attemper.scan.input import pipes

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")


@pytest.fixture
def fifo(tmp_path, monkeypatch):
    monkeypatch.setattr(pipes, "STEP", 0.01)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_fifo_that_nobody_opens_is_refused(fifo, monkeypatch):
    monkeypatch.setattr(pipes, "PATIENCE", 0.05)
    told = []
    with pytest.raises(InputError, match=r"--file '.*pipe' is a pipe, and nothing opened it .* within 0\.05 seconds\."):
        pipes.read(fifo, 100, "scan: --file", told.append)
    assert told[0] == f"waiting for {str(fifo)!r}: a pipe that nothing has opened for writing"


@pytest.mark.parametrize("content", [b"", b"the dog", b"0123456789" * 50_000])
def test_a_writer_that_takes_longer_than_the_patience_is_waited_for(fifo, monkeypatch, content):
    """Once it is open somebody means it; a pipe holds 64 KiB, so the last content comes in parts."""
    monkeypatch.setattr(pipes, "PATIENCE", 0.3)
    told, waited = [], threading.Event()
    opened = os.open(fifo, os.O_RDWR)  # here, so that it is there in time; with O_WRONLY it would wait for the reader

    def write():
        with os.fdopen(opened, "wb") as file:
            waited.wait(60)
            time.sleep(0.4)
            file.write(content)

    def hear(words):
        told.append(words)
        if words.endswith("open and silent"):
            waited.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert pipes.read(fifo, 10**6, "--file", hear) == content
    finally:
        writer.join(60)
    assert f"waiting for {str(fifo)!r}: a pipe that is open and silent" in told


def test_no_more_is_read_than_was_asked_for(fifo):
    writer = os.open(fifo, os.O_RDWR)
    try:
        os.write(writer, b"0123456789")
        assert pipes.read(fifo, 4, "--file", print) == b"0123"
    finally:
        os.close(writer)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_what_a_shell_substitutes_is_read(monkeypatch):
    """`<(command)` is /dev/fd/63."""
    reading, writing = os.pipe()
    os.write(writing, b"the dog")
    os.close(writing)
    try:
        assert pipes.read(pipes.Path(f"/dev/fd/{reading}"), 100, "--file", print) == b"the dog"
    finally:
        os.close(reading)
