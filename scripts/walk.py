"""Counts the files of src/ that a call passes through and the functions it calls; writes them to docs/architecture.md.

`python scripts/walk.py` writes; `--check` only compares. What counts as a file and as a call is said in the page.
Each walk is made before it is counted, so that imports, and what is kept from call to call, are not part of it.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import io
import json
import re
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import attemper

PAGE, SOURCE = Path(__file__).parents[1] / "docs" / "architecture.md", Path(attemper.__file__).parents[1]
WIDTH = 118
GOES_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

Walk = Callable[[], "Counted"]


class Counted:
    """A profile hook, and what it saw while it was `on`: the files in the order of their first entry, and how many calls."""

    def __init__(self) -> None:
        self.on, self.calls = False, 0
        self.files: list[str] = []

    def hook(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on or event != "call":
            return
        file, begin = place(frame.f_code)
        if file is None or begin not in (None, frame.f_lasti):
            return
        self.calls += 1
        if file not in self.files:
            self.files.append(file)


@cache
def place(code: CodeType) -> tuple[str | None, int | None]:
    """The file of a function below src, without `attemper/`; None for other code. And where a generator or coroutine begins.

    These are entered again whenever they go on.
    """
    path = Path(code.co_filename)
    function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.endswith(("comp>", "<genexpr>"))
    ours = function and (path.is_relative_to(SOURCE / "attemper") or path.is_relative_to(SOURCE / "attemper_lab"))
    file = path.relative_to(SOURCE).as_posix().removeprefix("attemper/") if ours else None
    if not code.co_flags & GOES_ON:
        return file, None
    return file, next(found.offset for found in dis.get_instructions(code) if found.opname == "RESUME")


def counted(call: Callable[[], object], warm: int = 2) -> Counted:
    """One call, after some that are not counted."""
    for _ in range(warm):
        call()
    found = Counted()
    before = sys.getprofile()
    sys.setprofile(found.hook)
    found.on = True
    try:
        call()
    finally:
        found.on = False
        sys.setprofile(before)
    return found


def attention_walks() -> dict[str, Walk]:
    """Calls on (1, 2, 8, 16); tracked ones require gradients of query, key and value."""
    plain, tracked = ([torch.randn(1, 2, 8, 16).requires_grad_(grad) for _ in range(3)] for grad in (False, True))
    gain, keep = torch.ones(2, requires_grad=True), torch.ones(1, 1, 8, 8, dtype=torch.bool)

    def backward() -> None:
        torch.autograd.grad(attemper.attention(*tracked).output.sum(), tracked)

    quiet = torch.no_grad()
    calls: dict[str, Callable[[], object]] = {
        "attention(q, k, v)": quiet(lambda: attemper.attention(*plain)),
        "attention() with a mask": quiet(lambda: attemper.attention(*plain, mask=keep)),
        "attention() with gradients": lambda: attemper.attention(*tracked),
        "attention() with gradients, and its backward": backward,
        "attention() with a learned scale": lambda: attemper.attention(*plain, scale=gain),
        "measure(q, k)": quiet(lambda: attemper.measure(*plain[:2])),
        "sdpa(q, k, v)": quiet(lambda: attemper.sdpa(*plain)),
    }
    return {name: lambda call=call: counted(call) for name, call in calls.items()}  # type: ignore[misc]


def watched(model: nn.Module, inputs: torch.Tensor, training: bool) -> Counted:
    """A step of a watched model, its third."""
    model.train(training)
    with attemper.watch(model) as watching:

        def step() -> None:
            with torch.set_grad_enabled(training):
                output = model(inputs)
            if training:
                output.sum().backward()
            watching.step()

        return counted(step)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(2, 8, 16)


def hugging_face() -> tuple[nn.Module, torch.Tensor]:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=99)), torch.randint(99, (2, 8))


def watch_walks() -> dict[str, Walk]:
    return {
        "a forward of nn.TransformerEncoder, two layers": lambda: watched(*encoder(), training=False),
        "a training step of it": lambda: watched(*encoder(), training=True),
        "a forward of a BERT of Hugging Face, two layers": lambda: watched(*hugging_face(), training=False),
    }


def scan_walks() -> dict[str, Walk]:
    def scan() -> None:
        from attemper.cli import main

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                main(["scan", "demo:scaled"])
            except SystemExit as ended:
                if ended.code:
                    raise

    return {"attemper scan demo:scaled": lambda: counted(scan, warm=1)}


def serve_walks() -> dict[str, Walk]:
    return {"POST /heads, in the server's process": request}


def request() -> Counted:
    """A request to a running server, whose threads have the hook."""
    from attemper_lab.page.server.serve import bind, server

    found, bound = Counted(), bind()
    running = server(bound)
    threading.setprofile(found.hook)
    thread = threading.Thread(target=lambda: running.run(sockets=[bound.socket]))
    thread.start()
    threading.setprofile(None)  # type: ignore[arg-type]
    try:
        for turn in range(3):
            found.on = turn == 2
            ask = urllib.request.Request(
                f"http://{bound.hosts[0]}/heads",
                json.dumps({"text": "the cat sat"}).encode(),
                {"Authorization": f"Bearer {bound.token}", "Content-Type": "application/json"},
            )
            urllib.request.urlopen(ask, timeout=300).read()
            time.sleep(0.5)  # what the server does after its answer
        found.on = False
    finally:
        running.should_exit = True
        thread.join()
    return found


WALKS: dict[str, Callable[[], dict[str, Walk]]] = {
    "attention": attention_walks,
    "watch": watch_walks,
    "scan": scan_walks,
    "serve": serve_walks,
}
"""The block of the page, and what is counted in it."""


def text(name: str, walk: Walk) -> str:
    """What was counted, as the page shows it."""
    found, indent = walk(), "    "
    files = textwrap.wrap(", ".join(found.files), WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join([f"{name}: {len(found.files)} files, {found.calls:,} calls", *files])


def block(walks: dict[str, Walk]) -> str:
    return "\n".join(["```text", *(text(name, walk) for name, walk in walks.items()), "```"])


def blocks(page: str) -> dict[str, str]:
    """The blocks that the page has."""
    return dict(re.findall(r"<!-- walk (\w+) -->\n(.*?)\n<!-- /walk -->", page, flags=re.DOTALL))


def main(arguments: list[str]) -> int:
    torch.manual_seed(0)
    page = PAGE.read_text(encoding="utf-8")
    found = {name: block(make()) for name, make in WALKS.items()}
    stale = [name for name, written in blocks(page).items() if written != found[name]]
    if "--check" in arguments:
        for name in stale:
            print(
                f"the walk of {name} in docs/architecture.md is stale. Run make docs. Now:\n{found[name]}",
                file=sys.stderr,
            )
        return int(bool(stale))
    for name, lines in found.items():
        before, begin, rest = page.partition(f"<!-- walk {name} -->\n")
        _, end, after = rest.partition("\n<!-- /walk -->")
        page = before + begin + lines + end + after
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
