"""attemper page: the page as one offline file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attemper.extension.command import Force, finish


def page(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML file to write.")] = Path(
        "why.html"
    ),
    address: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where the file will be on the web: links to it get a picture, written beside it as .png.",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Write the page as one HTML file: drag the scale and see attention change. It needs no server and no network."""
    from ..page.offline import write

    size = write(output, force=force, address=address)
    finish(lambda: print(f"{output}  {size / 1000:.0f} kB. Open it in a browser."))
