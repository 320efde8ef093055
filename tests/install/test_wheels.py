"""What wheels are made of: the platforms that cibuildwheel builds, and the variants that the kernel has on each."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from attemper.kernels.contract import Results

ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "src" / "attemper" / "kernels" / "cpu" / "c"
DISPATCH = (KERNEL / "native.c").read_text(encoding="utf-8")


def test_one_wheel_serves_every_python_and_each_is_tested_on_its_kernel():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    table, oldest = pyproject["tool"]["cibuildwheel"], pyproject["project"]["requires-python"].removeprefix(">=")
    tag = "cp" + oldest.replace(".", "")
    assert table["build"][0] == f"{tag}-*"
    assert f'"py_limited_api": "{tag}"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert {system: table[system]["archs"] for system in ("linux", "macos", "windows")} == {
        "linux": ["auto64"],  # each machine its own, so that none builds for the other under an emulator
        "macos": ["arm64"],
        "windows": ["AMD64"],
    }
    runners = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text(encoding="utf-8"))
    assert runners["jobs"]["wheel"]["strategy"]["matrix"]["os"] == [
        *("ubuntu-24.04", "ubuntu-24.04-arm", "macos-15", "windows-2025"),
    ]
    for tested, kernel in ((table, "cpu"), (table["windows"], "blockwise")):
        script, wanted = tested["test-command"].removeprefix("python {project}/").split()
        assert (ROOT / script).is_file()
        assert wanted == kernel


@pytest.mark.parametrize("names", re.findall(r"attemper_variants\[\] = \{(.*), NULL\};", DISPATCH))
def test_every_variant_that_is_listed_has_its_files(names):
    """amx computes float64 as avx512 does."""
    for name in re.findall(r'"(\w+)"', names):
        for precision in ("f32",) if name == "amx" else ("f32", "f64"):
            source = (KERNEL / "variants" / f"{name}_{precision}.c").read_text(encoding="utf-8")
            assert f"#define KERNEL attemper_{name}_{precision}\n" in source
            assert name == "portable" or re.search(r"^#if (defined\(__\w+__\)|HAS_AMX)$", source, flags=re.MULTILINE)
            assert f"&attemper_{name}_{precision}" in DISPATCH


def test_every_variant_is_listed():
    listed = set(re.findall(r'"(\w+)"', " ".join(re.findall(r"attemper_variants\[\] = \{(.*), NULL\};", DISPATCH))))
    assert listed == {path.stem.rpartition("_")[0] for path in (KERNEL / "variants").glob("*.c")}


def test_the_emulator_is_sent_calls_as_the_kernel_reads_them(monkeypatch):
    """`make neon` writes a call from Python: its fields are those of call.h, in their order."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    neon = importlib.import_module("neon")
    header = re.sub(r"//.*", "", (KERNEL / "call.h").read_text(encoding="utf-8"))
    for name, fields in (("Rows", neon.Rows._fields_), ("Call", neon.Call._fields_)):
        body = re.search(rf"typedef struct \{{([^}}]*)\}} {name};", header)[1]
        declared = re.findall(r"\*?(\w+)(?:\[\d\])?\s*[,;]", body)
        assert [field[0] for field in fields] == declared
    assert set(neon.SIGNS) <= set(Results._fields)
