"""What bad input gets: one exact sentence per check (sentences.json), that names the argument, the rule and the next step."""

import math

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

import attemper
from attemper.errors import AttemperError, InputError, KernelUnavailable
from attemper.kernels import KERNELS, choose
from attemper.kernels.contract import Capabilities, Request
from snapshots import Sentences, assert_told

KEPT = Sentences("surface")
Q = torch.randn(2, 12, 5, 8)


def call(**changes):
    inputs = {"query": Q, "key": Q, "value": Q, **changes}
    return attemper.attention(inputs.pop("query"), inputs.pop("key"), inputs.pop("value"), **inputs)


def kv(*shape, dtype=torch.float32):
    return {"key": torch.randn(*shape).to(dtype), "value": torch.randn(*shape).to(dtype)}


class Answers(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_names_of_torch_and_of_others_are_answered_with_ours():
    wrong = {"is_causal": "causal", "attn_mask": "mask", "attention_mask": "mask", "dropout_p": "dropout"}
    for name, ours in {**wrong, "softmax_scale": "scale"}.items():
        with pytest.raises(TypeError, match=rf"^attention\(\): unknown option '{name}'\. Did you mean '{ours}'\?"):
            call(**{name: None})
    for function, name, ours in (
        (attemper.measure, "attn_mask", "mask"),
        (attemper.sdpa, "mask", "attn_mask"),
        (attemper.sdpa, "causal", "is_causal"),
    ):
        with pytest.raises(InputError, match=rf"unknown option '{name}'\. Did you mean '{ours}'\?"):
            function(Q, Q, Q, **{name: None})


SENTENCES = {
    "head dim": {"key": torch.randn(2, 12, 5, 16)},
    "heads": kv(2, 5, 5, 8),
    "too many key heads": kv(2, 24, 5, 8),
    "value heads": {"value": torch.randn(2, 6, 5, 8)},
    "value length": {"value": torch.randn(2, 12, 7, 8)},
    "batch": kv(3, 12, 5, 8),
    "dimensions": kv(12, 5, 8),
    "too few dimensions": {"query": torch.randn(8)},
    "not a tensor": {"key": [[1.0]]},
    "integers": {"query": torch.ones(2, 12, 5, 8, dtype=torch.int64)},
    "mixed dtypes": kv(2, 12, 5, 8, dtype=torch.float64),
    "two devices": {"key": torch.empty(2, 12, 5, 8, device="meta")},
    "mask device": {"mask": torch.empty(5, 5, device="meta")},
    "mask dtype": {"mask": torch.ones(5, 5, dtype=torch.int64)},
    "mask shape": {"mask": torch.ones(2, 5, dtype=torch.bool)},
    "mask dimensions": {"mask": torch.ones(1, 2, 12, 5, 5, dtype=torch.bool)},
    "mask type": {"mask": "causal"},
    "mask of flex attention": {"mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 5, 5, device="cpu")},
    "mask that answers for torch": {"mask": torch.ones(5, 5).as_subclass(Answers)},
    "causal bias and causal": {"mask": causal_upper_left(5, 5), "causal": True},
    "causal bias of other sizes": {"mask": causal_lower_right(4, 5)},
    "scale nan": {"scale": math.nan},
    "scale inf": {"scale": math.inf},
    "scale name": {"scale": "sqrt_dk"},
    "scale of another kind": {"scale": "sqrt"},
    "scale shape": {"scale": torch.ones(3)},
    "scale dtype": {"scale": torch.ones(12, dtype=torch.int64)},
    "softcap": {"softcap": 0},
    "window": {"window": 0},
    "window kind": {"window": 2.5},
    "dropout": {"dropout": 1.5},
    "dropout nan": {"dropout": math.nan},
    "causal word": {"causal": "bottom_right"},
    "causal kind": {"causal": 1},
    "sign": {"signs": ("entorpy",)},
    "signs kind": {"signs": None},
    "signs of signs": {"signs": ([1],)},
    "signs tensor": {"signs": torch.ones(3)},
    "no value": {"value": None},
    "no heads": {"query": torch.randn(2, 0, 5, 8)},
    "scale too large": {"scale": 1e39},
    "softcap too large": {"softcap": 1e39},
    "dropout tensor": {"dropout": torch.tensor([0.1, 0.2])},
    "sparse": {"key": torch.zeros(2, 12, 5, 8).to_sparse()},
    "documents kind": {"documents": [0, 5]},
    "documents dtype": {"documents": torch.tensor([0.0, 5.0])},
    "documents device": {"documents": torch.empty(2, dtype=torch.int64, device="meta")},
    "documents shape": {"documents": torch.zeros(3, 2, dtype=torch.int64)},
    "documents empty": {"documents": torch.zeros(0, dtype=torch.int64)},
    "documents three": {"documents": (torch.tensor([0, 5]),) * 3},
    "documents of keys": {"documents": (torch.tensor([0, 5]), torch.tensor([0, 2, 5]))},
    "documents numbers": {"documents": torch.tensor([0, 2, 1, 3, 4, 6])},
    "documents numbers of keys": {"documents": (torch.tensor([0, 5]), torch.tensor([1, 5]))},
    "documents and causal bias": {"documents": torch.tensor([0, 5]), "mask": causal_upper_left(5, 5)},
    "sink kind": {"sink": 0.0},
    "sink dtype": {"sink": torch.zeros(12, dtype=torch.int64)},
    "sink shape": {"sink": torch.zeros(5)},
    "sink device": {"sink": torch.empty(12, device="meta")},
    "kernel kind": {"kernel": ["x"]},
    "kernel": {"kernel": "blockwize"},
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_sentence(case):
    with pytest.raises(InputError) as error:
        call(**SENTENCES[case])
    assert_told(str(error.value), "attention", *SENTENCES[case])
    KEPT.compare("attention", case, str(error.value))
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert isinstance(error.value, ValueError)


def test_the_function_that_was_called_is_named():
    with pytest.raises(InputError, match=r"^measure\(\): `key` must have head dim 8"):
        attemper.measure(Q, torch.randn(2, 12, 5, 16))
    with pytest.raises(InputError, match=r"^sdpa\(\): `key` must have head dim 8"):
        attemper.sdpa(Q, torch.randn(2, 12, 5, 16), Q)
    with pytest.raises(InputError, match=r"^why\(\): unknown kernel"):
        attemper.kernels.why(Q, Q, Q, kernel="cuda")


def test_sdpa_asks_for_enable_gqa():
    with pytest.raises(InputError) as error:
        attemper.sdpa(Q, Q[:, :4], Q[:, :4])
    assert str(error.value) == (
        "sdpa(): `query`, `key` and `value` must have the same number of heads; got 12, 4 and 4. "
        "For grouped-query attention pass enable_gqa=True."
    )


def test_sdpa_speaks_of_its_own_arguments():
    with pytest.raises(
        InputError, match=r"^sdpa\(\): `attn_mask` must broadcast to \(2, 12, 5, 5\); got \(2, 5\).*attn_mask\["
    ):
        attemper.sdpa(Q, Q, Q, attn_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(InputError, match=r"^sdpa\(\): `dropout_p` must be a probability"):
        attemper.sdpa(Q, Q, Q, dropout_p=2.0)
    with pytest.raises(InputError, match=r"^sdpa\(\): `is_causal` must be False or True; got 'lower_right'"):
        attemper.sdpa(Q, Q, Q, is_causal="lower_right")


EXPLAIN = {
    "no words": {"text": " \n "},
    "no text": {"text": ["Love"]},
    "too many words": {"text": "a " * 20_001},
    "rule": {"rule": "sqrt_d"},
    "score": {"score": "aditive"},
    "heads": {"heads": 7},
    "more heads than width": {"heads": 3, "d_model": 2},
    "no heads": {"heads": 0},
    "heads and another d_k": {"heads": 8, "d_k": 32},
    "d_k": {"d_k": -1},
    "d_model": {"d_model": 0},
    "far too wide": {"d_model": 10**18 + 9, "heads": 7},
    "too wide": {"d_model": 10**6, "d_k": 1000},
    "seed": {"seed": 0.5},
    "layer": {"rule": "layer", "layer": -1},
    "no layer": {"rule": "layer"},
    "sqrt_dmodel": {"rule": "sqrt_dmodel", "d_k": 60},
    "rule of another score": {"rule": "dk", "score": "cosine"},
    "rule of additive": {"rule": "softcap", "score": "additive"},
}


@pytest.mark.parametrize("case", EXPLAIN)
def test_the_sentence_of_explain(case):
    with pytest.raises(InputError) as error:
        attemper.explain(**{"text": "Love Apple phones", **EXPLAIN[case]})
    assert_told(str(error.value), "explain", *EXPLAIN[case])
    KEPT.compare("explain", case, str(error.value))


def test_the_file_has_these_sentences_and_no_other():
    KEPT.assert_cases("attention", SENTENCES)
    KEPT.assert_cases("explain", EXPLAIN)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(4, 5, 8), torch.randn(4, 3, 8)])
    with pytest.raises(InputError, match=r"`query` must be a dense tensor; got nested. Pad it"):
        attemper.attention(nested, nested, nested)


def test_numpy_numbers_and_enormous_windows_are_numbers():
    numpy = pytest.importorskip("numpy")
    plain = call(window=3, softcap=3.0, scale=0.5)
    typed = call(window=numpy.int64(3), softcap=numpy.float32(3), scale=numpy.float64(0.5))
    assert torch.equal(plain.output, typed.output)
    assert torch.equal(call(window=2**70).output, call(window=100).output)


def test_meta_tensors_give_shapes():
    meta = Q.to("meta")
    output, vitals = attemper.attention(meta, meta, meta)
    assert output.shape == Q.shape
    assert vitals.entropy.shape == Q.shape[:3]


NARROW = Capabilities(
    devices=("cuda",),
    additive=False,
    unavailable_reason=lambda request: "serves lengths up to 1000" if request.keys > 1000 else None,
)
PLAIN = Request(device="cuda", dtype=torch.float16, rows=128, keys=128, head_dim=64, value_dim=64)
REFUSALS = {
    "needs cuda tensors; got cpu": {"device": "cpu"},
    "does not support additive scores": {"additive": True},
    "serves lengths up to 1000": {"keys": 1001},
}


@pytest.mark.parametrize(("clause", "change"), REFUSALS.items(), ids=REFUSALS)
def test_a_named_kernel_runs_or_says_why(monkeypatch, clause, change):
    monkeypatch.setitem(KERNELS, "narrow", NARROW)
    assert choose("attention", PLAIN, "narrow") == "narrow"
    with pytest.raises(KernelUnavailable) as error:
        choose("attention", PLAIN._replace(**change), "narrow")
    assert str(error.value) == f"attention(): kernel='narrow' {clause}. Change the inputs or use kernel='auto'."


def test_auto_takes_the_first_that_serves(monkeypatch):
    three = {"narrow": NARROW, "blockwise": Capabilities(), "reference": Capabilities()}
    monkeypatch.setattr(attemper.kernels, "KERNELS", three)
    assert choose("attention", PLAIN, "auto") == "narrow"
    assert choose("attention", PLAIN._replace(keys=1001), "auto") == "blockwise"
    choices = attemper.kernels.why(Q, Q, Q)
    assert str(choices) == (
        "narrow     not taken: needs cuda tensors; got cpu\n"
        "blockwise  taken: the fastest that serves this call\n"
        "reference  not taken: serves this call, but slower"
    )
    named = attemper.kernels.why(Q, Q, Q, kernel="reference")
    assert [v.taken for v in named] == [False, False, True]


def test_the_table_holds_only_what_some_kernel_refuses():
    """A column in which every kernel says the same says nothing."""
    rows = [serves.row() for serves in KERNELS.values()]
    assert {name for name in rows[0] if len({row[name] for row in rows}) > 1} == set(rows[0])


def test_every_error_is_ours():
    assert issubclass(InputError, AttemperError)
    assert issubclass(KernelUnavailable, RuntimeError)
