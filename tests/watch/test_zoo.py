"""Every model of the zoo: outputs bit for bit its own, and vitals those of its full matrices, layer by layer, head by head."""

import pytest
import torch

import attemper
import zoo

HIDDEN = -1e4


def by_definition(logits, keep):
    """Every sign of a full matrix (B, H, Lq, Lk) in float64, folded over the real rows of each head."""
    z = logits.double()
    seen = z > HIDDEN
    count = seen.sum(-1)
    weights = z.softmax(-1)
    mean = z.where(seen, 0).sum(-1) / count
    lse = z.logsumexp(-1)
    entropy = torch.special.entr(weights).sum(-1)
    sum_p2 = weights.square().sum(-1)
    top = weights.amax(-1)
    rows = {
        "visible": count.double(),
        "mean": mean,
        "variance": (z - mean.unsqueeze(-1)).where(seen, 0).square().sum(-1) / count,
        "lse": lse,
        "entropy": entropy,
        "sum_p2": sum_p2,
        "top_weight": top,
        "effective_keys": entropy.exp(),
        "jacobian_trace": 1 - sum_p2,
    }
    counted = (count > 0) & keep[:, None, :]
    folded = {name: (row * counted).nan_to_num(0).sum((0, 2)) / counted.sum((0, 2)) for name, row in rows.items()}
    several = counted & (count > 1)
    evenness = (entropy / count.clamp(min=2).log()).where(several, 0)
    folded["evenness"] = evenness.sum((0, 2)) / several.sum((0, 2))
    long = counted & (count >= 8)
    folded["saturated"] = (long & (top > 0.99)).sum((0, 2)) / long.sum((0, 2))
    folded["peak"] = z.amax(-1).masked_fill(~counted, -torch.inf).amax((0, 2))
    folded["rows"] = counted.sum((0, 2)).double()
    return folded


def assert_same_vitals(record, matrices, subject):
    entries = record.entries
    assert len(entries) == len(matrices)
    for entry, logits in zip(entries, matrices, strict=True):
        lengths = {zoo.LENGTH: subject.keep, zoo.TARGETS: subject.targets}
        keep = lengths.get(logits.shape[2])
        keep = torch.ones(logits.shape[0], logits.shape[2], dtype=torch.bool) if keep is None else keep
        expected = by_definition(logits, keep)
        assert set(expected) == set(entry.summary.signs)
        largest = logits[logits > HIDDEN].abs().max().item()
        for name, value in expected.items():
            found = getattr(entry.summary, name)
            assert found.shape == value.shape == (zoo.HEADS,)
            # float32 logits carry an error of their size times eps; the signs amplify it by their own size
            limit = 32 * torch.finfo(torch.float32).eps * (1 + largest) * (1 + value.nan_to_num(0).abs())
            error = (found - value).abs()
            assert ((error <= limit) | (found.isnan() & value.isnan())).all(), f"{entry.layer} {entry.kind} {name}"


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("name", zoo.ZOO)
def test_outputs_are_its_own_and_vitals_those_of_the_full_matrix(name):
    subject = zoo.make(name)
    with torch.no_grad():
        matrices = subject.full(subject)
        expected = subject.run()
        with attemper.watch(subject.model) as watch:
            output = subject.run()
    assert torch.equal(output, expected)
    assert set(watch.record.layers) <= {layer for layer, _ in subject.model.named_modules()}
    assert watch.record.notes == []
    assert_same_vitals(watch.record, matrices, subject)
