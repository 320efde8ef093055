"""The interface for examiners: what they are given and when, and that nothing outside of watch/ uses more of it."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import InputError
from attemper.watch.examine import AttentionCall, examine
from watched import stack

ROOT = Path(attemper.__file__).parent


class Looks:
    def __init__(self, traces=False):
        self.traces, self.looked, self.kept = traces, [], []

    def look(self, call, vitals, rows):
        assert isinstance(call, AttentionCall)
        assert not torch.is_grad_enabled()
        self.looked.append((tuple(call.query.shape), call.traced is not None))
        return len(self.looked)

    def keep(self, name, call, found):
        self.kept.append((name, call.info.kind, found))


@pytest.mark.parametrize("traces", [False, True])
def test_each_call_is_looked_at_and_then_kept_with_its_name(traces):
    model, first, second = stack(), Looks(traces), Looks()
    with attemper.watch(model, examiners=(first, second)) as watch:
        model(torch.randn(1, 5, 16))
    assert first.looked == second.looked == [((1, 2, 5, 8), traces)] * 2
    assert first.kept == second.kept == [("0", "self", 1), ("1", "self", 2)]
    assert watch.record.layers == ["0", "1"]


def test_a_list_may_change_between_two_passes_and_errors_name_the_caller():
    model, one, examiners = stack(), Looks(), []
    with examine(model, examiners):
        model(torch.randn(1, 5, 16))
        examiners.append(one)
        model(torch.randn(1, 5, 16))
    assert len(one.kept) == 2
    with (
        pytest.raises(InputError, match=r"^scan\(\): found no attention call"),
        examine(nn.Linear(4, 4), [], caller="scan") as w,
    ):
        w.model(torch.randn(1, 4))


def test_other_parts_use_the_interface_alone():
    found = []
    for path in ROOT.rglob("*.py"):
        if "watch" not in path.relative_to(ROOT).parts:
            inner = re.findall(
                r"^\s*from \.+watch\.(?!examine\b)\S+ import .*", path.read_text(encoding="utf-8"), re.MULTILINE
            )
            found += [f"{path.relative_to(ROOT)}: {line.strip()}" for line in inner]
    assert found == []
