"""The folder for the kernel hub, as scripts/hub_kernel.py writes it: loaded as the package ``kernels`` does and by it."""

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import attemper
import zoo
from close import assert_float64
from judge import assert_as_exact
from scripts import hub_kernel

REPOSITORY = f"ACCOUNT/{hub_kernel.NAME}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("hub") / hub_kernel.NAME
    hub_kernel.build(place)
    return place


def variants(folder):
    return sorted(path for path in (folder / "build").iterdir())


def load(variant: Path):
    """As `kernels` 0.17 does."""
    name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_metadata(folder, word):
    (found,) = [path for path in variants(folder) if word in path.name]
    return json.loads((found / "metadata.json").read_text(encoding="utf-8"))


def test_variants_are_named_and_described(folder):
    names = {path.name for path in variants(folder)}
    assert {"torch-cuda", "torch-cpu"} <= names
    ids = set()
    for path in variants(folder):
        found = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
        assert found["name"] == hub_kernel.NAME
        assert found["backend"]["type"] == ("cuda" if "cuda" in path.name else "cpu")
        assert bool(list(path.rglob("*.so"))) == ("stable" in path.name)
        assert not [file for file in path.rglob("*.py") if "attemper::" in file.read_text(encoding="utf-8")]
        ids.add(found["id"])
    assert len(ids) == len(names)
    oldest = importlib.metadata.requires("attemper")
    assert any(one.startswith(f"torch>={hub_kernel.OLDEST_TORCH[0]}.{hub_kernel.OLDEST_TORCH[1:]}") for one in oldest)


@pytest.mark.filterwarnings("ignore:attemper. kernel 'cpu' is not built here")
def test_each_attends_alone_and_beside_the_others(folder, monkeypatch):
    q, k, v = (torch.randn(2, 9, 4, 8, dtype=torch.float64) for _ in range(3))
    expected = attemper.attention(*(one.transpose(1, 2) for one in (q, k, v)), causal=True)
    for name in [name for name in sys.modules if name.split(".")[0] == "attemper"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an error
    for path in variants(folder):
        kernel = load(path)
        q.requires_grad_(True)
        out = kernel.flash_attn_func(q, k, v, causal=True)
        assert_float64(out.transpose(1, 2).detach(), expected.output)
        assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()
        measured = kernel.attention(*(one.transpose(1, 2) for one in (q, k, v)), causal=True).vitals
        assert_float64(measured.entropy.detach(), expected.vitals.entropy)


@pytest.fixture
def kernels():
    """The package, which transformers looks for when it is first imported; the tests have a folder of this name."""
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the package kernels; make integrations has an environment with it")
    return importlib.import_module("kernels")


def test_the_card_runs_as_it_is(folder, kernels, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={folder}")
    (block,) = re.findall(r"^```python\n(.*?)^```", (folder / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, Any] = {name: torch.randn(2, 9, 4, 8, dtype=torch.float64) for name in "qkv"}
    expected = attemper.attention(*(one.transpose(1, 2) for one in names.values()), causal=True)
    exec(block, names)
    assert_float64(names["out"], expected.output)
    assert_float64(names["vitals"].entropy, expected.vitals.entropy)


def test_transformers_attends_by_it_with_two_dimensional_masks(folder, kernels, monkeypatch):
    loaded = kernels.get_local_kernel(folder)
    assert loaded.__name__ == load_metadata(folder, "stable" if list(folder.rglob("*.so")) else "torch-cpu")["id"]
    q, k, v = (torch.randn(2, 9, 4, 8, dtype=torch.float64) for _ in range(3))
    compiled = torch.compile(loaded.flash_attn_func, backend="aot_eager", fullgraph=True)
    assert_float64(compiled(q, k, v, causal=True), loaded.flash_attn_func(q, k, v, causal=True))
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={folder}")
    for name in ("llama", "mistral", "gemma2", "bert"):
        subject = zoo.make(name)
        exact, plain = zoo.in_float64(subject).run(), subject.run()
        subject.model.set_attn_implementation(REPOSITORY)
        assert subject.model.config._attn_implementation == REPOSITORY
        assert transformers.modeling_flash_attention_utils._flash_varlen_fn is loaded.flash_attn_varlen_func
        with torch.no_grad():
            found = subject.run()
        assert_as_exact("output", found[subject.keep], [plain[subject.keep]], exact[subject.keep])
