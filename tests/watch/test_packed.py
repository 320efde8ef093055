"""Packed sequences: every document is measured by itself, by whatever route its offsets come, or it is said why not."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn

import attemper
import packed
import zoo
from attemper.watch.routes import registered, replace
from close import assert_float64, in_float32, in_float64

SIGNS = ("rows", "visible", "peak", "entropy", "sum_p2")
GRADIENTS = ("grad_q_rms", "grad_k_rms")


@pytest.fixture(autouse=True)
def flash(float64):
    with packed.flash_attention():
        yield


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def assert_rows(rows, expected, names=SIGNS, close=in_float64):
    """The rows of a layer are those of a definition."""
    for name in names:
        assert [row[name] for row in rows] == close(expected[name]), name


class Asking(nn.Module):
    """A module that asks transformers for its attention function, as those of models do."""

    def __init__(self, implementation="flash_attention_2", causal=False):
        super().__init__()
        self.is_causal, self.config, self.mask = causal, transformers.LlamaConfig(), None
        self.config._attn_implementation_internal = implementation
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y, **options):
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q(x), self.k(y)[..., :4], y[..., :4]))
        attend = transformers.AttentionInterface().get_interface(self.config._attn_implementation, None)
        return attend(self, q, k, v, self.mask, **options)[0]


def by_offsets(rows, keys=None):
    keys = rows if keys is None else keys
    ends = {"cu_seq_lens_q": offsets(*rows), "cu_seq_lens_k": offsets(*keys)}
    return ends | {"max_length_q": max(rows), "max_length_k": max(keys)}


CALLS = {  # causal, the options of the interface, the shape of the queries and of the keys
    "offsets": (True, by_offsets([3, 6, 2]), (1, 11), (1, 11)),
    "not causal": (False, by_offsets([3, 6, 2]), (1, 11), (1, 11)),
    "one document": (True, by_offsets([11]), (1, 11), (1, 11)),
    "documents of one token": (True, by_offsets([1, 5, 1, 3, 1]), (1, 11), (1, 11)),
    "only documents of one token": (True, by_offsets([1, 1, 1]), (1, 3), (1, 3)),
    "empty documents": (True, by_offsets([0, 5, 0, 0, 6, 0]), (1, 11), (1, 11)),
    "other keys": (True, by_offsets([2, 3, 4], [5, 3, 2]), (1, 9), (1, 10)),
    "other keys, not causal": (False, by_offsets([2, 3, 4], [5, 3, 2]), (1, 9), (1, 10)),
    "no keys": (False, by_offsets([2, 3, 4], [5, 0, 2]), (1, 9), (1, 7)),
    "a tail outside": (True, by_offsets([3, 6]), (1, 11), (1, 11)),
    "a window": (True, by_offsets([3, 6, 2]) | {"sliding_window": 2}, (1, 11), (1, 11)),
    "a window, not causal": (False, by_offsets([3, 6, 2]) | {"sliding_window": 2}, (1, 11), (1, 11)),
    "a window, other keys": (True, by_offsets([2, 3], [6, 5]) | {"sliding_window": 3}, (1, 5), (1, 11)),
    "a window longer than all": (True, by_offsets([3, 6, 2]) | {"sliding_window": 40}, (1, 11), (1, 11)),
    "a scale": (True, by_offsets([3, 6, 2]) | {"scaling": 0.9}, (1, 11), (1, 11)),
    "a batch": (True, by_offsets([5, 9, 8]), (2, 11), (2, 11)),
    "positions": (True, {"position_ids": positions(3, 6, 2)}, (1, 11), (1, 11)),
    "positions from 2": (False, {"position_ids": positions(3, 6, 2) + 2}, (1, 11), (1, 11)),
    "positions of one token": (True, {"position_ids": positions(1, 1, 4, 1)}, (1, 7), (1, 7)),
    "positions that go on": (True, {"position_ids": positions(7) + 3}, (1, 7), (1, 7)),
    "positions in a batch": (True, {"position_ids": positions(3, 4).repeat(2, 1)}, (2, 7), (2, 7)),
    "positions and offsets": (True, {"position_ids": positions(4, 3)} | by_offsets([3, 4]), (1, 7), (1, 7)),
    "a window, unpacked": (False, {"sliding_window": 2}, (2, 7), (2, 7)),
    "a window, one query": (True, {"sliding_window": 2}, (2, 1), (2, 7)),
}


@pytest.mark.parametrize("passes", ["full, gradients", "intercepted", "intercepted, gradients"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_transformers_flash_attention(call, passes, kinds):
    causal, options, rows, keys = call
    net, inputs = Asking(causal=causal), (torch.randn(*rows, 8), torch.randn(*keys, 8))
    if keys == rows:
        inputs = inputs[:1] * 2
    plain = net(*inputs, **options)
    packed.SEEN.clear()
    intercepted, gradients = "intercepted" in passes, "gradients" in passes
    with attemper.watch(net, full=not intercepted, gradients=gradients) as watch:
        for _ in range(2):
            with torch.set_grad_enabled(gradients):
                out = net(*inputs, **options)
            assert torch.equal(out, plain)
            if gradients:
                out.sin().sum().backward()
            watch.step()
    assert kinds == ["full", "intercepted" if intercepted else "full"]
    assert watch.record.notes == []
    for step in range(2):
        found = watch.record.filter(steps=[step]).to_dicts()
        assert_rows(found, packed.SEEN[step])
        if gradients:
            assert_rows(found, packed.GRADIENTS[step], GRADIENTS)


def llama(implementation):
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(zoo.config(transformers.LlamaConfig, drop=("num_hidden_layers",), **sizes))
    if implementation == "flash":
        return packed.with_flash(model)
    model.set_attn_implementation(implementation)
    return model


def batch(*lengths):
    """A batch as transformers packs it."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    found = collate([{"input_ids": torch.randint(3, 99, (length,)).tolist()} for length in lengths])
    del found["labels"]
    return found | {"use_cache": False}


def contexts(model):
    """What the first layer's attention computes in each pass; later ones see the rounding of norms in float32."""
    found = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    return found


OFFSETS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
WAYS = {  # how the model attends, and what of the batch it is not given
    "both": ("flash", set()),
    "offsets": ("flash", {"position_ids"}),
    "positions": ("flash", OFFSETS),
    "sdpa": ("sdpa", set()),
    "eager": ("eager", OFFSETS),
}


@pytest.mark.parametrize("lengths", [(3, 6, 2), (5, 1, 4, 1), (4, 4, 3)])
@pytest.mark.parametrize("attended", ["itself", "replaced", "floored", "instrumented"])
@pytest.mark.parametrize(("implementation", "without"), WAYS.values(), ids=WAYS)
def test_a_model_sees_its_documents_apart_however_it_attends(implementation, without, attended, lengths):
    given = {name: value for name, value in batch(*lengths).items() if name not in without}
    first, model = llama("flash"), llama(implementation)
    expected, found = contexts(first), contexts(model)
    first(**given)
    if attended == "floored":
        with attemper.floor(model):
            model(**given)
    else:
        if attended == "instrumented":
            attemper.instrument(model)
        with attemper.watch(model, replace=attended == "replaced") as watch:
            model(**given)
        largest = max(map(abs, packed.SEEN[0]["peak"]))
        rounded = partial(in_float32, terms=sum(lengths), size=largest, logit=largest)  # its softmax is in float32
        in_eager = implementation == "eager" and attended == "itself"
        assert_rows(watch.record.to_dicts(), packed.SEEN[0], close=rounded if in_eager else in_float64)
        assert watch.record.notes == []
    if implementation != "eager" or attended != "itself":
        assert_float64(found[0], expected[0])


def test_facts_are_those_of_the_padded_batch():
    model = llama("flash")
    with attemper.watch(model) as watch:
        model(**batch(3, 6, 2))
    (info,) = watch.record.info.values()
    assert (info.route, info.batch, info.queries, info.keys, info.heads, info.kv_heads) == (
        "interface",
        3,
        6,
        6,
        4,
        2,
    )
    assert (info.kind, info.causal, info.masked) == ("self", True, False)


def test_intercepted_passes_read_the_offsets_of_their_own_batch(kinds):
    model = llama("flash")
    with attemper.watch(model) as watch:
        for lengths in [(3, 6, 2), (1, 10), (11,), (2, 2, 2, 2, 3)]:
            model(**batch(*lengths))
            watch.step()
    assert kinds == ["full", "intercepted", "intercepted", "intercepted"]
    for step, expected in enumerate(packed.SEEN):
        assert_rows(watch.record.filter(steps=[step]).to_dicts(), expected)


class Twice(nn.Module):
    """Two calls in a pass, whose offsets are written into one buffer."""

    def __init__(self, *each):
        super().__init__()
        self.net, self.each = Asking(causal=True), each

    def forward(self, x):
        options = by_offsets(self.each[0])
        for lengths in self.each:
            options["cu_seq_lens_q"].copy_(offsets(*lengths))
            options["cu_seq_lens_k"].copy_(options["cu_seq_lens_q"])
            self.net(x, x, **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_offsets_that_are_written_over_are_read_again(mode):
    with mode(), attemper.watch(net := Twice([3, 6, 2], [5, 1, 5])) as watch:
        net(torch.randn(1, 11, 8))
    means = zip(*(one["entropy"] for one in packed.SEEN), strict=True)
    assert [row["entropy"] for row in watch.record.to_dicts()] == in_float64([sum(both) / 2 for both in means])


def test_rows_that_the_user_gives_are_of_all_documents():
    net, x, keep = Asking(), torch.randn(1, 11, 8), torch.ones(1, 11, dtype=torch.bool)
    keep[0, 7:] = False  # what is left of the second document, and all of the third
    with torch.no_grad(), attemper.watch(net) as watch:
        watch.rows(keep)
        net(x, x, **by_offsets([3, 6, 2]))
    packed.SEEN.clear()
    with torch.no_grad():
        net(x[:, :7], x[:, :9], **by_offsets([3, 4], [3, 6]))
    assert_rows(watch.record.to_dicts(), packed.SEEN[0])


WRONG = {  # the implementation, the options, and what is said of them
    "offsets alone": (
        "flash_attention_2",
        {"cu_seq_lens_q": offsets(3, 8)},
        "cu_seq_lens_q but not all of cu_seq_lens_q, cu_seq",
    ),
    "offsets too far": ("flash_attention_2", by_offsets([3, 6, 9]), "offsets that do not fit 11 tokens"),
    "fewer offsets of keys": ("flash_attention_2", by_offsets([3, 6, 2], [5, 6]), "offsets that do not fit 11 tokens"),
    "no document": ("flash_attention_2", by_offsets([0, 0]), "documents without a token"),
    "a window over other keys": (
        "flash_attention_2",
        by_offsets([3, 6, 2], [6, 3, 2]) | {"sliding_window": 2},
        "a window over keys that are not the queries",
    ),
    "positions, not flash": ("foreign", {"position_ids": positions(3, 6, 2)}, "position_ids that restart"),
    "a mask and offsets": (
        "foreign",
        by_offsets([3, 6, 2]) | {"attention_mask": torch.ones(1, 11)},
        "both a mask and cu_seq_lens_q",
    ),
    "meta": (
        "flash_attention_2",
        by_offsets([3, 6, 2]) | {"cu_seq_lens_k": torch.empty(4, device="meta")},
        "offsets whose numbers cannot be read",
    ),
}


@pytest.mark.parametrize(("implementation", "options", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_measured_is_said(implementation, options, said, monkeypatch):
    """The function itself is not at stake: it returns its queries."""

    def attend(module, query, key, value, mask=None, **options):
        return query, None

    for name in ("flash_attention_2", "foreign"):
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, name, attend)
    net, x = Asking(implementation), torch.randn(1, 11, 8)
    net.mask, options = options.get("attention_mask"), {n: o for n, o in options.items() if n != "attention_mask"}
    named = f"Asking: not measured: attn_implementation='{implementation}' with {said}"
    with pytest.warns(UserWarning, match=named), torch.no_grad(), attemper.watch(net) as watch:
        net(x, x, **options)
    assert len(watch.record) == 0
    assert watch.unmeasured == 1


def test_positions_in_a_batch_that_older_transformers_joins_are_said(monkeypatch):
    monkeypatch.delattr(packed.flash, "_is_packed_sequence")
    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, "flash_attention_2", lambda _, q, *__, **___: (q, None)
    )
    net, x = Asking(), torch.randn(2, 7, 8)
    with (
        pytest.warns(UserWarning, match="position_ids that restart in a batch of several"),
        attemper.watch(net) as watch,
    ):
        net(x, x, position_ids=positions(3, 4).repeat(2, 1))
    assert len(watch.record) == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("attended", ["replaced", "floored", "instrumented"])
def test_documents_stay_apart_after_an_error_of_attempers_own(attended, monkeypatch):
    """transformers' own SDPA runs then, which reads no offsets."""

    def broken(*args, **options):
        raise RuntimeError("planted")

    monkeypatch.setenv("ATTEMPER_STRICT", "0")
    for module, name in [
        (replace, "attend_by_attemper"),
        (registered, "attend_by_attemper"),
    ]:
        monkeypatch.setattr(module, name, broken)
    given = batch(3, 6, 2)
    del given["position_ids"]
    first, model = llama("flash"), llama("flash")
    expected, found = contexts(first), contexts(model)
    first(**given)
    if attended == "instrumented":
        attemper.instrument(model)
    with attemper.floor(model) if attended == "floored" else attemper.watch(model, replace=attended == "replaced"):
        try:
            model(**given)
        finally:
            assert_float64(found[0], expected[0])


@pytest.mark.parametrize("lengths", [(3, 6, 2), (1, 6, 2)])
def test_a_clip_of_a_packed_model_has_its_effect(lengths):
    model, inputs = llama("flash"), batch(*lengths)
    found, peaks = attemper.projections(model, dict(inputs)), []
    for _ in range(2):
        with attemper.watch(model) as watch:
            model(**inputs)
        peaks.append([row["peak"] for row in watch.record.to_dicts()])
        attemper.qk_clip(model, watch.record, tau=5.0, projections=found)
    assert min(peaks[0]) > 5
    assert peaks[1] == in_float32([5.0] * 4, terms=8)  # rotations are in float32
