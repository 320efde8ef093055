"""attemper env: versions, processors, kernels and extras."""

from __future__ import annotations

import json

from .app import AsJson, console, finish


def env(as_json: AsJson = False) -> None:
    """Show the versions, processors, kernels and extras found here."""
    from .. import env as environment

    description = environment.describe()
    finish(lambda: print(json.dumps(description)) if as_json else console().print(environment.table(description)))
