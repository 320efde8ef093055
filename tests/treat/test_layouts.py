"""Layouts that no list names: found by themselves, and clipped exactly, as judged by the scores that each computes itself."""

import copy

import pytest
import torch

import attemper
from close import in_float64
from treat.clipping import middle
from treat.layouts import BY_LAYER, LENGTH, PER_HEAD, WIDTH, AllInteger

ROOTS = {"Tied", "TiedGain"}
KEYS = {"Bilinear", "KeysOfQueries", "WithInput"}


def clipped(kind):
    torch.manual_seed(1)
    model, x = kind().double().eval(), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():  # heads of different sizes
            if parameter.dim():
                parameter.mul_(3 + 3 * torch.rand(len(parameter)).view(-1, *[1] * (parameter.dim() - 1)))
        model(x)
    peaks, values, before = model.peaks, model.values, copy.deepcopy(model.state_dict())
    found = attemper.projections(model, x)["", "self"]
    with torch.no_grad(), attemper.watch(model) as watch:
        model(x)
    assert [row["peak"] for row in watch.record.to_dicts()] == [in_float64(one) for one in peaks.tolist()]
    tau = middle(peaks)
    clip = attemper.qk_clip(model, watch.record, tau)
    with torch.no_grad():
        model(x)
    assert torch.equal(model.values, values)
    return model, found, peaks, tau, clip, before


@pytest.mark.parametrize("kind", PER_HEAD)
def test_each_head_by_itself(kind):
    model, found, peaks, tau, clip, before = clipped(kind)
    above = peaks > tau
    assert found.how == "per head"
    assert model.peaks[above].tolist() == [in_float64(tau)] * int(above.sum())
    assert torch.equal(model.peaks[~above], peaks[~above])  # to the bit
    assert [one.head for one in clip] == above.nonzero().flatten().tolist()
    names = {part.parameter for part in found.parts}
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items() if name not in names)
    sides = {part.side for part in found.parts}
    assert sides == ({"both"} if kind.__name__ in ROOTS else {"k"} if kind.__name__ in KEYS else {"q", "k"})


@pytest.mark.parametrize("kind", BY_LAYER)
def test_the_layer_as_a_whole(kind):
    model, found, peaks, tau, clip, _ = clipped(kind)
    assert found.how == "by layer"
    assert model.peaks.tolist() == [in_float64(x) for x in (peaks * (tau / peaks.max())).tolist()]
    assert {one.how for one in clip} == {"by layer"}


def test_what_it_says_of_them():
    found = {kind.__name__: str(clipped(kind)[1]) for kind in PER_HEAD + BY_LAYER}
    assert found["Tied"].endswith(
        "q and k from q.weight (rows 0–3, …) and q.bias (rows 0–3, …); they take the square root of the factor"
    )
    assert found["Bilinear"].endswith("k from form (rows 0, …); q is left alone: keys take the whole factor")
    assert found["SigmaReparam"].endswith("one gain serves all heads, so that the layer is scaled as a whole")
    assert found["TwoDimensions"].endswith(
        "no dimension of its weights divides them by heads, so that the layer is scaled as a whole"
    )


def test_weights_that_are_all_integers_are_left_alone():
    model, found, peaks, _, clip, before = clipped(AllInteger)
    assert not clip.heads
    assert "from quantised weights" in str(clip)
    assert found.how is None
    assert torch.equal(model.peaks, peaks)
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())


def test_a_model_whose_layers_have_no_parameters_at_all():
    """As torch.ao.quantization leaves them: only an embedding is left to have gradients."""

    class Bare(AllInteger):
        def __init__(self):
            super().__init__()
            del self.v

        def v(self, x):
            return x

    model = torch.nn.Sequential(torch.nn.Embedding(8, WIDTH), Bare(), Bare())
    found = attemper.projections(model, torch.randint(8, (2, LENGTH)))
    first, second = map(str, found.values())
    assert "weights that heads share, or that q shares with k or v" in first  # the embedding
    assert "from quantised weights" in second


@pytest.mark.parametrize("kind", [one for one in PER_HEAD if one.__name__ in ROOTS | KEYS])
def test_a_stack_of_them(kind):
    """Layers that are built alike are confirmed, not searched; what is found is the same."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(kind(), kind(), kind()).double()
    found = attemper.projections(model, torch.randn(2, LENGTH, WIDTH, dtype=torch.float64))
    assert len({str(layer) for layer in found.values()}) == 1
    assert [{part.parameter[0] for part in layer.parts} for layer in found.values()] == [{"0"}, {"1"}, {"2"}]


@pytest.mark.parametrize("kind", [one for one in PER_HEAD if one.__name__ in ROOTS | KEYS])
def test_other_treatments_refuse_what_has_no_q_of_its_own(kind):
    torch.manual_seed(2)
    model, x = kind(), torch.randn(2, LENGTH, WIDTH)
    for treat in (attemper.add_qk_norm, attemper.add_temperature):
        with pytest.raises(attemper.errors.InputError, match=rf"^{treat.__name__}\(\): "):
            treat(model, x)
    attemper.projections(model, x)
    with pytest.raises(attemper.errors.InputError, match="no layer has rows of its own for both q and k"):
        attemper.scale_rates(torch.optim.SGD(model.parameters(), lr=0.1), model)
