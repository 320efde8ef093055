"""Outputs, signs and gradients of every public function on the pairwise grid, judged by a definition of our own in float64."""

import random

import pytest

from public.calls import GRID, LONG, cover
from public.judged import judge
from serving import SEED

PAIRS = cover(GRID, 0)
SAMPLE = random.Random(SEED).sample(PAIRS, 90)
EVERY = [*PAIRS, *(call for seed in range(1, 4) for call in cover(GRID | LONG, seed))]


@pytest.mark.parametrize("call", SAMPLE, ids=str)
def test_every_value_and_gradient(call):
    judge(call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(32))
def test_every_value_and_gradient_of_the_whole_grid(part):
    for call in EVERY[part::32]:
        try:
            judge(call)
        except Exception as error:
            error.add_note(str(call))
            raise
