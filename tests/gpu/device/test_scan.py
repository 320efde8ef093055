"""scan() on a GPU: the scale that a layer really applies is found there too, and a wrong one is named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from gpu.device.plain import EACH, LENGTH, MODELS, ROOT, WIDTH, Layer, by_hand, made

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch finds as cuda")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_applied_scale(name, dtype):
    model, x = made(name, dtype, "cuda", dtype)
    found = attemper.scan(model, x)
    assert [layer["scale"]["rule"] for layer in found.layers] == ["sqrt_dk"] * 2
    # a number that the model itself holds in its dtype is that number, rounded
    assert [layer["scale"]["applied"] for layer in found.layers] == pytest.approx(
        [ROOT] * 2, rel=torch.finfo(dtype).eps
    )
    beside = attemper.scan(model.to("cpu"), x.to("cpu"))
    for one, two in zip(found.layers, beside.layers, strict=True):
        assert one["scale"]["verdict"] == two["scale"]["verdict"]
        assert one["scale"]["logit_std"] == pytest.approx(two["scale"]["logit_std"], rel=4 * torch.finfo(dtype).eps)


FAULTS = {
    "twice": (lambda q, k, v: F.scaled_dot_product_attention(q * ROOT, k, v), ROOT**2),
    "none": (lambda q, k, v: by_hand(q, k, v, scale=1.0), 1.0),
    "dk": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1 / EACH), 1 / EACH),
    "a tensor": (lambda q, k, v: by_hand(q, k, v, scale=torch.tensor(0.5, device=q.device)), 0.5),
}


@pytest.mark.parametrize(("meet", "applied"), FAULTS.values(), ids=FAULTS)
def test_another_scale_is_found(meet, applied):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(meet), Layer(meet)).cuda()
    x = torch.randn(2, LENGTH, WIDTH)
    found, beside = attemper.scan(model, x.cuda()), attemper.scan(model.to("cpu"), x)
    assert [layer["scale"]["applied"] for layer in found.layers] == pytest.approx([applied] * 2, rel=1e-5)
    assert [layer["scale"]["message"] for layer in found.layers] == [
        layer["scale"]["message"] for layer in beside.layers
    ]
    assert [finding["name"] for finding in found.findings] == [finding["name"] for finding in beside.findings]


def test_what_if_and_the_report(tmp_path):
    model, x = made("SDPA", torch.float32, "cuda", torch.float32)
    found = attemper.scan(model, x, what_if=["none", "x2"])
    found.write(tmp_path / "report.html")
    assert "sqrt_dk" in (tmp_path / "report.html").read_text()
    assert all(parameter.is_cuda for parameter in model.parameters())
