"""The kernels as a folder for the kernel hub of Hugging Face: what the package ``kernels``, and transformers by it, load by name.

    python scripts/hub_kernel.py                        build/hub/attemper-flash
    python scripts/hub_kernel.py -o FOLDER              there
    python scripts/hub_kernel.py --owner NAME           with the account of the hub that it is for, in its README

A variant is the part of the library that attends, as a package that can be loaded from anywhere: a copy of the sources in which
the ops have a namespace of their own, so that several versions, and an installed attemper, live in one process. ``torch-cuda``
runs by Triton, ``torch-cpu`` in plain PyTorch; the third holds the native library too, for this processor.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "attemper"
NAME, VERSION = "attemper-flash", 1
BEGIN = ("flash.py", "attention.py", "vitals.py", "kernels")  # and all that these import
OLDEST_TORCH = "211"  # as pyproject.toml has it
OLDEST_KERNELS = "0.17.0"  # whose variants have a metadata.json
NAMESPACE = re.compile(r"\battemper(?=::|\.Vitals\")|(?<=torch\.ops\.)attemper\b")
INIT = '''"""attemper for the kernel hub: FlashAttention's functions, and attention that measures itself."""

from .attention import attention, measure, weights
from .flash import flash_attn_func, flash_attn_varlen_func
from .vitals import merge

__all__ = ["attention", "flash_attn_func", "flash_attn_varlen_func", "measure", "merge", "weights"]
'''
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
CARD = f"""---
library_name: kernels
license: apache-2.0
tags: [kernel]
---

# {NAME}

Scaled dot-product attention that measures itself while it runs: [attemper]({HOME}), as a kernel.

```python
from kernels import get_kernel

kernel = get_kernel("ACCOUNT/{NAME}", version={VERSION}, trust_remote_code=True)
out = kernel.flash_attn_func(q, k, v, causal=True)        # (B, L, H, E), as flash-attn
heads = [one.transpose(1, 2) for one in (q, k, v)]        # (B, H, L, E), as torch's SDPA
out, vitals = kernel.attention(*heads, causal=True)       # with its vital signs
```

In transformers: `model.set_attn_implementation("ACCOUNT/{NAME}", allow_all_kernels=True)`.
"""


def sources() -> list[Path]:
    """The files that a variant needs, found by their imports."""
    found: list[Path] = []
    waiting = [file for name in BEGIN for file in _files_of(SOURCE / name)]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                home = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                waiting += [
                    one for place in (home, *(home / alias.name for alias in node.names)) for one in _module(place)
                ]
    return sorted(found)


def _files_of(place: Path) -> list[Path]:
    return [place] if place.suffix else sorted(place.rglob("*.py"))


def _module(place: Path) -> list[Path]:
    """The file of a module or of a package, and of the packages around it."""
    files = [place.with_suffix(".py"), *(parent / "__init__.py" for parent in (place, *place.parents))]
    return [file for file in files if file.is_file() and SOURCE in file.parents and file != SOURCE / "__init__.py"]


def build(folder: Path, owner: str = "ACCOUNT") -> list[str]:
    """Write the folder anew; the names of its variants."""
    native = sorted((SOURCE / "kernels" / "cpu").glob("_native*.so"))
    shutil.rmtree(folder, ignore_errors=True)
    variants = {"torch-cuda": "cuda", "torch-cpu": "cpu"}
    if native and sys.platform == "linux":
        variants[f"torch-stable-abi{OLDEST_TORCH}-cpu-{platform.machine()}-linux"] = "cpu"
    for variant, backend in variants.items():
        compiled = native if "stable" in variant else []
        texts = {file.relative_to(SOURCE): file.read_text(encoding="utf-8") for file in sources()}
        texts[Path("__init__.py")] = INIT
        digest = hashlib.sha256(variant.encode())
        for data in (
            *(f"{name}\n{texts[name]}".encode() for name in sorted(texts)),
            *(one.read_bytes() for one in compiled),
        ):
            digest.update(data)
        own = f"_{NAME.replace('-', '_')}_{backend}_{digest.hexdigest()[:12]}"
        place = folder / "build" / variant
        for name, text in texts.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(NAMESPACE.sub(own, text), encoding="utf-8")
        for file in compiled:
            shutil.copy2(file, place / file.relative_to(SOURCE))
        shutil.copy2(ROOT / "LICENSE", place / "LICENSE")
        metadata = {"name": NAME, "id": own, "version": VERSION, "license": "Apache-2.0", "python-depends": []}
        metadata |= {"kernels-minver": OLDEST_KERNELS, "backend": {"type": backend}}
        (place / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(CARD.replace("ACCOUNT", owner), encoding="utf-8")
    return list(variants)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The kernels as a folder for the kernel hub.")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "hub" / NAME)
    parser.add_argument("--owner", default="ACCOUNT")
    options = parser.parse_args()
    print(f"{options.output}: {', '.join(build(options.output, options.owner))}")
