"""The memory probe: right on known allocations, able to see n × n, and what it says of our kernel."""

import json
import sys
from dataclasses import asdict

import pytest
import torch

import forked
from attemper.errors import InputError
from attemper_lab.bench import memory
from attemper_lab.bench.candidates import Case

MIB = memory.MIB

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


pytestmark = pytest.mark.xdist_group("memory")  # in one process: what is probed is probed once


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


PROBE = """
import json
from attemper_lab.bench import memory
from attemper_lab.bench.candidates import Case
order = json.loads(argv[1])
found = memory.probe(order["candidate"], Case(**{**order["case"], "shape": tuple(order["case"]["shape"])}))
open(argv[0], "w").write(json.dumps(found))
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """Probes of two candidates on two lengths, each in a process of its own; `peak` does the same with a slower start."""
    folder = tmp_path_factory.mktemp("probes")
    orders = [("eager_statistics", case(n)) for n in (2048, 4096)]
    orders += [("attemper", case(n, "forward_backward", "blockwise")) for n in (2048, 8192)]
    for number, (candidate, one) in enumerate(orders):  # one after the other: memory is short where tests run
        order = json.dumps({"candidate": candidate, "case": asdict(one)})
        forked.run(PROBE, [(folder / f"{number}.json", order)], folder)
    found = [json.loads((folder / f"{number}.json").read_text()) for number in range(len(orders))]
    return found[:2], found[2:]


@linux
def test_eager_holds_the_matrix_and_the_probe_sees_it(probed):
    small, large = probed[0]
    for found, n in ((small, 2048), (large, 4096)):
        assert n * n * 4 <= found["beyond"] < 2 * n * n * 4
        assert found["results"] == n * 64 * 4 + 6 * n * 4 + n * 4
    assert large["beyond"] / small["beyond"] > 2.5


@linux
def test_blockwise_is_linear_in_the_length_with_every_vital_and_an_entropy_in_the_loss(probed):
    small, large = probed[1]
    assert large["kernel"] == "blockwise"
    assert large["results"] == 4 * 8192 * 64 * 4 + 7 * 8192 * 4
    assert large["beyond"] < 32 * MIB  # one matrix would be 256 MiB
    assert large["beyond"] < 4 * small["beyond"]


@linux
def test_a_process_of_its_own_gives_what_the_probe_finds(probed):
    found = memory.peak("eager_statistics", case(2048))
    assert found.results == probed[0][0]["results"]
    assert abs(found.beyond - probed[0][0]["beyond"]) < 4 * MIB


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
