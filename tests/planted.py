"""An exception planted at the k-th call from one function of attemper to another, as an error of its own would be raised."""

import inspect
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

import attemper
from attemper.watch.routes import registered

PACKAGE = str(Path(attemper.__file__).parent)
FOLLOWED = tuple(f"{PACKAGE}/{name}" for name in ("watch/", "operation/tally.py", "treat/"))

TORCH = str(Path(torch.__file__).parent)
WRAPPERS = ("__torch_dispatch__", "_call_impl", "function", "measuring", "__call__", "__new__")
"""Functions of attemper that run the model's own between what they do."""


class Planted(Exception):
    """What no code of attemper raises or expects."""


def _is_ours(frame):
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def _follows(frame):
    """Whether attemper follows a model here. What runs inside a model's own call is the model's, also if attemper computes it."""
    inner = None
    while frame is not None and frame.f_code.co_filename.startswith((PACKAGE, TORCH)):
        if frame.f_code.co_filename.startswith(FOLLOWED):
            return frame.f_code.co_name not in WRAPPERS or inner is None or _is_ours(inner)
        inner, frame = frame, frame.f_back
    return False


class Plant:
    """Raises at the call of this number, counted from 1; `place` is where, None if there were fewer calls."""

    def __init__(self, number):
        self.left, self.place = number, None

    def __call__(self, frame, event, argument):
        if frame.f_code.co_name == "__del__" or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # Python raises nothing from there, nor from a generator that is closed
        if frame.f_code.co_name in ("__torch_dispatch__", "__call__", "__new__"):
            return  # they stand for a function of torch: there is nothing of attemper's around them
        if frame.f_code is registered.attend.__code__:
            return  # what transformers calls is outermost, also where a watch has wrapped it
        # the outermost function has no caller that could catch what is raised in its first line
        if event == "call" and _is_ours(frame) and _is_ours(frame.f_back) and _follows(frame):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                code = frame.f_code
                self.place = f"{code.co_qualname} ({code.co_filename.removeprefix(PACKAGE)})"
                raise Planted("planted")


@contextmanager
def planted(plant):
    """Inside, the plant raises."""
    before = sys.getprofile()
    sys.setprofile(plant)
    try:
        yield
    finally:
        sys.setprofile(before)
