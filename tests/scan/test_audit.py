"""The scale audit: every fault is named, every innocent model passes, and the scale applied is the one computed independently."""

import pytest
import torch

import attemper
import zoo
from attemper.scan.audit.audit import Audit
from attemper.scan.audit.judge import REMARKS
from close import in_float32, in_float64
from scan import faults, innocents


def audited(model, run, **context):
    audit = Audit()
    watch = attemper.watch(model, examiners=[audit])
    with torch.no_grad(), watch:
        run()
    layers = audit.layers()
    assert [(layer.layer, layer.kind) for layer in layers] == list(watch.record.info)
    return layers


def made(case):
    torch.manual_seed(0)
    case = case()
    case.model.eval()
    return case


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", faults.FAULTY)
def test_every_fault_is_named(name):
    case = made(faults.FAULTY[name])
    layers = audited(case.model, case.run)
    found = [layer.fault for layer in layers]
    assert found == [None] * case.innocent + [case.fault] * (len(layers) - case.innocent)
    assert len(found) > case.innocent
    for layer in layers:
        if case.applied is not None:
            assert layer.applied == in_float64(case.applied)
        assert layer.verdict == ("ok" if layer.fault in (None, *REMARKS) else "fault")
        assert layer.message.endswith(".")
        assert bool(layer.advice) == bool(layer.fault)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", innocents.INNOCENT)
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_every_innocent_model_passes(name):
    if "upcast" in name:  # it demands float32
        torch.set_default_dtype(torch.float32)
    case = made(innocents.INNOCENT[name])
    for index, layer in enumerate(audited(case.model, case.run)):
        assert layer.fault == case.remark, layer.message
        expected = case.applied(index) if callable(case.applied) else case.applied
        assert layer.applied == in_float32(expected, terms=layer.head_dim)
        assert layer.rule == (case.rule(index) if callable(case.rule) else case.rule)


def declared_by_paper(name, layer):
    """The scale of each model of the zoo, from its paper or its config, by hand."""
    special = {"t5": 1.0, "gpt_neo": 1.0, "gemma2": 256**-0.5, "gemma3": 1.0, "deberta": (3 * layer.head_dim) ** -0.5}
    return special.get(name, layer.head_dim**-0.5)


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_zoo_has_no_fault(name):
    if (
        name == "mistral"
    ):  # its rows of padding see nothing but float64's lowest number, and its softmax is float32: NaN
        torch.set_default_dtype(torch.float32)
    subject = zoo.make(name)
    rules = {"t5": "none", "gpt_neo": "none", "gemma2": None, "gemma3": "qk_norm", "deberta": None}
    matrices = iter(subject.full(subject))
    for layer in audited(subject.model, subject.run):
        assert layer.fault is None, layer.message
        assert layer.applied == in_float32(declared_by_paper(name, layer), terms=layer.head_dim)
        assert layer.rule == rules.get(name, "sqrt_dk")
        assert layer.qk_norm == (name == "gemma3")
        assert layer.logit_std == in_float32(spread(next(matrices), subject), terms=layer.head_dim)
        assert 0.5 < layer.predicted_std / layer.logit_std < 2 or name == "gemma2"  # q and k are random; Gemma 2 caps


def spread(logits, subject):
    """√mean variance over the real rows that have a choice, by definition."""
    z = logits.double()
    seen = z > -1e4
    count = seen.sum(-1)
    mean = z.where(seen, 0).sum(-1, keepdim=True) / count.clamp(min=1).unsqueeze(-1)
    variance = (z - mean).where(seen, 0).square().sum(-1) / count.clamp(min=1)
    keep = {zoo.LENGTH: subject.keep, zoo.TARGETS: subject.targets}.get(z.shape[2])
    keep = torch.ones(z.shape[0], z.shape[2], dtype=torch.bool) if keep is None else keep
    return variance[(count > 1) & keep[:, None, :].expand_as(count)].mean().sqrt().item()
