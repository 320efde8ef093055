"""serve(): binds the address, prints it with its token, and serves the page until Ctrl-C."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from ...errors import InputError
from . import limits
from .app import Served, make
from .protocol import TimedProtocol
from .record import FollowedRecord

LOOPBACK = "127.0.0.1"
WARNING = (
    "WARNING: the page is served on {host}, which other machines can reach. Whoever knows the address with its token can use "
    "this machine to compute. The traffic is not encrypted: anyone on the network can read the token. Stop it with Ctrl-C when "
    "you are done."
)


@dataclass(frozen=True)
class Bound:
    """An address that is taken: its socket, the names under which the server answers, and where the page is.

    ``local``: only this machine reaches it.
    """

    socket: socket.socket
    hosts: list[str]
    token: str
    local: bool

    @property
    def address(self) -> str:
        return f"http://{self.hosts[0]}/?token={self.token}"


def bind(host: str = LOOPBACK, port: int = 0, allow_remote: bool = False) -> Bound:
    """Take an address. Port 0 is a free one. Beyond this machine only with ``allow_remote``, and never all addresses at once."""
    try:
        place = ipaddress.ip_address(LOOPBACK if host == "localhost" else host)
    except ValueError:
        raise InputError(
            f"serve: --host must be an address of this machine, as 127.0.0.1; got {host!r}. Leave "
            "--host out to serve this machine alone."
        ) from None
    if isinstance(place, ipaddress.IPv6Address) and place.ipv4_mapped:
        place = place.ipv4_mapped  # ::ffff:0.0.0.0 is every address, too
    if place.is_unspecified:
        raise InputError(
            f"serve: --host {host} means every address, and then no request can be checked for its name. Name one "
            "address of this machine."
        )
    if not place.is_loopback and not allow_remote:
        raise InputError(
            f"serve: {host} can be reached by other machines. Add --allow-remote if that is what you want; "
            "leave --host out otherwise."
        )
    taken = socket.socket(socket.AF_INET6 if place.version == 6 else socket.AF_INET)
    try:
        if os.name == "posix":  # elsewhere it would let another process take the port as well
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((str(place), port))
        taken.listen(128)  # whoever comes before the server is ready waits, and is not refused
    except OSError as error:
        taken.close()
        raise InputError(
            f"serve: cannot use port {port} of {host}: {error.strerror}. Choose another --port, or 0 for a free one, "
            "and a --host that is an address of this machine."
        ) from None
    found = taken.getsockname()[1]
    names = [f"[{place}]" if place.version == 6 else str(place), *(["localhost"] if place.is_loopback else [])]
    hosts = [name for one in names for name in ([f"{one}:{found}", one] if found == 80 else [f"{one}:{found}"])]
    return Bound(taken, hosts, secrets.token_urlsafe(32), place.is_loopback)


class StoppableServer(uvicorn.Server):
    """uvicorn's server, which Ctrl-C, SIGTERM or the end of its terminal stops, also while events stream and runs train."""

    def __init__(self, config: uvicorn.Config, served: Served) -> None:
        super().__init__(config)
        self.served = served
        self.number: int | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again: stopping the server is how this command ends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in numbers}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.number, self.should_exit = self.number or sig, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.served.streams.end()
        self.served.desk.kill()
        await super().shutdown(sockets)


def check_model(model: str) -> None:
    """Refuse a path without a model before anything is served. A name of the hub is looked up when the model is first needed."""
    path = Path(model).expanduser()
    hint = "Give a folder that save_pretrained() wrote, or leave --model out for the embedded MiniLM."
    try:
        there, is_folder = path.exists(), path.is_dir()
        holds = is_folder and any(path.glob("*.safetensors"))
    except (OSError, ValueError):  # a name too long, or with a NUL
        there = is_folder = holds = False
    if is_folder and not holds:
        raise InputError(f"serve: --model {model!r} has no .safetensors file, so there are no weights to read. {hint}")
    if there and not is_folder:
        raise InputError(f"serve: --model {model!r} is a file, not a folder. {hint}")
    if not there and (not model.strip() or path.is_absolute() or model.startswith(".") or model.count("/") > 1):
        raise InputError(f"serve: there is no folder {model!r} for --model. {hint}")


def server(bound: Bound, model: str | None = None, record: Path | None = None) -> StoppableServer:
    """A server for an address, not yet running."""
    followed = None if record is None else FollowedRecord(record)
    if followed is not None:
        followed.check()
    served = make(bound.hosts, bound.token, model, followed)
    config = uvicorn.Config(
        served.guarded,
        http=TimedProtocol,
        ws="none",
        log_config=None,
        log_level="critical",
        access_log=False,  # an address may hold the token
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(limits.IDLE),
        timeout_graceful_shutdown=int(limits.SHUTDOWN),
        h11_max_incomplete_event_size=limits.HEAD,
    )
    return StoppableServer(config, served)


def serve(
    host: str = LOOPBACK,
    port: int = 0,
    *,
    allow_remote: bool = False,
    browser: bool = True,
    model: str | None = None,
    record: Path | None = None,
    say: Callable[[str], object] = print,
    note: Callable[[str], object] = print,
) -> int | None:
    """Serve the page until a signal comes; returns its number.

    Args:
        host: an address of this machine.
        port: 0 is a free one.
        allow_remote: whether ``host`` may be one that other machines reach.
        browser: open the page in a browser.
        model: as ``attemper scan`` takes it; None is the embedded MiniLM.
        record: a file of ``watch(path=…)`` to follow.
        say: gets the address, note: gets the rest.
    """
    if model is not None:
        check_model(model)
    bound = bind(host, port, allow_remote)
    with contextlib.closing(bound.socket):
        running = server(bound, model, record)
        if not bound.local:
            note(WARNING.format(host=host))
        say(bound.address)
        note("Ctrl-C stops it.")
        if browser:
            once = f"http://{bound.hosts[0]}/?token={running.served.guarded.ticket()}"
            threading.Timer(0.3, _open, (once,)).start()
        running.run(sockets=[bound.socket])
    return running.number


def _open(address: str) -> None:
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(address)
