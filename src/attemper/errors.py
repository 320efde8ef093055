"""The exceptions attemper raises.

AttemperError
├── InputError (ValueError)              an argument breaks a rule; the message names it
│   └── UnknownOption (TypeError)        an argument has a name that the function does not take
├── KernelUnavailable (RuntimeError)     a named kernel cannot serve the call, or a derivative it was asked for
├── SignNotMeasured (AttributeError)     a vital sign was read that `signs=` did not ask for
└── MissingExtra (ImportError)           an optional dependency is absent; the message holds the pip line
"""

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

PACKAGE = Path(__file__).parent

P = ParamSpec("P")
R = TypeVar("R")


class AttemperError(Exception):
    """Base of every error that attemper raises on purpose."""


class InputError(AttemperError, ValueError):
    """An argument breaks a rule."""


class UnknownOption(InputError, TypeError):
    """An argument has a name that the function does not take."""


class KernelUnavailable(AttemperError, RuntimeError):
    """A kernel that was asked for by name cannot do what was asked."""


class SignNotMeasured(AttemperError, AttributeError):
    """A vital sign was read that this call did not measure."""


class MissingExtra(AttemperError, ImportError):
    """An optional dependency is not installed."""


_MEMORY_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "calculation overflowed",
    "multiplication overflow",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or torch means that there is not enough memory."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _MEMORY_MESSAGES)


restoring: list[Callable[[], None]] = []
"""Functions that undo what attemper changed in torch, after an exception in attemper's own code."""


def internal_error(error: Exception) -> str:
    """Restore torch, and describe an exception in attemper's own code, which must not end a training.

    ATTEMPER_STRICT=1 raises it instead.
    """
    for restore in restoring:
        restore()
    if out_of_memory(error):
        return "there was not enough memory"
    if os.environ.get("ATTEMPER_STRICT") == "1":
        raise error
    if isinstance(error, AttemperError):
        return str(error).removesuffix(".")
    place, trace = "", error.__traceback__
    while trace is not None:  # the innermost line of attemper's
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            place = f" at {file.relative_to(PACKAGE).as_posix()}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"an error inside attemper, {type(error).__name__}: {error}{place}; please report it"


@contextmanager
def guarded(
    failed: Callable[[Exception], object], passing: tuple[type[Exception], ...] = (AttemperError,)
) -> Iterator[None]:
    """Run attemper's own code: its errors go to `failed` and do not end the user's program. Those in `passing` propagate."""
    try:
        yield
    except passing:
        raise
    except Exception as error:
        failed(error)


def guarded_call(
    function: Callable[..., Any], failed: Callable[..., object], otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function whose errors do not end the user's program, also in a compiled graph. After an error `otherwise` runs, if given.

    `failed` gets the error and the function's first argument.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AttemperError:
            raise  # it says what to do
        except Exception as error:
            failed(error, *args[:1])
        return None if otherwise is None else otherwise(*args, **kwargs)

    return call


def nearest(word: object, known: Iterable[str]) -> str:
    """The hint after a misspelt name: the known name that it ends in (softmax_scale) or the closest, then all of them."""
    known = list(known)
    ends = [name for name in known if str(word).endswith(f"_{name}")]
    close = ends or difflib.get_close_matches(str(word), known, n=1)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}Known: {', '.join(map(repr, known))}."


def checked_options(function: Callable[P, R]) -> Callable[P, R]:
    """A function that answers a misspelt keyword with the closest valid one, which Python does not do."""
    is_init = function.__name__ == "__init__"
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    names = frozenset(known)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                where = type(args[0]).__name__ if is_init else function.__qualname__
                raise UnknownOption(f"{where}(): unknown option {name!r}. {nearest(name, known)}")
        return function(*args, **kwargs)

    return checked


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of a number just below and just above `wanted`, which does not divide it: suggestions for an error."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)}
    below = max((n for n in divisors if n <= wanted), default=number)
    above = min((n for n in divisors if n >= wanted), default=number)
    return sorted({below, above})
