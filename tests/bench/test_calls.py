"""The table of short calls, bands and layouts: all that a row compares computes the same thing, and it prints."""

import io

import pytest
import torch
from rich.console import Console

from attemper_lab.bench import calls, render
from attemper_lab.bench.calls import SCENES, Scene
from close import assert_float64

TINY = (
    Scene("tokens", (1, 2, 5, 8), 5, causal=True),
    Scene("decode, grouped", (1, 1, 9, 8), 1, heads=4),
    Scene("turned", (1, 2, 9, 8), 1, transposed=True),
    Scene("top left", (1, 2, 40, 8), 6, causal=True),
    Scene("a window", (1, 2, 40, 8), 6, causal="lower_right", window=5),
    Scene("documents", (1, 2, 40, 8), 40, causal=True, documents=4),
)


@pytest.mark.parametrize("scene", TINY, ids=lambda scene: scene.name)
def test_ours_torch_and_the_visible_keys_give_one_output(scene):
    query, key, value = calls._inputs(scene, torch.float64)
    assert key.stride(-1) == (scene.keys[2] if scene.transposed else 1)
    expected = calls._torch(scene, (query, key, value))()
    if scene.documents:
        assert_float64(calls._one_by_one(scene, (query, key, value), "auto")(), expected)
    seen = scene.visible or slice(None)
    for inputs in ((query, key, value), (query, key[:, :, seen], value[:, :, seen])):
        for signs in ("all", ()):
            assert_float64(calls._ours(scene, inputs, "auto", signs)(), expected)


def test_only_the_bands_have_hidden_keys():
    assert [scene.visible for scene in TINY] == [None] * 3 + [slice(0, 6), slice(30, 40), None]
    assert len([scene for scene in SCENES if scene.visible is not None]) == 2


def test_a_row_and_its_line(monkeypatch):
    monkeypatch.setattr(calls, "SCENES", TINY[-1:])
    monkeypatch.setattr(calls, "BATCH", 0.0)
    (row,) = calls.rows(quick=True, kernel="auto", note=lambda line: None)
    for name in ("sdpa_over_torch", "signs_over_torch", "sdpa_over_sliced"):
        assert 0 < row[name]["low"] <= row[name]["median"] <= row[name]["high"]
    assert set(row["us"]) == {"attemper", "sdpa", "torch", "sliced"}
    longest = {**row, "name": max((scene.name for scene in SCENES), key=len)}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*render._calls([longest]))
    said = console.export_text()
    assert longest["name"] in said
    assert "…" not in said
