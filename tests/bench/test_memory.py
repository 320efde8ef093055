"""The memory probe: right on known allocations, able to see n × n, and what it says of our kernel."""

import sys

import pytest
import torch

from attemper.bench import memory
from attemper.bench.candidates import Case
from attemper.errors import InputError

MIB = memory.MIB

linux = pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark can only be reset on Linux")


def case(length: int, direction: str = "forward", kernel: str = "auto") -> Case:
    return Case((1, 1, length, 64), True, direction, kernel=kernel)


@linux
def test_known_allocations_are_found_to_a_few_mib(monkeypatch):
    def run():
        scratch = torch.ones(64 * MIB // 4)
        kept = torch.ones(32 * MIB // 4)
        del scratch
        return kept, torch.ones(1).expand(MIB)  # the second looks large and is not

    monkeypatch.setattr(memory, "call", lambda candidate, tensors: run)
    for _ in range(2):
        found = memory.probe("sdpa", case(64))
        assert found["results"] == 32 * MIB + 4
        assert abs(found["beyond"] - 64 * MIB) < 4 * MIB


@linux
def test_eager_holds_the_matrix_and_the_probe_sees_it():
    small, large = (memory.peak("eager_statistics", case(n)) for n in (2048, 4096))
    for found, n in ((small, 2048), (large, 4096)):
        assert n * n * 4 <= found.beyond < 2 * n * n * 4
        assert found.results == n * 64 * 4 + 6 * n * 4 + n * 4
    assert large.beyond / small.beyond > 2.5


@linux
def test_blockwise_is_linear_in_the_length_with_every_vital_and_an_entropy_in_the_loss():
    small, large = (memory.peak("attemper", case(n, "forward_backward", "blockwise")) for n in (2048, 8192))
    assert large.kernel == "blockwise"
    assert large.results == 4 * 8192 * 64 * 4 + 7 * 8192 * 4
    assert large.beyond < 32 * MIB  # one matrix would be 256 MiB
    assert large.beyond < 4 * small.beyond


@linux
@pytest.mark.exhaustive
def test_blockwise_at_32768_stays_under_128_mib_and_grows_no_faster_than_the_length():
    found = [memory.peak("attemper", case(n, "forward_backward", "blockwise")).beyond for n in (16384, 32768, 65536)]
    assert found[1] < 128 * MIB
    assert found[1] < 2.2 * found[0]
    assert found[2] < 2.2 * found[1]


def test_a_probe_that_fails_says_why():
    with pytest.raises(InputError, match=r"attemper, all vitals on \(1, 1, 64, 64\).*unknown kernel 'blokwise'"):
        memory.peak("attemper", case(64, kernel="blokwise"))


def test_a_probe_that_takes_too_long_is_ended():
    with pytest.raises(InputError, match=r"took more than 0 s\. Use smaller --length"):
        memory.peak("sdpa", case(64), timeout=0.01)
