"""The tolerances that tests may use, each named by what it is the rounding of. Any other error is judged: see judge.py.

tests/surface/test_tolerances.py lists tolerances that are written anywhere else.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

# Float64 arithmetic in another order: 2**12 units in the last place, about 1e-12. Float32 anywhere on the way errs by far more.
ROUNDING = 2.0**12 * torch.finfo(torch.float64).eps


def in_float64(expected: Any, size: float = 1.0) -> Any:
    """What float64 arithmetic may find in the place of `expected`; `size` is that of the terms which may cancel."""
    return pytest.approx(expected, rel=ROUNDING, abs=ROUNDING * size, nan_ok=True)


def assert_float64(found: Any, expected: Any, name: str = "") -> None:
    """Float64 tensors (integers and None are equal), or tuples of them, that differ by the order of their arithmetic."""
    if isinstance(expected, tuple):
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            assert_float64(one, other, name)
        return
    if expected is None:
        assert found is None, name
        return
    assert found.dtype == expected.dtype, name
    if not found.is_floating_point():
        assert torch.equal(found, expected), name
        return
    assert found.dtype == torch.float64, f"{name}: {found.dtype}; judge() decides about float32"
    finite = expected[expected.isfinite()]
    size = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
    message = (lambda m: f"{name}: {m}") if name else None
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING * size, equal_nan=True, msg=message)


def in_float32(expected: Any, terms: int, size: float = 0.0, logit: float = 0.0) -> Any:
    """What a sum of so many terms may be where something on the way is float32, as transformers' tables of rotations are.

    The rounding of the largest `logit` goes through exp into weights and their gradients, as in rounding.py.
    """
    room = _levels_of_rounding(torch.float32, terms) * (1 + logit)
    return pytest.approx(expected, rel=room, abs=room * size, nan_ok=True)


def _levels_of_rounding(dtype: torch.dtype, terms: int) -> float:
    """A term rounds, and again at each level of summing; here and there."""
    return 2 * torch.finfo(dtype).eps * (1 + math.log2(terms))


def assert_reordered(found: Tensor, expected: Tensor, terms: int, name: str = "") -> None:
    """Sums of so many terms in another order, in the tensors' own dtype."""
    finite = expected[expected.isfinite()].abs()
    size = max(1.0, finite.max().item()) if finite.numel() else 1.0
    room = size * _levels_of_rounding(expected.dtype, terms)
    message = (lambda m: f"{name}: {m}") if name else None
    torch.testing.assert_close(found, expected, rtol=0, atol=room, equal_nan=True, msg=message)


def printed(expected: Any, decimals: int, bits: int | None = None) -> Any:
    """What a text with so many decimals may show for `expected`: half a unit of the last one away.

    Where weights were stored as integers of so many `bits`, half a unit of those as well.
    """
    stored = 0.5 / (2**bits - 1) if bits else 0.0
    return pytest.approx(expected, rel=0, abs=0.5 * 10.0**-decimals + stored + ROUNDING)
