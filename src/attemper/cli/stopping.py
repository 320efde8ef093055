"""Ctrl-C and SIGTERM. The first stops the work and prints what was kept; a second one, or ten seconds in C code, exits at once.

Python runs a signal handler between two bytecode instructions, so a long call into C delays it. A thread reads every signal from
a pipe, waits for the handler, and exits the process if the handler does not run in time. Inside an import no exception is raised,
because C code that imports (torch's does) may swallow it; the signal is sent again until the import ends or a second has passed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

NAMES = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP: its terminal is gone"}
PATIENCE = 10.0  # seconds for a call into C to come back
SECOND_AFTER = 1.0  # seconds; earlier, a signal may be the same key press, passed on by a parent
RESEND_AFTER = 0.02  # seconds until a lost signal is sent again
IMPORTING = 1.0  # seconds for an import to end
REPEAT, END = 255, 0  # in the pipe, in addition to the signals' numbers


class Stopped(KeyboardInterrupt):
    """A signal ended the command. Code that keeps results adds a note (``add_note``): what it kept, where, and how to resume."""


class Stopping:
    """Inside this context, signals raise :class:`Stopped`; ``number`` is the first signal that arrived, or None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._raised = threading.Event()
        self.reported = False  # whether a sentence for the user was printed

    def __enter__(self) -> Stopping:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the main thread's
        for name in NAMES:
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            # an ignored signal stays ignored: under nohup, and in a background job of a shell
            if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, self._handle)
        if os.name == "posix":
            self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before and os.name == "posix":
            signal.set_wakeup_fd(self._wakeup)
            sys.unraisablehook = self._hook
            os.write(self._writing, bytes([END]))  # closing the pipe is no message: a fork may hold it open
            self._thread.join()
            os.close(self._writing)
            os.close(self._reading)
        self._before = {}

    @property
    def name(self) -> str:
        """The signal in words."""
        return NAMES.get(signal.Signals(self.number).name, "") if self.number is not None else NAMES["SIGINT"]

    @property
    def code(self) -> int:
        """The exit code that shells use for this signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.number or signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raised.is_set():
            return  # the thread handles a second one
        self.number = self.number or number
        if os.name == "posix" and _is_importing(frame):
            os.write(self._writing, bytes([REPEAT]))
            return
        self._raised.set()
        raise Stopped(self.name)

    def _listen(self) -> None:
        if not self._before:
            return
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._hook: Callable[[Any], Any] = sys.unraisablehook
        sys.unraisablehook = self._lost
        self._thread = threading.Thread(target=self._read_signals, name="attemper-signals", daemon=True)
        self._thread.start()

    def _lost(self, unraisable: Any) -> None:
        """An exception raised in a __del__, or in a callback of an import, is swallowed there: send the signal again."""
        if isinstance(unraisable.exc_value, Stopped):
            os.write(self._writing, bytes([REPEAT]))
        else:
            self._hook(unraisable)

    def _read_signals(self) -> None:
        first, repeats = None, 0  # repeats: signals that were sent again and not yet received
        while True:
            wait = None if first is None or self._raised.is_set() else max(0.0, first + PATIENCE - time.monotonic())
            if not select.select([self._reading], [], [], wait)[0]:
                if not self._raised.is_set():
                    self._exit("the step under way cannot be interrupted, so the process was ended at once")
                continue
            received = os.read(self._reading, 1)
            if received[0] == END:
                return
            if received[0] == REPEAT:
                if not self._raised.is_set() and first is not None and time.monotonic() - first > IMPORTING:
                    self._exit("modules were being loaded, so the process was ended at once")
                time.sleep(RESEND_AFTER)
                self._raised.clear()
                repeats += 1
                signal.pthread_kill(threading.main_thread().ident or 0, self.number or signal.SIGINT)
            elif received[0] == self.number and repeats:
                repeats -= 1
            elif received[0] in self._before and first is None:
                first, self.number = time.monotonic(), received[0]
            elif received[0] in self._before and first is not None and time.monotonic() - first > SECOND_AFTER:
                self._exit("a second time, so the process was ended at once")

    def _exit(self, why: str) -> None:
        """End this process now; its workers then end too."""
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        with contextlib.suppress(OSError):
            os.write(2, f"{cursor}Stopped by {self.name}: {why}.\n".encode())
        os._exit(self.code)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
