"""clusters: Dask and Ray. `attemper run --backend` starts one here or connects to an address, and configures joblib for it.

Cells are submitted to the cluster itself: through joblib Dask does not report that a worker died, and the caller would wait for
ever; Ray ends the whole sweep. Both run a cell again whose worker died, and report it when its workers keep dying.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from attemper import __version__
from attemper.errors import AttemperError, InputError, MissingExtra
from attemper.extension.files import installed, load
from attemper.extension.tools import nearest

from .experiment import Cell, Experiment, Row, origin
from .fingerprint import fingerprint

Outcome = tuple[Cell, list[Row] | str]
Measure = Callable[[Experiment, Cell], Outcome]

PACKAGES = {"dask": "distributed", "ray": "ray"}  # what pip calls them
EXAMPLES = {"dask": "tcp://10.0.0.1:8786", "ray": "ray://10.0.0.1:10001"}
PATIENCE = 5  # seconds in which an address must answer
RETRIES = 3  # of a cell whose worker died, by the cluster itself: Dask's default
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # how a gRPC client begins
INSTALL_SAME = "Install the same attemper and torch on every machine."
EVER = 10**9  # seconds; Dask gives up on a worker that is not back in 15, and a busy machine needs longer to start one
STORE = 100 << 20  # bytes of shared memory for a Ray of our own: rows are small


class ClusterLost(AttemperError):
    """The cluster ended, or its workers cannot measure what this process asks for."""


class WorkerDied(Exception):
    """Every worker that measured a cell died."""


def check(backend: str | None, address: str | None, jobs: int | None) -> None:
    """Refuse options that contradict each other, and a backend that is unknown or not installed."""
    if backend is None:
        if address is not None:
            raise InputError(f"run: --address {address!r} belongs to a cluster. Add --backend dask or --backend ray.")
        return
    if backend not in PACKAGES:
        raise InputError(f"run: unknown --backend {backend!r}. {nearest(backend, PACKAGES)}")
    if address is not None and jobs is not None:
        raise InputError("run: --jobs starts workers here; a cluster at --address has its own. Leave one of them out.")
    if installed(f"run: --backend {backend}", package := PACKAGES[backend]) is None:
        raise MissingExtra(f"run: --backend {backend} needs {package}. Type pip install {package}.")


@contextlib.contextmanager
def opened(backend: str, address: str | None, workers: int, note: Callable[[str], None]) -> Iterator[None]:
    """Configure joblib for the cluster at an address, or for one of our own that ends with this context.

    Args:
        backend: "dask" or "ray".
        address: where the cluster is; None starts one on this machine.
        workers: how many processes it then has.
        note: called with sentences for the user.
    """
    joblib = load(f"run: --backend {backend}", "joblib", "lab")
    if address is not None:
        _check_address(backend, address)
    with (_dask if backend == "dask" else _ray)(address, workers, note), joblib.parallel_config(backend=backend):
        yield


def _check_address(backend: str, address: str) -> None:
    """Connect once: with an address where nothing or something else listens, either package takes minutes, or for ever."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if not parts.hostname or not parts.port:
            raise ValueError
    except ValueError:
        raise InputError(
            f"run: --address must be a host and a port; got {address!r}. For example: {EXAMPLES[backend]}."
        ) from None
    try:
        with socket.create_connection((parts.hostname, parts.port), PATIENCE) as there:
            if parts.scheme not in ("", "tcp", "ray"):  # TLS waits for the client's hello
                return
            if backend == "ray":
                there.sendall(HELLO)
            first = there.recv(8)
    except OSError as error:
        raise _unreachable(backend, address, error.strerror or str(error)) from None
    # Dask begins with the length of a short message, gRPC with its settings, which are frames of type 4
    if len(first) < 8 or (first[3] != 4 if backend == "ray" else int.from_bytes(first, "little") > 1 << 20):
        raise _unreachable(backend, address, "something else listens there")


def _unreachable(backend: str, address: str, reason: str) -> InputError:
    start = "dask scheduler" if backend == "dask" else "ray start --head (if it asks for a token: RAY_AUTH_MODE=token)"
    return InputError(
        f"run: no {backend} cluster answers at {address}: {reason}. Check the address, or start one there: {start}."
    )


@contextlib.contextmanager
def _dask(address: str | None, workers: int, note: Callable[[str], None]) -> Iterator[None]:
    distributed: Any = importlib.import_module("distributed")
    for name in ("distributed", "distributed.client", "asyncio"):  # a worker or a scheduler that died is our sentence
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        there: Any = address
        if there is None:
            config = importlib.import_module("dask.config")
            stack.enter_context(config.set({"distributed.deploy.lost-worker-timeout": EVER}))
            own = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": 0, "dashboard_address": None}
            there = distributed.LocalCluster(**own, silence_logs=logging.CRITICAL)
            stack.callback(_close, there)
        try:
            client = stack.enter_context(distributed.Client(there, timeout=PATIENCE))
        except Exception as error:  # something else than a scheduler listens there
            raise _unreachable("dask", str(address), _first_line(error)) from None
        if address is not None:
            # a worker without attemper would end when it is sent a cell, and all of them one after the other
            there = client.run(importlib.metadata.version, "attemper", on_error="return")
            for worker, version in there.items():
                if version != __version__:
                    has = f"attemper {version}" if isinstance(version, str) else "no attemper"
                    raise InputError(f"run: the worker {worker} has {has}. {INSTALL_SAME} Here it is {__version__}.")
            if not there:
                note(f"the cluster at {address} has no workers yet; each machine adds one: dask worker {address}")
        yield


def _close(cluster: Any) -> None:
    # Dask asserts if a worker is just being started again; all rows are stored by then, and workers end with this process
    with contextlib.suppress(Exception):
        cluster.close()


@contextlib.contextmanager
def _ray(address: str | None, workers: int, note: Callable[[str], None]) -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray would report to its makers
    ray: Any = importlib.import_module("ray")
    quiet = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    own = {"address": "local", "num_cpus": workers, "include_dashboard": False, "object_store_memory": STORE}
    try:
        ray.init(**quiet, **(own if address is None else {"address": address}))
    except Exception as error:
        raise _unreachable("ray", address or "this machine", _first_line(error)) from None
    try:
        importlib.import_module("ray.util.joblib").register_ray()
        with contextlib.redirect_stdout(sys.stderr):  # to which a thread of Ray prints what happens to its nodes
            yield
    finally:
        ray.shutdown()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def cells_on(backend: Any, measure: Measure) -> Callable[[Experiment, Sequence[Cell]], Iterator[Outcome]] | None:
    """How cells are measured on the cluster that joblib is configured for; None if that is no cluster.

    Each outcome comes when its cell is finished, and WorkerDied after all of them.
    """
    if (client := getattr(backend, "client", None)) is not None:
        return lambda experiment, cells: _on_dask(client, _SameCode(experiment, measure), cells)
    if type(backend).__name__ == "RayBackend":
        return lambda experiment, cells: _on_ray(_SameCode(experiment, measure), cells)
    return None


class _SameCode:
    """Measures a cell in a worker, if that has the versions and the code of the caller: rows of others must not be mixed in."""

    def __init__(self, experiment: Experiment, measure: Measure) -> None:
        self.experiment, self.measure, self.caller = experiment, measure, _made_by(experiment)

    def __call__(self, cell: Cell) -> Outcome:
        here = _made_by(self.experiment)
        if here != self.caller:
            other = [
                f"{name} {here[name]}, not {self.caller[name]}" for name in here if here[name] != self.caller[name]
            ]
            raise ClusterLost(f"run: a worker has {', '.join(other)}; rows of both must not be mixed. {INSTALL_SAME}")
        return self.measure(self.experiment, cell)


def _made_by(experiment: Experiment) -> Row:
    return {**origin(experiment.name), "code": fingerprint(experiment.measure)}


def _on_dask(client: Any, measure: _SameCode, cells: Sequence[Cell]) -> Iterator[Outcome]:
    distributed: Any = importlib.import_module("distributed")
    death: Exception | None = None
    for future in distributed.as_completed([client.submit(measure, cell, pure=False) for cell in cells]):
        try:
            outcome = future.result()
            future.release()  # or Dask measures it again when the worker that holds it dies
        except AttemperError:
            raise
        except distributed.KilledWorker as error:
            death = error  # the other cells first
        except Exception as error:
            raise _lost(error) from error
        else:
            yield outcome
    if death is not None:
        raise WorkerDied(type(death).__name__)


def _on_ray(measure: _SameCode, cells: Sequence[Cell]) -> Iterator[Outcome]:
    ray: Any = importlib.import_module("ray")
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(_call)
    given = ray.put(measure)
    waiting = [task.remote(given, cell) for cell in cells]
    death: Exception | None = None
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        try:
            outcome = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, AttemperError) else _lost(error.cause) from None
        except (
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.OutOfMemoryError,
        ) as error:
            death = error
        except Exception as error:
            raise _lost(error) from error
        else:
            yield outcome
    if death is not None:
        raise WorkerDied(type(death).__name__)


def _call(measure: _SameCode, cell: Cell) -> Outcome:
    return measure(cell)


def _lost(error: BaseException) -> ClusterLost:
    cause = error
    while (deeper := cause.__cause__) is not None:
        cause = deeper
    if isinstance(cause, ModuleNotFoundError):
        return ClusterLost(f"run: a worker has no {cause.name}. {INSTALL_SAME}")
    reason = getattr(error, "reason", None) or _first_line(cause)  # Dask's cancelled cells have one
    return ClusterLost(f"run: the cluster was lost ({type(error).__name__}: {reason}).")
