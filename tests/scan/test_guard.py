"""An error in attemper's own code, or a layer that what-if cannot alter, loses a part of a scan, never the whole."""

import math

import pytest
import torch
from torch import nn

import attemper
from attemper.scan.audit.audit import Audit
from attemper.scan.examiners.sinks import Sinks
from close import in_float32
from watched import Block


class Fast(nn.Module):
    """Calls torch's fast path by hand, which takes no scale."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        inner = self.inner
        weights = (inner.in_proj_weight, inner.in_proj_bias, inner.out_proj.weight, inner.out_proj.bias)
        return torch._native_multi_head_attention(x, x, x, 16, 2, *weights)[0]


def test_a_layer_that_what_if_cannot_alter_keeps_its_scale():
    model, x = nn.Sequential(Block(), Fast()).eval(), torch.randn(1, 12, 16)
    plain, scan = attemper.scan(model, x), attemper.scan(model, x, what_if="none")
    assert scan.layers == plain.layers
    assert any(note.startswith("what if: 1 keeps its scale, because 'fused'") for note in scan.notes)
    (other,) = scan.document["what_if"]
    ratio = [now["variance"] / row["variance"] for row, now in zip(plain.heads, other["heads"], strict=True)]
    assert ratio[:2] == in_float32([8.0, 8.0], 12)


class LearnedScale(Block):
    """Learns a scale per head."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(self.heads))

    def forward(self, x):
        q, k, v = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + attemper.attention(q, k, v, scale=self.gain.view(1, -1, 1, 1)).output.transpose(1, 2).flatten(2)


def test_examiners_look_at_learned_scales():
    model = LearnedScale().eval()
    with torch.no_grad():
        model.gain.copy_(torch.tensor([0.0, 2.0]))
    scan = attemper.scan(model, torch.randn(1, 12, 16))
    assert not any("found nothing" in note for note in scan.notes)
    assert scan.heads[0]["neighbour_weight"] == in_float32(1 / 12, 12)


@pytest.mark.parametrize(("cls", "name", "part"), [(Audit, "layers", "the audit"), (Sinks, "table", "Sinks")])
def test_a_part_that_fails_is_missing(cls, name, part, monkeypatch):
    def fails(self):
        raise ZeroDivisionError("planted")

    monkeypatch.setenv("ATTEMPER_STRICT", "0")
    monkeypatch.setattr(cls, name, fails)
    scan = attemper.scan(nn.Sequential(Block(), Block()).eval(), torch.randn(1, 12, 16))
    assert scan.notes[0].startswith(part)
    assert "ZeroDivisionError" in scan.notes[0]
    assert all(math.isfinite(row["entropy"]) for row in scan.heads)
