"""bench cuda without a GPU: which candidates may be left out."""

import pytest

from attemper_lab.bench import cuda


def refused():
    raise RuntimeError("No available kernel.\nMore about it.")


@pytest.mark.parametrize("name", ["sdpa", "attemper", "measure", "read", "lse, sum_p2"])
def test_a_candidate_that_must_run_is_not_left_out(name):
    with pytest.raises(RuntimeError, match="No available kernel"):
        cuda._interleave({"sdpa": lambda: None, name: refused}, 1, print)


@pytest.mark.parametrize("name", cuda.OPTIONAL)
def test_a_candidate_that_the_card_refuses_is_noted(name):
    notes = []
    with pytest.raises(RuntimeError):  # of `measure`, which comes after it
        cuda._interleave({"sdpa": lambda: None, name: refused, "measure": refused}, 1, notes.append)
    assert notes == [f"  {name} is left out: No available kernel."]
