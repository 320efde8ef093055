"""additive_attention() and cosine_attention() equal their definitions: outputs, vitals, gradients, on awkward calls."""

import pytest

from attemper.kernels.blockwise import additive as blocks
from attemper.kernels.blockwise import plan as tiles
from attemper.scores import cosine
from scores.scorejudge import Case, judge

CASES = [
    Case("additive", "f32", (111, 33), dim=60),
    Case("additive", "f32", (33, 111), (4, 2), mask="additive", causal="lower_right"),
    Case("additive", "f32", (47, 47), (3, 1), mask="bool", causal=True, per_head=False),
    Case("additive", "f32", (47, 47), window=5, size=3.0, mask="bias_row"),
    Case("additive", "f32", (1, 111), causal="lower_right", dim=60),
    Case("additive", "f32", (33, 1)),
    Case("additive", "f32", (1, 1), dim=1),
    Case("additive", "f32", (33, 33), (4, 2), size=30.0, causal=True),  # |logit| in the hundreds
    Case("additive", "f64", (33, 29), (4, 2), mask="additive", per_head=False),
    Case("additive", "f16", (33, 33), (4, 1), mask="additive", window=7),
    Case("additive", "bf16", (33, 47), (2, 1), mask="bool", dim=60),
    Case("additive", "bf16", (47, 47), (4, 2), mask="additive", causal=True),
    Case("cosine", "f32", (111, 33), dim=60, size=10.0),
    Case("cosine", "f32", (33, 111), (4, 2), mask="additive", causal="lower_right"),
    Case("cosine", "f32", (47, 47), (3, 1), mask="bool", causal=True, size=30.0, per_head=False),
    Case("cosine", "f32", (47, 47), window=5, mask="bias_row"),
    Case("cosine", "f32", (33, 1)),
    Case("cosine", "f64", (33, 29), (4, 2), mask="additive"),
    Case("cosine", "f16", (33, 33), (4, 1), size=20.0, mask="additive"),
    Case("cosine", "bf16", (33, 47), (2, 1), size=20.0, mask="bool", dim=60),
]


@pytest.fixture(params=["whole", "cut"])
def cut(request, monkeypatch):
    """Whole, these calls fit one tile and one cell; cut, each takes several, and the last is partly filled."""
    if request.param == "cut":
        for machine in ("CPU", "GPU"):
            monkeypatch.setattr(tiles, f"{machine}_TILE", (1 << 9, 16))
            monkeypatch.setattr(blocks, f"{machine}_CELL", (700, 5))


@pytest.mark.usefixtures("poisoned", "cut")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition(case, device):
    judge(case, device)


@pytest.mark.parametrize("case", [Case("additive"), Case("cosine")], ids=str)
def test_the_judge_can_fail(case, monkeypatch):
    """A score that is off by one part in a thousand is caught."""
    if case.score == "additive":
        scores = blocks.AdditiveBlock.scores
        monkeypatch.setattr(blocks.AdditiveBlock, "scores", lambda *args: scores(*args).mul_(1.001))
    else:
        direction = cosine.direction
        monkeypatch.setattr(cosine, "direction", lambda vectors: direction(vectors) * 1.001)
    with pytest.raises(AssertionError, match="exceeds"):
        judge(case)
