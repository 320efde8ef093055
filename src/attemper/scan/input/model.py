"""load(): the model to scan, from a package, a local folder of safetensors, or the hub if downloads are allowed."""

from __future__ import annotations

import hashlib
import io
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import demo
from ..._files import load as extra
from ..._files import version_of
from ...demo import package as transformers
from ...errors import AttemperError, InputError, nearest
from ..document import AboutModel
from . import folder

DTYPES = ("float16", "bfloat16", "float32", "float64")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HASHED = 2 * 2**30  # bytes of weights up to which a sha256 is computed
LOADING = "scan: loading a model"  # how errors about a missing, broken or old transformers begin
TASKS = {
    "feature-extraction": ("AutoModel", ("Model",)),
    "fill-mask": ("AutoModelForMaskedLM", ("ForMaskedLM",)),
    "text-generation": ("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")),
    "text2text-generation": ("AutoModelForSeq2SeqLM", ("ForConditionalGeneration",)),
    "text-classification": ("AutoModelForSequenceClassification", ("ForSequenceClassification",)),
    "token-classification": ("AutoModelForTokenClassification", ("ForTokenClassification",)),
    "question-answering": ("AutoModelForQuestionAnswering", ("ForQuestionAnswering",)),
    "image-classification": ("AutoModelForImageClassification", ("ForImageClassification",)),
    "audio-classification": ("AutoModelForAudioClassification", ("ForAudioClassification",)),
    "speech-to-text": ("AutoModelForSpeechSeq2Seq", ("ForSpeechSeq2Seq",)),
}
"""Task → the Auto class of transformers that loads it, and how the names of its classes end."""


@dataclass
class Loaded:
    """A model and where it comes from; ``folder`` has its tokenizer and preprocessor, if there are any."""

    model: nn.Module
    name: str
    source: str  # "demo", "folder", "hub" or "object"
    folder: Path | None = None
    tokenizer: Any = None  # of a model object; a folder's is loaded when it is needed
    task: str | None = None
    sha256: str | None = None
    notes: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)  # weights of embeddings and attention that are not in the files
    sample: str = demo.SENTENCE  # the text that is scanned where none is given

    def about(self) -> AboutModel:
        """The document's ``model``."""
        config = getattr(self.model, "config", None)
        first = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        return AboutModel(
            name=self.name,
            source=self.source,
            class_=type(self.model).__name__,
            type=getattr(config, "model_type", None) or None,
            parameters=sum(p.numel() for p in self.model.parameters()),
            dtype=None if first is None else str(first.dtype).removeprefix("torch."),
            sha256=self.sha256,
            task=self.task,
        )


def load(
    model: str | Path | None = None,
    *,
    task: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    allow_download: bool = False,
    progress: Callable[[str], object] = lambda words: None,
) -> Loaded:
    """A model in evaluation mode, loaded from safetensors, or from the GGUF file of a demo, by code of transformers only.

    ``model`` is a folder, ``demo:`` and a name of ``demo.MODELS``, or a hub id, which is downloaded only if ``allow_download``;
    None: the embedded MiniLM. ``task``, a key of ``TASKS``, is the head to load; None: the class the checkpoint was saved as.
    ``dtype`` is one of ``DTYPES``; None: as stored. ``device`` is torch's name of one; "auto": a CUDA
    device if there is one.
    """
    if task is not None and task not in TASKS:
        raise InputError(f"scan: unknown --task {task!r}. {nearest(task, TASKS)}")
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"scan: unknown --dtype {dtype!r}. {nearest(dtype, DTYPES)}")
    device = _device(device)
    progress("loading transformers")
    transformers("scan: the embedded model", "demo") if model is None else transformers(LOADING)
    progress("reading the model" if model is None else f"reading {model}")
    digest, sample, gguf, tokenizer = None, demo.SENTENCE, None, None
    if model is None:
        place, source, shown, digest = demo.embedded_folder(), "demo", demo.NAME, demo.SHA256
    elif str(model).startswith(demo.PREFIX):
        demo_model, weights = demo.named(str(model))
        place, source, shown = weights.parent, "demo", str(model)
        digest, sample = demo_model.sha256, demo_model.sample
        gguf = weights if weights.suffix == ".gguf" else None
    else:
        place, source = _place(model, allow_download)
        shown = str(model) if source == "hub" else place.resolve().name
    notes: list[str] = []
    drawn: list[str] = []
    if gguf is not None:
        module, tokenizer = _read_gguf(gguf, shown, task, dtype)
    else:
        module, notes, drawn = _read(place, shown, task, dtype)
    digest = digest or _digest(place)
    task = task or _task_of(type(module).__name__)
    module = module.to(device).eval()
    return Loaded(module, shown, source, place, tokenizer, task, digest, notes, drawn, sample)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings of transformers: what matters is in the notes."""
    package = transformers(LOADING)
    logging = package.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with demo.quiet(package), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def offline() -> Iterator[None]:
    """Nothing is downloaded, whatever a config or a class requests: the package `kernels` would download compiled code."""
    constants: Any = import_module("huggingface_hub.constants")
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _place(model: str | Path, allow_download: bool) -> tuple[Path, str]:
    """The folder of a model, and whether it is a folder or from the hub."""
    if not str(model).strip():
        raise InputError(
            "scan: MODEL is empty. Give a folder that save_pretrained() wrote (. for this one), or leave MODEL out for the "
            "embedded MiniLM."
        )
    path = Path(model).expanduser()
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError):  # a name too long, or with a NUL
        exists = is_folder = False
    if is_folder:
        return path, "folder"
    folder.refuse_pickle(path)
    if exists:
        if path.suffix in (".jsonl", ".parquet"):
            raise InputError(
                f"scan: MODEL must be a folder with config.json and .safetensors; {str(model)!r} is a file. If it is the record "
                f"of a watch, type attemper report {shlex.quote(str(model))}."
            )
        raise InputError(
            f"scan: MODEL must be a folder with config.json and .safetensors; {str(model)!r} is a file. "
            f"Type its folder: {str(path.parent)!r}."
        )
    if not HUB_ID.fullmatch(str(model)):
        raise InputError(
            f"scan: there is no folder {str(model)!r}. Give a folder that save_pretrained() wrote, or leave MODEL out for "
            "the embedded MiniLM."
        )
    return _hub(str(model), allow_download), "hub"


def _hub(name: str, allow_download: bool) -> Path:
    """A snapshot of a hub repository: safetensors, JSON and vocabularies, never code and never a pickle."""
    hub = import_module("huggingface_hub")
    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    except Exception:  # not in the cache, which may say so in many ways
        if not allow_download:
            raise InputError(
                f"scan: there is no folder {name!r}, and a model of the hub is downloaded only with --allow-download. "
                f"Type attemper scan {name} --allow-download, or give a local folder."
            ) from None
    try:
        return Path(hub.snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # unreachable, unknown, gated: the hub's client has a class for each
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no answer"
        raise InputError(
            f"scan: {name!r} could not be downloaded from the hub ({type(error).__name__}: {reason[:200]}). Check the name and "
            "the connection, or give a local folder."
        ) from None


def _read(place: Path, shown: str, task: str | None, dtype: str | None) -> tuple[nn.Module, list[str], list[str]]:
    """The model, notes on how it was loaded, and the weights of its attention that were initialised at random."""
    package = transformers(LOADING)
    given = folder.check(place)
    model_type, foreign = given.get("model_type"), folder.foreign(given)
    known = package.CONFIG_MAPPING.keys()
    if model_type not in known:
        near = nearest(model_type, known).split(" Known:")[0] if isinstance(model_type, str) else ""
        near = near if near.startswith("Did") else ""
        raise InputError(
            f"scan: config.json of {shown!r} has model_type {model_type!r}, which transformers {package.__version__} "
            f"does not have. {near or 'A newer transformers may.'}"
        )
    stored = folder.stored(place)
    folder.check_sizes(given, stored)
    options: dict[str, Any] = {
        "local_files_only": True,
        "trust_remote_code": False,
        "use_safetensors": True,
        "dtype" if version_of(package) >= (4, 56) else "torch_dtype": "auto"
        if dtype is None
        else getattr(torch, dtype),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # refused below, with names and sizes
    }
    with quiet(), offline(), folder.bounded(stored), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # random weights are the same in every run
        try:
            config = package.AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
            if foreign:  # None: sdpa, and eager where a class has no other
                config._attn_implementation = config._experts_implementation = None
            loader = getattr(package, TASKS[task][0]) if task else _saved_as(package, config)
            model, info = loader.from_pretrained(place, config=config, **options)
            names = folder.renamed(stored, model) if info["missing_keys"] and info["unexpected_keys"] else None
            if names is not None:
                model, info = type(model).from_pretrained(
                    None, config=config, state_dict=stored.tensors(names), **options
                )
        except AttemperError:
            raise
        except Exception as error:  # an untrusted file can raise anything
            raise InputError(
                f"scan: {shown!r} could not be loaded{f' for {task}' if task else ''}: {reason(error)}. "
                f"{'Try another --task.' if task else 'Check config.json, or copy the folder again from its source.'}"
            ) from None
    notes, drawn = _checked(shown, model, info, stored)
    if names is not None:
        old = next(name for name in sorted(names) if names[name] != name)
        notes.insert(0, f"names in the files were adapted to the model: {old} was read as {names[old]}.")
    if foreign:
        ran = getattr(model.config, "_attn_implementation", None)
        notes.append(f"config.json asks for {', '.join(foreign)}, which needs more than torch; {ran} was used instead.")
    return model, notes, drawn


def _read_gguf(weights: Path, shown: str, task: str | None, dtype: str | None) -> tuple[nn.Module, Any]:
    """A model and its tokenizer from a GGUF file, whose numbers become those of a dtype: float32, if none is asked for."""
    package = transformers(LOADING)
    extra(f"scan: {shown}", "gguf", "gguf")
    options: dict[str, Any] = {"gguf_file": weights.name, "local_files_only": True, "trust_remote_code": False}
    loader = getattr(package, TASKS[task or "text-generation"][0])
    with quiet(), offline(), redirect_stderr(io.StringIO()):  # a bar of tqdm's own
        try:
            tokenizer = package.AutoTokenizer.from_pretrained(weights.parent, **options)
            model = loader.from_pretrained(weights.parent, dtype=getattr(torch, dtype or "float32"), **options)
        except Exception as error:
            advice = "Leave --task out." if task else "Type pip install -U 'attemper[gguf]'."
            raise InputError(f"scan: {shown!r} could not be loaded: {reason(error)}. {advice}") from None
    return model, tokenizer


def reason(error: BaseException, length: int = 400) -> str:
    """An error of another library in one line: its class and its message."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:length].rstrip('.')}{'…' if len(words) > length else ''}"


def _checked(shown: str, model: Any, info: dict[str, Any], stored: folder.Stored) -> tuple[list[str], list[str]]:
    """Notes on weights that are missing or unused, and which of the missing ones attention depends on."""
    name = type(model).__name__
    mismatched = sorted(map(tuple, info["mismatched_keys"]))
    if mismatched:
        first, inside, wanted = mismatched[0]
        more = f" ({len(mismatched) - 1} more like it)" if len(mismatched) > 1 else ""
        raise InputError(
            f"scan: {shown!r} could not be loaded: {first} is {tuple(inside)} in the files and {tuple(wanted)} by config.json"
            f"{more}. Copy both again from their source."
        )
    missing, left = (sorted(map(str, info[part])) for part in ("missing_keys", "unexpected_keys"))
    drawn = folder.vital(model, missing)
    inside = folder.attends(model, [parameter for parameter, _ in model.named_parameters()])
    if drawn and inside and not set(inside) - set(drawn):
        raise InputError(
            f"scan: {shown!r} could not be loaded: no weight of {name}'s attention is in the files, so all of it would be "
            f"random. The model has {folder.some(inside, 1)}, the files have {folder.some(sorted(stored.places), 1)}. "
            "Save it again with model.save_pretrained(folder), or rename the tensors."
        )
    notes = []
    if missing:
        verb = "weight is not in the files and was" if len(missing) == 1 else "weights are not in the files and were"
        notes.append(f"{len(missing)} {verb} initialised at random: {folder.some(missing)}.")
    if left:
        verb = "weight of the files has" if len(left) == 1 else "weights of the files have"
        notes.append(f"{len(left)} {verb} no parameter in {name}: {folder.some(left)}.")
    return notes, drawn


def _saved_as(package: Any, config: Any) -> Any:
    """The class that the checkpoint was saved as, if transformers has it for this config; otherwise the bare model."""
    for name in config.architectures or ():
        saved_class = getattr(package, str(name), None)
        own = isinstance(saved_class, type) and issubclass(saved_class, package.PreTrainedModel)
        if own and isinstance(config, getattr(saved_class, "config_class", None) or ()):
            return saved_class
    return package.AutoModel


def _task_of(name: str) -> str | None:
    return next((task for task, (_, ends) in reversed(TASKS.items()) if name.endswith(ends)), None)


def _digest(place: Path) -> str | None:
    """One sha256 over the weight files in the order of their names; None if they are too large to read twice."""
    files = folder.weights(place)
    if sum(path.stat().st_size for path in files) > HASHED:
        return None
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while part := file.read(2**20):
                digest.update(part)
    return digest.hexdigest()


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(
            f"scan: --device {device!r} cannot be used here; `attemper env` lists the devices. Type --device cpu."
        ) from None
    return device
