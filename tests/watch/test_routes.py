"""What is attention and what is not, how calls are named and told apart, and the Hugging Face interface."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attemper
import zoo
from attemper.errors import InputError
from attemper.watch.examine import Examiner
from attemper.watch.routes.registered import ATTENDING, attend
from close import in_float64
from judge import assert_as_exact


def record_of(model, *inputs, **options):
    with torch.no_grad(), attemper.watch(model, **options) as watch:
        model(*inputs)
    return watch.record


class Projected(nn.Module):
    """q, k and v of two sequences; how they meet is for subclasses to say."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, y):
        return self.meet(self.q(x), self.k(y), self.v(y))


def module(meet, cls=Projected):
    return type("Module", (cls,), {"meet": staticmethod(meet)})()


FORMS = {
    "plain, without a batch": (lambda q, k, v: (q[0] @ k[0].T / 4).softmax(-1) @ v[0], 0.25),
    "one head, bmm": (lambda q, k, v: torch.bmm(F.softmax(torch.bmm(q, k.mT) * 0.25, -1), v), 0.25),
    "divided": (lambda q, k, v: torch.softmax((q @ k.mT).div(math.sqrt(16)), -1).matmul(v), 0.25),
    "in place": (lambda q, k, v: (q @ k.mT).mul_(0.5).div_(2).add_(0.0).softmax(-1) @ v, 0.25),
    "baddbmm": (lambda q, k, v: torch.baddbmm(torch.zeros(1, 1, 1), q, k.mT, alpha=0.25).softmax(-1) @ v, 0.25),
    "values first": (lambda q, k, v: v.mT @ (q @ k.mT * 0.25).softmax(-1).mT, 0.25),
    "values twice": (
        lambda q, k, v: ((p := (q @ k.mT * 0.25).softmax(-1)) @ v) + p.to(torch.float64).to(v.dtype) @ v,
        0.25,
    ),
    "dropout between": (lambda q, k, v: F.dropout((q @ k.mT * 0.25).softmax(-1), 0.1) @ v, 0.25),
    "torch's own math": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), None),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("meet", "scale"), FORMS.values(), ids=FORMS)
def test_every_way_to_write_it(meet, scale, mode):
    net, x = module(meet), torch.randn(1, 6, 16)
    with mode():
        record = record_of(net, x, x)
        expected = attemper.measure(net.q(x)[None], net.k(x)[None]).by_head()
    assert len(record) == 1
    row = record.to_dicts()[0]
    assert row["rows"] == 6
    for name in ("entropy", "mean", "variance", "peak"):
        assert row[name] == in_float64(getattr(expected, name).item())
    if scale is not None:
        assert record.info["", "self"].scale == in_float64(scale)


def test_a_softmax_in_another_dtype():
    net = module(lambda q, k, v: (q @ k.mT * 0.25).softmax(-1, dtype=torch.float64).float() @ v)
    x = torch.randn(1, 6, 16)
    (row,) = record_of(net, x, x).to_dicts()
    weights = (net.q(x) @ net.k(x).mT * 0.25).double().softmax(-1)
    assert row["entropy"] == in_float64(-(weights * weights.log()).sum(-1).mean().item())


NOT_ATTENTION = {
    "a router": lambda q, k, v: q.softmax(-1) * v,
    "scores without values": lambda q, k, v: (q @ k.mT).softmax(-1),
    "linear attention": lambda q, k, v: (q @ k.mT) @ v,
    "values without scores": lambda q, k, v: q[..., :6].softmax(-1) @ v,
}


@pytest.mark.parametrize("meet", NOT_ATTENTION.values(), ids=NOT_ATTENTION)
def test_what_is_not_attention(meet):
    x = torch.randn(1, 6, 16)
    with pytest.raises(
        InputError, match=r"^watch\(\): found no attention call in Module; it follows torch's scaled_dot"
    ):
        record_of(module(meet), x, x)


@pytest.mark.parametrize("dim", [0, 1])
def test_attention_over_the_wrong_dimension_is_counted_and_says_so(dim):
    class Listening(Examiner):
        def keep(self, name, call, seen):
            kept.append((call.over, call.softmaxes))

    kept, net, x = [], module(lambda q, k, v: (q @ k.mT).softmax(dim) @ v), torch.randn(2, 6, 16)
    watch = attemper.watch(net, examiners=[Listening()])
    with torch.no_grad(), watch:
        net(x, x)
    assert kept == [(("batch", "queries")[dim], 1)]
    assert len(watch.record) == 1


def test_an_output_layer_with_a_softmax_is_not_attention():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Parameter(torch.randn(99, 16))

        def forward(self, x):
            return (x @ self.words.T).softmax(-1) @ self.words

    with pytest.raises(InputError, match="found no attention call in Tied"):
        record_of(Tied(), torch.randn(2, 6, 16))


@pytest.mark.usefixtures("float64")
def test_grouped_heads_by_hand():
    class Grouped(nn.Module):
        num_heads = 4

        def forward(self, q, k):
            return ((q @ k.mT) * 0.25).softmax(-1) @ k

    q, k = torch.randn(2, 2, 2, 5, 16), torch.randn(2, 2, 1, 5, 16)
    record = record_of(Grouped(), q, k)
    expected = attemper.measure(q.flatten(1, 2), k.squeeze(2)).by_head()
    assert [row["entropy"] for row in record.to_dicts()] == in_float64(expected.entropy.tolist())


def test_self_and_cross_are_told_apart_by_where_q_and_k_come_from():
    net = module(lambda q, k, v: F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]))
    x, y = torch.randn(1, 6, 16), torch.randn(1, 6, 16)
    with torch.no_grad(), attemper.watch(net) as watch:
        net(x, x)
        net(x, y)
    assert [(entry.layer, entry.kind) for entry in watch.record.entries] == [("", "self"), ("", "cross")]
    assert [row["rows"] for row in watch.record.to_dicts()] == [6, 6]


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_names_are_the_model_s():
    for name, kinds in (("whisper", {"self", "cross"}), ("torch_transformer", {"self", "cross"}), ("bert", {"self"})):
        subject = zoo.make(name)
        with torch.no_grad(), attemper.watch(subject.model) as watch:
            subject.run()
        assert {entry.kind for entry in watch.record.entries} == kinds
        for entry in watch.record.entries:
            assert subject.model.get_submodule(entry.layer) is not None
            assert ("encoder_attn" in entry.layer or "multihead_attn" in entry.layer) == (entry.kind == "cross")


def test_a_mask_that_is_wrong_shows():
    """A causal model that lost its mask sees all keys: visible says so."""
    x = torch.randn(1, 6, 16)
    for causal, visible in ((True, 3.5), (False, 6.0)):
        net = module(lambda q, k, v, c=causal: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=c))
        assert record_of(net, x, x).to_dicts()[0]["visible"] == visible


@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "t5", "gemma2", "gemma3", "opt", "vit", "whisper"])
def test_replace_computes_the_same_to_rounding_with_the_same_vitals(name):
    subject = zoo.make(name)
    config = subject.model.config
    before = config._attn_implementation
    judge = zoo.in_float64(subject)
    with torch.no_grad():
        expected = subject.run()
        with attemper.watch(subject.model) as beside:
            subject.run()
        with attemper.watch(subject.model, replace=True) as watch:
            assert config._attn_implementation == "attemper"
            output = subject.run()
        assert config._attn_implementation == before
        again = subject.run()
        with attemper.watch(judge.model) as true:
            exact = judge.run()
        subject.model.set_attn_implementation("eager")
        with attemper.watch(subject.model) as eager:
            plain = [expected, subject.run()]
    assert torch.equal(again, expected)
    real = output.shape[1] == zoo.TARGETS and subject.targets is not None
    keep = subject.targets if real else subject.keep
    keep = torch.ones(output.shape[:2], dtype=torch.bool) if keep is None else keep
    assert_as_exact("output", output[keep], [tensor[keep] for tensor in plain], exact[keep])
    assert {info.route for info in watch.record.info.values()} == {"replaced"}
    for ours, theirs in zip(watch.record.to_dicts(), beside.record.to_dicts(), strict=True):
        for column in ("step", "layer", "kind", "head", "rows", "visible"):
            assert ours[column] == theirs[column], column
    ours, *theirs, exact = (
        torch.tensor([row["entropy"] for row in seen.record.to_dicts()]) for seen in (watch, beside, eager, true)
    )
    assert_as_exact("entropy", ours, theirs, exact)


def test_replace_off_cycle_measures_nothing_and_trains():
    subject = zoo.make("llama")
    with attemper.watch(subject.model, replace=True, every=2, gradients=True) as watch:
        for _ in range(3):
            subject.run().square().mean().backward()
            watch.step()
    assert watch.record.steps == [0, 2]
    assert watch.record.to_dicts()[0]["grad_q_rms"] > 0


def test_what_replace_cannot_do_it_refuses_aloud():
    with pytest.raises(InputError, match=r"^watch\(\): replace=True needs a Hugging Face model .*; got Linear\."):
        attemper.watch(nn.Linear(2, 2), replace=True)
    bloom = zoo.make("bloom")
    implementation = bloom.model.config._attn_implementation
    with (
        pytest.raises(InputError, match="BloomModel kept attn_implementation="),
        attemper.watch(bloom.model, replace=True),
    ):
        pass
    assert bloom.model.config._attn_implementation == implementation
    # the name stays known, for copies, and holds nothing of the watch
    assert transformers.AttentionInterface._global_mapping["attemper"] is attend
    assert ATTENDING == {}
    query = torch.randn(1, 2, 5, 8)
    llama = zoo.make("llama")
    with attemper.watch(llama.model, replace=True):
        llama.run()
        with pytest.raises(InputError, match=r"cannot compute LlamaModel with a paged cache\. Leave replace out"):
            attend(llama.model, query, query, query, None, cache=object())


@pytest.fixture
def foreign():
    """An attention function whose ops cannot be seen, as a kernel from outside torch."""
    options = {}

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, mask, causal, scale):
            with torch.utils._python_dispatch._disable_current_modes():
                return attemper.attention(q, k, v, mask=mask, causal=causal, scale=scale, signs=()).output

    def forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        causal = "lower_right" if module.is_causal else False
        padding = attention_mask.bool()[:, None, None, :] if isinstance(attention_mask, torch.Tensor) else None
        output = Hidden.apply(query, key, value, padding, causal, scaling)
        return output.transpose(1, 2), None

    def mask(*args, attention_mask=None, **kwargs):
        return options.get("mask", attention_mask)

    tables = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    for table, entry in zip(tables, (forward, mask), strict=True):
        table.register("foreign", entry)
    yield options
    for table in tables:
        del table._global_mapping["foreign"]


@pytest.mark.usefixtures("float64")
def test_a_kernel_from_outside_is_measured_from_its_arguments(foreign):
    subject = zoo.make("llama")
    with torch.no_grad(), attemper.watch(subject.model) as expected:
        subject.run()
    subject.model.set_attn_implementation("foreign")
    with torch.no_grad(), attemper.watch(subject.model) as watch:
        subject.run()
    info = watch.record.info["layers.0.self_attn", "self"]
    assert (info.route, info.implementation, info.kv_heads) == ("interface", "foreign", 2)
    for ours, theirs in zip(watch.record.to_dicts(), expected.record.to_dicts(), strict=True):
        for name in ("rows", "visible", "entropy", "peak"):
            assert ours[name] == in_float64(theirs[name]), name


def doge():
    config = zoo.config(transformers.DogeConfig, num_key_value_heads=2, keep_window_size=64)
    return zoo.text(transformers.DogeModel(config))


def qwen2_vl_tower():
    modeling = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    sizes = {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "patch_size": 8, "temporal_patch_size": 1}
    model = modeling.Qwen2VisionTransformerPretrainedModel(modeling.Qwen2VLVisionConfig(**sizes))
    pictures = torch.tensor([[1, 4, 4], [1, 2, 4]])  # of 16 and of 8 patches
    return zoo.Subject(model, {"hidden_states": torch.randn(24, 3 * 64), "grid_thw": pictures})


@pytest.mark.parametrize("maker", [doge, qwen2_vl_tower])
def test_a_mask_that_is_passed_by_its_name(maker):
    torch.manual_seed(0)
    subject = maker()
    subject.model.eval()
    judge = zoo.in_float64(subject)
    judge.model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = subject.run()
        with attemper.watch(subject.model) as watch:
            assert torch.equal(subject.run(), expected)
        subject.model.set_attn_implementation("eager")
        with attemper.watch(subject.model) as eager:
            subject.run()
        with attemper.watch(judge.model) as true:
            judge.run()
    assert len(watch.record.layers) == 2
    ours, theirs, exact = (one.record.to_dicts() for one in (watch, eager, true))
    for name in ("rows", "visible"):
        assert [row[name] for row in ours] == [row[name] for row in theirs]
    for name in ("entropy", "peak"):
        numbers = (torch.tensor([row[name] for row in rows]) for rows in (ours, theirs, exact))
        assert_as_exact(name, next(numbers), [next(numbers)], next(numbers))


@pytest.mark.parametrize("by_name", [False, True])
def test_the_mask_of_a_kernel_from_outside_counts_either_way(foreign, by_name):
    class Asking(nn.Module):
        is_causal = False

        def forward(self, q, mask):
            attend = transformers.AttentionInterface().get_interface("foreign", None)
            masked = ((), {"attention_mask": mask}) if by_name else ((mask,), {})
            return attend(self, q, q, q, *masked[0], **masked[1])[0]

    keep = torch.ones(2, 6, dtype=torch.long)
    keep[:, 4:] = 0
    record = record_of(Asking(), torch.randn(2, 3, 6, 8), keep)
    assert {row["visible"] for row in record.to_dicts()} == {4}


def test_what_cannot_be_measured_is_said(foreign):
    subject = zoo.make("llama")
    subject.model.set_attn_implementation("foreign")
    for layer in subject.model.layers:
        original = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, original=original, **options: original(*args, **options, cache=object())
    with pytest.warns(
        UserWarning,
        match=r"layers\.\d\.self_attn: not measured: attn_implementation='foreign' with a paged cache\. "
        r"model\.set_attn_implementation\('eager'\) shows its scores\.$",
    ):
        record = record_of(subject.model, *subject.inputs.values())
    assert len(record.notes) == 2
    assert len(record) == 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_called_directly_is_said_to_be_unseen():
    class Flex(nn.Module):
        def forward(self, q):
            return flex_attention(q, q, q)

    q = torch.randn(1, 2, 16, 16)
    with pytest.warns(UserWarning, match="Flex: not measured: flex_attention called directly"):
        assert len(record_of(Flex(), q)) == 0


@pytest.mark.usefixtures("float64")
def test_a_block_mask_is_measured_as_what_it_hides(foreign):
    """Flex attention's own mask, on a kernel that cannot be seen."""
    subject = zoo.make("llama")
    with torch.no_grad(), attemper.watch(subject.model) as expected:
        subject.run()

    def visible(batch, head, row, column):
        return (column <= row) & subject.keep[batch, column]

    foreign["mask"] = create_block_mask(visible, 2, None, zoo.LENGTH, zoo.LENGTH, device="cpu", BLOCK_SIZE=16)
    subject.model.set_attn_implementation("foreign")
    with torch.no_grad(), attemper.watch(subject.model) as watch:
        subject.run()
    first, other = (record.filter(layers="layers.0.*").to_dicts() for record in (watch.record, expected.record))
    for ours, theirs in zip(first, other, strict=True):
        for name in ("rows", "visible", "entropy", "peak"):
            assert ours[name] == in_float64(theirs[name]), name


def test_two_attentions_of_one_module_with_different_heads_stay_apart():
    class Two(nn.Module):
        def forward(self, x):
            few, many = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for heads in (2, 4))
            return (
                F.scaled_dot_product_attention(few, few, few).sum()
                + F.scaled_dot_product_attention(many, many, many).sum()
            )

    record = record_of(Two(), torch.randn(1, 5, 16))
    assert [len(entry.heads) for entry in record.entries] == [2, 4]
