"""Every command, in the groups and the order in which --help lists them."""

import importlib.util
from collections.abc import Callable
from typing import Any

from .app import Command
from .app import app as app
from .app import main as main
from .env import env
from .report import report
from .scan import scan

GROUPS: dict[str, tuple[Callable[..., Any], ...]] = {"Models": (scan, report), "Learn": (), "This machine": (env,)}
if importlib.util.find_spec("attemper_lab") is not None:
    from attemper_lab.cli import bench, cards, claims, explain, page, run, serve

    GROUPS |= {"Learn": (explain, claims, cards, run, serve, page), "This machine": (bench, env)}

OWN_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}  # an experiment's, which `run` hands on
for _group, _commands in GROUPS.items():
    for _command in _commands:
        _own = OWN_OPTIONS if _command.__name__ == "run" else None
        app.command(cls=Command, context_settings=_own, rich_help_panel=_group)(_command)
