"""attemper serve: the page, on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from attemper.extension.command import READER_LEFT, note, say
from attemper.extension.files import load


def serve(
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="The port.", show_default="a free one")
    ] = 0,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let --host be an address that other machines can reach.")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, and open no browser.")] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A model folder with .safetensors.", show_default="the embedded MiniLM"),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.jsonl", help="Follow the file that watch(path=…) writes, while the training goes on."
        ),
    ] = None,
) -> None:
    """Open the page on which one drags the scale and sees attention change. It runs on this machine, until Ctrl-C."""
    for package in ("fastapi", "uvicorn"):
        load("serve: the page", package, "lab")
    from ..page.server.serve import serve as serve_page

    def address(words: str) -> None:
        if not say(words):
            raise typer.Exit(READER_LEFT)

    number = serve_page(
        host,
        port,
        allow_remote=allow_remote,
        browser=not no_browser
        and (sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))),
        model=model,
        record=record,
        say=address,
        note=note,
    )
    note("Stopped.")
    if number not in (None, 2):  # Ctrl-C is how it ends; another signal is told to the shell
        raise typer.Exit(128 + int(number))
