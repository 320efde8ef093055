"""What a what-if refuses, what it sums up, and that nothing of it is left behind, however it ends."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import attemper
import zoo
from attemper.errors import InputError
from attemper.scan.document import plain
from attemper.scan.what_if import check_rules, layer_numbers, summed_up, what_if
from attemper.watch.attach.running import running
from close import in_float32, in_float64
from watched import Block, stack

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")
X = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0))


def twice(model):
    return lambda: model(X)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("qk_norm", "not a single number"),
        ("log_n", "grows with the keys"),
        ("learned", "it starts at 'sqrt_dk'"),
        ("softcap", "after the scale"),
        ("sqrt_dmodl", "Did you mean 'sqrt_dmodel'?"),
        ("-1", "got '-1'"),
        ("nan", "got 'nan'"),
        ("x0", "got 'x0'"),
        ("inf", "got 'inf'"),
    ],
)
def test_a_rule_that_cannot_be_put_in_its_place(rule, words):
    ran = []
    with pytest.raises(InputError, match="scan: --what-if") as caught:
        what_if(stack(), lambda: ran.append(1), ["none", rule])
    assert words in str(caught.value)
    assert not ran  # said before anything runs
    with pytest.raises(InputError) as again:
        check_rules(["none", rule])
    assert str(again.value) == str(caught.value)


def test_factors_and_scales():
    model = stack()
    half, same, factor = what_if(model, twice(model), ["0.5", repr(8**-0.5), "x1"])
    assert same.heads == factor.heads != half.heads
    assert half.heads[0]["variance"] == in_float32(same.heads[0]["variance"] * 0.5**2 * 8, terms=8)


def test_the_sums_of_the_heads():
    model = stack()
    (found,) = what_if(model, twice(model), ["x400"])
    assert len(found.heads) == 4
    assert found.saturated_heads == sum(row["saturated"] > 0.5 for row in found.heads) > 0
    assert found.peak == max(row["peak"] for row in found.heads)
    assert found.logit_std == in_float32(math.sqrt(sum(row["variance"] for row in found.heads) / 4), terms=8)
    assert found.effective_keys == in_float32(sum(row["effective_keys"] for row in found.heads) / 4, terms=8)
    assert summed_up("x400", plain(found)["heads"]) == found


def test_rows_too_short_to_saturate_are_no_head_that_does():
    row = dict.fromkeys(("layer", "kind", "head", "rows", "mean", "entropy", "sum_p2", "top_weight", "evenness"))
    row |= {"jacobian_trace": 0.1, "effective_keys": 2.0, "variance": 4.0, "peak": 3.0, "saturated": math.nan}
    found = summed_up("none", [row, {**row, "saturated": None, "peak": None, "variance": None}])
    assert (found.saturated_heads, found.peak, found.logit_std) == (0, 3.0, 2.0)


def test_layers_are_numbered_in_their_stack():
    names = [
        "enc.block.0.layer.0.self",
        "enc.block.1.layer.0.self",
        "dec.block.0.layer.0.self",
        "dec.block.0.layer.1.cross",
    ]
    assert layer_numbers([*names, names[1]]) == dict(zip(names, (0, 1, 0, 0), strict=True))


class Stateful(nn.Module):
    """Takes another way every second time it is called."""

    def __init__(self, *ways):
        super().__init__()
        self.ways, self.calls, self.packed = ways, 0, nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.packed(x).chunk(3, -1)
        self.calls += 1
        return self.ways[(self.calls - 1) % 2](q, k, v)


def by_hand(q, k, v):
    return (q @ k.mT / 4).softmax(-1) @ v


OTHER_WAYS = {
    "a product before it": lambda q, k, v: by_hand(q @ (k.mT @ k), k, v),
    "another op": lambda q, k, v: F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]),
    "other shapes": lambda q, k, v: by_hand(q[:, :5], k, v),
    "once more": lambda q, k, v: by_hand(q, k, v) + by_hand(k, q, v),
    "another scale": lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v,
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_another_way_the_second_time_is_an_error(way):
    model = Stateful(by_hand, OTHER_WAYS[way])
    with pytest.raises(InputError, match="took another path"):
        what_if(model, twice(model), ["none"])


def test_less_attention_the_second_time_is_an_error():
    model = Stateful(OTHER_WAYS["once more"], by_hand)
    with pytest.raises(InputError, match="took another path"):
        what_if(model, twice(model), ["none"])


def test_a_scale_that_is_not_known():
    model = Stateful(*[lambda q, k, v: ((q / 2) @ k.mT / 2).softmax(-1) @ v] * 2)
    with pytest.raises(InputError, match=r"is not known.*x2"):
        what_if(model, twice(model), ["none"])
    known = what_if(model, twice(model), ["none"], {("", "self"): 0.25})
    (factor,) = what_if(model, twice(model), ["x4"])
    assert known[0].heads == factor.heads


def test_the_applied_scale_stands_above_the_argument():
    """The query was scaled already: without the audit's word the scale would be replaced once, not in all."""
    model = Stateful(*[lambda q, k, v: F.scaled_dot_product_attention(*(t[:, None] for t in (q / 4, k, v)))] * 2)
    (found,) = what_if(model, twice(model), ["sqrt_dk"], {("", "self"): 1 / 16})
    (expected,) = what_if(model, twice(model), ["x4"])
    assert found.heads == expected.heads


@pytest.fixture
def foreign():
    """An attention function whose ops nobody sees, as a flash attention from outside torch."""

    def forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        with torch.utils._python_dispatch._disable_current_modes():
            output = attemper.attention(query, key, value, causal=True, scale=scaling).output
        return output.transpose(1, 2), None

    tables = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    for table, entry in zip(tables, (forward, lambda *args, **kwargs: None), strict=True):
        table.register("foreign", entry)
    yield "foreign"
    for table in tables:
        del table._global_mapping["foreign"]


def test_kernels_that_show_no_op(foreign):
    subject = zoo.make("llama")
    subject.model.set_attn_implementation(foreign)
    with pytest.raises(InputError, match=r"'layers.0.self_attn' cannot .* 'foreign' .*attn_implementation='sdpa'"):
        what_if(subject.model, subject.run, ["none"])


def test_a_fast_path_called_by_hand_takes_no_scale():
    inner = nn.MultiheadAttention(16, 2, batch_first=True).eval()

    class Fast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            weights = (inner.in_proj_weight, inner.in_proj_bias, inner.out_proj.weight, inner.out_proj.bias)
            return torch._native_multi_head_attention(x, x, x, 16, 2, *weights)[0]

    model = Fast()
    with pytest.raises(InputError, match="cannot be replaced while it runs, because 'fused'"):
        what_if(model, twice(model), ["none"])


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_a_product_of_nested_tensors_beside_it():
    class Packed(nn.Module):
        def forward(self, x):
            packed = torch.nested.nested_tensor([x[0], x[0, :3]])
            return x + torch.matmul(packed, packed.transpose(1, 2)).to_padded_tensor(0.0).sum()

    model = nn.Sequential(Block(), Packed())
    (found,) = what_if(model, twice(model), ["x2"])
    assert len(found.heads) == 2


def test_attention_that_cannot_be_measured():
    class Hidden(nn.Module):
        def forward(self, x):
            return flex_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    model = nn.Sequential(Block(), Hidden())
    notes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = what_if(model, twice(model), ["none"], note=notes.append)
    assert len(found.heads) == 2
    assert "keeps its scale, because it could not be measured: 1: " in notes[0]


def test_not_inside_a_forward():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = stack()

        def forward(self, x):
            what_if(self.inner, lambda: self.inner(x), ["none"])
            return self.inner(x)

    model = Inside()
    with pytest.raises(InputError, match="inside a model's forward"), attemper.watch(model):
        model(X)


def test_an_open_watch_hears_it_and_goes_on():
    model = stack()
    with torch.no_grad(), attemper.watch(model) as watch:
        model(X)
        watch.step()
        (found,) = what_if(model, twice(model), ["x4"])
        watch.step()
        model(X)
    first, between, last = (watch.record.filter(steps=[step]).to_dicts() for step in range(3))
    assert [{**row, "step": 0} for row in last] == first
    assert between[0]["rows"] == 2 * first[0]["rows"]
    assert between[0]["variance"] == in_float32((first[0]["variance"] + found.heads[0]["variance"]) / 2, terms=8)


def test_another_model_in_the_run_stays_as_it_is():
    model, other = stack(), stack()
    outputs = []
    with torch.no_grad(), attemper.watch(other):
        expected = other(X)
        what_if(model, lambda: (model(X), outputs.append(other(X))), ["x4"])
    assert all(torch.equal(output, expected) for output in outputs)
    assert len(outputs) == 2


def test_several_passes_in_one_run():
    model = stack()
    (one,) = what_if(model, twice(model), ["x4"])
    (two,) = what_if(model, lambda: [model(X), model(X)], ["x4"])
    assert [{**row, "rows": 2 * row["rows"]} for row in one.heads] == [
        {**row, **{name: in_float64(row[name]) for name in ("mean", "variance")}} for row in two.heads
    ]


def test_dropout_draws_the_same_and_the_callers_numbers_go_on():
    class Dropping(Block):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5)

    model, outputs = Dropping(), []
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    what_if(model, lambda: outputs.append(model(X)), ["x1", "x2"])
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2])
def test_whatever_ends_it_all_is_as_before(at, error, fast):
    model, calls = stack(), []
    torch.backends.mha.set_fastpath_enabled(fast)

    class Breaking(nn.Module):
        def forward(self, x):
            calls.append(1)
            if len(calls) == at:
                raise error("stop")
            return x

    model.append(Breaking())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with torch.enable_grad(), pytest.raises(error, match="stop"):
            what_if(model, twice(model), ["none"])
        assert torch.is_grad_enabled()
        assert torch.backends.mha.get_fastpath_enabled() == fast
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert running.mode is None
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_progress_is_told_each_rule_before_its_run():
    model, told = stack(), []
    what_if(model, lambda: told.append("run") or model(X), ["none", "dk"], progress=told.append)
    assert told == ["run", "none", "run", "dk", "run"]


def test_a_scan_runs_the_model_once_for_each_rule_and_once_as_it_is():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.5)
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    x, rules = torch.randn(1, 9, 16), ["none", "x2", "0.5"]
    found = attemper.scan(model, x, what_if=rules, pictures=False).document["what_if"]
    assert len(passes) == 1 + 1 + len(rules)  # the scan itself, then once as it is and once for each rule
    applied = {("self_attn", "self"): 8**-0.5}
    alone = [plain(what_if(model.eval(), lambda: model(x), [rule], applied)[0]) for rule in rules]
    assert found == alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model = stack()
    (expected,) = what_if(model, twice(model), ["x3"])
    model.to(dtype)
    (found,) = what_if(model, lambda: model(X.to(dtype)), ["x3"])
    for row, wanted in zip(found.heads, expected.heads, strict=True):
        assert row["entropy"] == pytest.approx(wanted["entropy"], rel=0.05)
