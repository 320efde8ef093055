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

from attemper.errors import InputError
from attemper.extension.tools import safe

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
    """A socket that listens, the names under which its server answers, the token, and whether only this machine reaches it."""

    socket: socket.socket
    hosts: list[str]
    token: str
    local: bool

    @property
    def address(self) -> str:
        return f"http://{self.hosts[0]}/?token={self.token}"


def bind(host: str = LOOPBACK, port: int = 0, allow_remote: bool = False) -> Bound:
    """Listen on an address. Port 0 takes a free port. Other machines need ``allow_remote``; all addresses at once are refused."""
    try:
        address = ipaddress.ip_address(LOOPBACK if host == "localhost" else host)
    except ValueError:
        raise InputError(
            f"serve: --host must be an address of this machine, as 127.0.0.1; got {host!r}. Leave "
            "--host out to serve this machine alone."
        ) from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped  # ::ffff:0.0.0.0 is every address, too
    if address.is_unspecified:
        raise InputError(
            f"serve: --host {host} means every address, and then no request can be checked for its name. Name one "
            "address of this machine."
        )
    if not address.is_loopback and not allow_remote:
        raise InputError(
            f"serve: {host} can be reached by other machines. Add --allow-remote if that is what you want; "
            "leave --host out otherwise."
        )
    listening = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        if os.name == "posix":  # elsewhere it would let another process take the port as well
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((str(address), port))
        listening.listen(128)  # clients that come before the server is ready wait, and are not refused
    except OSError as error:
        listening.close()
        raise InputError(
            f"serve: cannot use port {port} of {host}: {error.strerror}. Choose another --port, or 0 for a free one, "
            "and a --host that is an address of this machine."
        ) from None
    port = listening.getsockname()[1]
    names = [f"[{address}]" if address.version == 6 else str(address), *["localhost"] * address.is_loopback]
    hosts = [host for name in names for host in (f"{name}:{port}", *[name] * (port == 80))]
    return Bound(listening, hosts, secrets.token_urlsafe(32), address.is_loopback)


class StoppableServer(uvicorn.Server):
    """uvicorn's server. Ctrl-C, SIGTERM or the end of its terminal stop it, also while events stream and runs train."""

    def __init__(self, config: uvicorn.Config, served: Served) -> None:
        super().__init__(config)
        self.served = served
        self.number: int | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do as uvicorn, but do not raise the signal again: the command ends when the server stops."""
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
        self.served.worker.close()
        await super().shutdown(sockets)


def check_model(model: str) -> None:
    """Refuse a path that has no model, before anything is served. The worker looks up names of the hub when it loads."""
    path = Path(model).expanduser()
    try:
        exists, is_folder = path.exists(), path.is_dir()
        has_weights = is_folder and any(path.glob("*.safetensors"))
    except (OSError, ValueError):  # a name too long, or with a NUL
        exists = is_folder = has_weights = False
    if is_folder and not has_weights:
        fault = f"--model {model!r} has no .safetensors file, so there are no weights to read"
    elif exists and not is_folder:
        fault = f"--model {model!r} is a file, not a folder"
    elif not exists and (not model.strip() or path.is_absolute() or model.startswith(".") or model.count("/") > 1):
        fault = f"there is no folder {model!r} for --model"
    else:
        return
    raise InputError(
        f"serve: {fault}. Give a folder that save_pretrained() wrote, or leave --model out for the embedded MiniLM."
    )


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
        say: called with the address.
        note: called with every other line.
    """
    if model is not None:
        check_model(model)
    bound = bind(host, port, allow_remote)
    with contextlib.closing(bound.socket):
        running = server(bound, model, record)
        if not bound.local:
            note(WARNING.format(host=host))
        at = "#tab=training&training.source=record" if record is not None else ""
        say(bound.address + at)
        if record is not None and not record.exists():
            note(f"{safe(str(record))} does not exist yet. The page shows it as soon as a training writes it.")
        note("Ctrl-C stops it.")
        if browser:
            once = f"http://{bound.hosts[0]}/?token={running.served.guarded.ticket()}{at}"
            threading.Timer(0.3, _open, (once,)).start()
        running.run(sockets=[bound.socket])
    return running.number


def _open(address: str) -> None:
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(address)
