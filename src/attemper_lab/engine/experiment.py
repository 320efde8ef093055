"""The contract: an experiment is a question, a sweep, a measure that gives rows, expected numbers, a figure, a verdict.

Measuring needs torch alone, except for the experiments on the embedded model. Rows are plain dicts that JSON can hold; figures,
tables and verdicts are made from rows.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import platform
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from attemper import __version__
from attemper.errors import InputError
from attemper.extension.tools import nearest

if TYPE_CHECKING:
    import torch

Value = int | float | str
Cell = Mapping[str, Value]  # one point of the sweep: parameter → value
Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


LARGEST_INT, LARGEST = 10**6, 1e30
"""The largest values of a parameter that has no ``most`` of its own."""


@dataclass(frozen=True)
class Parameter:
    """An option of an experiment: its default values, and the values that are allowed.

    ``least`` and ``most`` are the smallest and largest values allowed, ``above`` a number it must exceed, ``choices`` the words
    allowed. ``hint`` says why. ``single``: one value per run, since summaries compare runs that have it in common. Without a
    ``most``, a whole number may be a million and any other number 1e30 (or as small as 1e-30), which float32 can hold.
    """

    name: str
    default: tuple[Value, ...]
    help: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    hint: str = ""
    single: bool = False

    @property
    def flag(self) -> str:
        """The option as it is typed: --d-model for d_model."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def value_type(self) -> type[Value]:
        return type(self.default[0])

    def read(self, where: str, text: str) -> tuple[Value, ...]:
        """``"16,64"`` → (16, 64), checked; a repeated value is measured once."""
        values = tuple(dict.fromkeys(self._parse(where, part.strip()) for part in text.split(",")))
        if self.single and len(values) > 1:
            raise InputError(
                f"{where}: {self.flag} takes one value in one run, since the results of a run are compared with one another; "
                f"got {text!r}. Type {self.flag} {values[0]}, then run again with {self.flag} {values[1]}."
            )
        return values

    def _parse(self, where: str, text: str) -> Value:
        if self.choices:
            if text not in self.choices:
                raise InputError(f"{where}: unknown {self.flag} {text!r}. {nearest(text, self.choices)}")
            return text
        if self.value_type is str:
            return text
        read: Callable[[str], float] = int if self.value_type is int else float
        try:
            value = read(text)
            math.isfinite(value)  # a whole number may be too long for any other
        except (ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value) or self._out_of_bounds(value):
            raise InputError(f"{where}: {self.flag} must be {self._bounds(value)}; got {text!r}. {self._example()}")
        return value

    def _out_of_bounds(self, value: float) -> bool:
        low = (self.least is not None and value < self.least) or (self.above is not None and value <= self.above)
        return low or value > self._upper_bound() or 0 < abs(value) < 1 / LARGEST

    def _upper_bound(self) -> float:
        return self.most if self.most is not None else LARGEST_INT if self.value_type is int else LARGEST

    def _bounds(self, value: float) -> str:
        noun = "a whole number" if self.value_type is int else "a number"
        bound = f" of at least {self.least:g}" if self.least is not None else ""
        bound = f" above {self.above:g}" if self.above is not None else bound
        if self.most is not None or self._upper_bound() < value < math.inf:
            bound += f"{' and' if bound else ' of'} at most {self._upper_bound():g}"
        if 0 < abs(value) < 1 / LARGEST:
            bound += f", {1 / LARGEST:g} or more"
        return noun + bound + (f" ({self.hint})" if self.hint else "")

    def _example(self) -> str:
        return f"Type {self.flag} {','.join(map(str, self.default[:3]))}."


@dataclass(frozen=True)
class Expectation:
    """A number from theory or a paper, and the one that was measured.

    ``within`` is the half-width of the interval in which they count as equal, ``because`` what sets it. ``above``: a test of the
    sign, without an interval: the measured number must be larger than the expected one.
    """

    quantity: str
    expected: float
    measured: float
    within: float
    source: str
    because: str
    above: bool = False

    @property
    def agrees(self) -> bool:
        if self.above:
            return self.measured > self.expected
        return abs(self.measured - self.expected) <= self.within  # False for NaN

    def written(self) -> tuple[str, str]:
        """The expected number and its interval as a table shows them."""
        if self.above:
            return f"> {self.expected:.4g}", "sign"
        return f"{self.expected:.4g}", f"±{self.within:.2g}"


@dataclass(frozen=True)
class Verdict:
    """What the rows say: whether every expectation is met, and the finding in a sentence."""

    agrees: bool
    sentence: str
    expectations: tuple[Expectation, ...]


@dataclass(frozen=True)
class Experiment:
    """One question, and everything needed to answer it.

    ``measure`` turns a cell into one row or several and is the only part that takes time; ``expect`` and ``finding`` are
    functions of rows, so a verdict cannot be anything but what the rows say. ``draw`` makes the figure from rows and a title, and
    imports what it needs when it is called. ``presets`` are other settings by name; ``trains`` marks those that take minutes.
    ``check`` returns the rule that a cell breaks and the next step, where parameters depend on one another.
    """

    name: str
    question: str
    claims: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    measure: Callable[[Cell], Row | list[Row]] = field(repr=False)
    expect: Callable[[Rows], list[Expectation]] = field(repr=False)
    finding: Callable[[Rows], str] = field(repr=False)
    draw: Callable[[Rows, str], Any] = field(repr=False)
    presets: Mapping[str, Mapping[str, tuple[Value, ...]]] = field(default_factory=dict)
    trains: bool = False
    check: Callable[[Cell], str | None] = field(default=lambda cell: None, repr=False)

    def settings(
        self, options: Mapping[str, str] | None = None, preset: str | None = None
    ) -> dict[str, tuple[Value, ...]]:
        """The values of every parameter: the defaults, replaced by a preset, replaced by options."""
        from attemper.extension.machine import check_device  # which imports torch

        where = f"run {self.name}"
        chosen = {parameter.name: parameter.default for parameter in self.parameters}
        if preset is not None:
            if preset not in self.presets:
                known = nearest(preset, self.presets) if self.presets else "It has none: leave --preset out."
                raise InputError(f"{where}: unknown --preset {preset!r}. {known}")
            chosen |= self.presets[preset]
        known_names = {parameter.name: parameter for parameter in self.parameters}
        for name, text in (options or {}).items():
            if name not in known_names:
                known = nearest(f"--{name}", [parameter.flag for parameter in self.parameters])
                raise InputError(f"{where}: unknown option '--{name}'. {known}")
            chosen[name] = known_names[name].read(where, text)
        for device in chosen.get("device", ()):
            check_device(where, str(device))
        for cell in self.cells(chosen):
            broken = self.check(cell)
            if broken:
                raise InputError(f"{where}: {broken}")
        return chosen

    def cells(self, settings: Mapping[str, tuple[Value, ...]]) -> list[dict[str, Value]]:
        """Every combination of the values, in order."""
        return [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]

    def rows(self, cell: Cell) -> list[Row]:
        """Measure one cell; every row carries what made it."""
        measured = self.measure(cell)
        rows = [measured] if isinstance(measured, dict) else measured
        return [{**origin(self.name), **cell, **row} for row in rows]

    def run(self, **settings: tuple[Value, ...]) -> list[Row]:
        """Measure in this process, without a results folder; parameters that are left out take their defaults."""
        chosen = {**self.settings(), **settings}
        return [row for cell in self.cells(chosen) for row in self.rows(cell)]

    def chart(self, rows: Rows) -> Any:
        """The figure of rows, an Altair chart whose title is the finding."""
        return self.draw(rows, self.finding(rows))

    def verdict(self, rows: Rows) -> Verdict:
        expectations = tuple(self.expect(rows))
        return Verdict(all(part.agrees for part in expectations), self.finding(rows), expectations)


def heads_divide(cell: Cell) -> str | None:
    """The check of experiments that split a width into heads."""
    width, heads = int(cell["d_model"]), int(cell["heads"])
    if width % heads == 0:
        return None
    fits = next(count for count in range(heads, 0, -1) if width % count == 0)
    return f"--d-model must be a multiple of --heads; got {width} and {heads}. Type --heads {fits}."


def origin(experiment: str) -> Row:
    """The versions that made a row: every row carries them, so that rows can be compared."""
    return {
        "experiment": experiment,
        "attemper": __version__,
        "torch": _torch_version(),
        "python": platform.python_version(),
    }


@functools.cache
def _torch_version() -> str:
    return importlib.metadata.version("torch")  # without importing it: a worker starts in a tenth of the time


def key(cell: Cell) -> str:
    """A cell as text: the same in every process, whatever the order of its parameters."""
    return json.dumps(dict(sorted(cell.items())))


def generator(device: Value, *names: object) -> torch.Generator:
    """A random stream that depends on these names alone: not on other cells, their order, or the process."""
    import torch

    digest = hashlib.sha256(json.dumps(names).encode()).digest()
    return torch.Generator(device=str(device)).manual_seed(int.from_bytes(digest[:7], "big"))


def pick(rows: Rows, **wanted: object) -> list[Mapping[str, Any]]:
    """The rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


SEED = Parameter("seed", (0,), "the seed of the random numbers", least=0, most=2**63 - 1)
DEVICE = Parameter("device", ("cpu",), "cpu, cuda, cuda:1, …")
TRAINED = (replace(SEED, default=(0, 1, 2)), replace(DEVICE, single=True))
"""Seed and device, which every experiment has, where training runs are compared with one another."""


@functools.cache
def tables() -> dict[str, Any]:
    """The content of experiments.toml."""
    return tomllib.loads((files(__package__.rpartition(".")[0]) / "experiments.toml").read_text(encoding="utf-8"))


def define(module: Mapping[str, Any], check: Callable[[Cell], str | None] = lambda cell: None) -> Experiment:
    """The experiment of a module, from its table in experiments.toml and its functions.

    These are `measure`, `finding`, `draw` and, if numbers are known, `expect`.
    """
    name = module["__spec__"].name.rpartition(".")[2]  # also where it runs as a program
    table = tables()["experiments"][name]
    defaults, trains = table.get("defaults", {}), table.get("trains", False)
    parameters = [_parameter(part) for part in table.get("parameters", ())]
    for part in tables()["tasks"].get(table.get("task"), ()):
        parameters.append(_parameter({**part, "default": defaults.get(part["name"], part["default"])}))
    functions = {function: module[function] for function in ("measure", "finding", "draw")}
    return Experiment(
        name,
        table["question"],
        tuple(table.get("claims", ())),
        (*parameters, *(TRAINED if trains else (SEED, DEVICE))),
        **functions,
        expect=module.get("expect", lambda rows: []),
        presets={preset: _tuples(settings) for preset, settings in table.get("presets", {}).items()},
        trains=trains,
        check=check,
    )


def _parameter(table: Mapping[str, Any]) -> Parameter:
    return Parameter(**_tuples(table))


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
