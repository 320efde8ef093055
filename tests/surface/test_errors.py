"""What bad input gets: one exact sentence per check, that names the argument, the rule, the value and the next step."""

import math
from dataclasses import replace

import pytest
import torch

import attemper
from attemper.errors import AttemperError, InputError, KernelUnavailable
from attemper.kernels import KERNELS, choose
from attemper.kernels.contract import Request, Serves

Q = torch.randn(2, 12, 5, 8)


def call(**changes):
    inputs = {"query": Q, "key": Q, "value": Q, **changes}
    return attemper.attention(inputs.pop("query"), inputs.pop("key"), inputs.pop("value"), **inputs)


def kv(*shape, dtype=torch.float32):
    return {"key": torch.randn(*shape).to(dtype), "value": torch.randn(*shape).to(dtype)}


SENTENCES = {
    "head dim": (
        {"key": torch.randn(2, 12, 5, 16)},
        "attention(): `key` must have head dim 8 like `query`; got 16 (shape (2, 12, 5, 16)).",
    ),
    "heads": (
        kv(2, 5, 5, 8),
        "attention(): query heads (=12) must be a multiple of key heads (=5). Use 4 or 6 key/value heads.",
    ),
    "too many key heads": (
        kv(2, 24, 5, 8),
        "attention(): query heads (=12) must be a multiple of key heads (=24). Use 12 key/value heads.",
    ),
    "value heads": (
        {"value": torch.randn(2, 6, 5, 8)},
        "attention(): `value` must have 12 heads like `key`; got 6.",
    ),
    "value length": (
        {"value": torch.randn(2, 12, 7, 8)},
        "attention(): `value` must have length 5 like `key`; got 7 (shape (2, 12, 7, 8)).",
    ),
    "batch": (
        kv(3, 12, 5, 8),
        "attention(): `key` must have query's leading dimensions (2,) or 1s; got (3,).",
    ),
    "dimensions": (
        kv(12, 5, 8),
        "attention(): `key` must have 4 dimensions like `query`; got shape (12, 5, 8).",
    ),
    "too few dimensions": (
        {"query": torch.randn(8)},
        "attention(): `query` must have at least 2 dimensions, (..., length, dim); got shape (8,).",
    ),
    "not a tensor": ({"key": [[1.0]]}, "attention(): `key` must be a torch.Tensor; got list."),
    "integers": (
        {"query": torch.ones(2, 12, 5, 8, dtype=torch.int64)},
        "attention(): `query` must be float16, bfloat16, float32 or float64; got torch.int64. Use query.float().",
    ),
    "mixed dtypes": (
        kv(2, 12, 5, 8, dtype=torch.float64),
        "attention(): `key` must have query's dtype torch.float32; got torch.float64. Use key.to(query.dtype).",
    ),
    "two devices": (
        {"key": torch.empty(2, 12, 5, 8, device="meta")},
        "attention(): `key` must be on query's device cpu; got meta. Use key.to('cpu').",
    ),
    "mask device": (
        {"mask": torch.empty(5, 5, device="meta")},
        "attention(): `mask` must be on query's device cpu; got meta. Use mask.to('cpu').",
    ),
    "mask dtype": (
        {"mask": torch.ones(5, 5, dtype=torch.int64)},
        "attention(): `mask` must be boolean (True = keep) or floating point (added to the logits); "
        "got torch.int64. Use mask.bool().",
    ),
    "mask shape": (
        {"mask": torch.ones(2, 5, dtype=torch.bool)},
        "attention(): `mask` must broadcast to (2, 12, 5, 5); got (2, 5). "
        "For a (B, Lk) padding mask pass mask[:, None, None, :].",
    ),
    "mask dimensions": (
        {"mask": torch.ones(1, 2, 12, 5, 5, dtype=torch.bool)},
        "attention(): `mask` must broadcast to (2, 12, 5, 5); got (1, 2, 12, 5, 5).",
    ),
    "mask type": ({"mask": "causal"}, "attention(): `mask` must be a torch.Tensor; got str."),
    "scale nan": ({"scale": math.nan}, "attention(): `scale` must be finite; got nan. Leave it out for 1/sqrt(8)."),
    "scale inf": ({"scale": math.inf}, "attention(): `scale` must be finite; got inf. Leave it out for 1/sqrt(8)."),
    "scale name": (
        {"scale": "sqrt_dk"},
        "attention(): `scale` must be a number, a tensor or None; got 'sqrt_dk'. "
        "Use attemper.rule('sqrt_dk').scale(head_dim=8).",
    ),
    "scale of another kind": (
        {"scale": "sqrt"},
        "attention(): `scale` must be a number, a tensor or None; got 'sqrt'. Use 8**-0.5 for 1/sqrt(8).",
    ),
    "scale shape": (
        {"scale": torch.ones(3)},
        "attention(): a `scale` tensor must have shape (), (12,) for one number per head, or broadcast to "
        "(2, 12, 5, 1); got (3,).",
    ),
    "scale dtype": (
        {"scale": torch.ones(12, dtype=torch.int64)},
        "attention(): a `scale` tensor must be floating point; got torch.int64. Use scale.float().",
    ),
    "softcap": (
        {"softcap": 0},
        "attention(): `softcap` must be a finite number above 0; got 0. Leave it out for no cap (Gemma 2 uses 50).",
    ),
    "window": (
        {"window": 0},
        "attention(): `window` must be a whole number of keys, at least 1; got 0. Leave it out for no window.",
    ),
    "window kind": (
        {"window": 2.5},
        "attention(): `window` must be a whole number of keys, at least 1; got 2.5. Leave it out for no window.",
    ),
    "dropout": ({"dropout": 1.5}, "attention(): `dropout` must be a probability from 0 to 1; got 1.5."),
    "dropout nan": ({"dropout": math.nan}, "attention(): `dropout` must be a probability from 0 to 1; got nan."),
    "causal word": (
        {"causal": "bottom_right"},
        "attention(): `causal` must be False, True (top-left) or 'lower_right'; got 'bottom_right'. "
        "Use 'lower_right' when the last query belongs to the last key (a KV cache).",
    ),
    "causal kind": ({"causal": 1}, "attention(): `causal` must be False, True or 'lower_right'; got 1."),
    "sign": (
        {"signs": ("entorpy",)},
        "attention(): unknown sign 'entorpy' in `signs`. Did you mean 'entropy'? Known: 'all', 'visible', 'mean', "
        "'variance', 'peak', 'lse', 'entropy', 'p2', 'top_weight', 'effective_keys', 'evenness', 'jacobian_trace'.",
    ),
    "signs kind": (
        {"signs": None},
        "attention(): `signs` must be 'all', a sign's name or several; got None. Use signs=() for none.",
    ),
    "signs of signs": ({"signs": ([1],)}, "attention(): `signs` must hold names; got list. Use signs='all'."),
    "signs tensor": (
        {"signs": torch.ones(3)},
        "attention(): `signs` must be 'all', a sign's name or several; got Tensor. Use signs=() for none.",
    ),
    "no value": (
        {"value": None},
        "attention(): `value` must be a torch.Tensor; got None. For signs alone use measure(query, key).",
    ),
    "no heads": (
        {"query": torch.randn(2, 0, 5, 8)},
        "attention(): query heads (=0) must be a multiple of key heads (=12). Use 0 key/value heads.",
    ),
    "scale too large": ({"scale": 1e39}, "attention(): `scale` must be finite; got 1e+39. Leave it out for 1/sqrt(8)."),
    "softcap too large": (
        {"softcap": 1e39},
        "attention(): `softcap` must be a finite number above 0; got 1e+39. Leave it out for no cap (Gemma 2 uses 50).",
    ),
    "dropout tensor": (
        {"dropout": torch.tensor([0.1, 0.2])},
        "attention(): `dropout` must be a probability from 0 to 1; got Tensor.",
    ),
    "sparse": (
        {"key": torch.zeros(2, 12, 5, 8).to_sparse()},
        "attention(): `key` must be a dense tensor; got torch.sparse_coo. Pad it, and hide the padding with a mask.",
    ),
    "kernel kind": (
        {"kernel": ["x"]},
        "attention(): unknown kernel ['x']. Known: 'auto', " + ", ".join(map(repr, KERNELS)) + ".",
    ),
    "kernel": (
        {"kernel": "blockwize"},
        "attention(): unknown kernel 'blockwize'. Did you mean 'blockwise'? Known: 'auto', "
        + ", ".join(map(repr, KERNELS))
        + ".",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_the_sentence(changes, sentence):
    with pytest.raises(InputError) as error:
        call(**changes)
    assert str(error.value) == sentence
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
    "no words": (
        {"text": " \n "},
        "explain(): `text` must hold at least one word; got ' \\n '. For example: 'Love Apple phones'.",
    ),
    "no text": ({"text": ["Love"]}, "explain(): `text` must be a sentence, a str; got list."),
    "too many words": (
        {"text": "a " * 20_001},
        "explain(): `text` may hold 20,000 words, since every word is compared with every other; got 20,001. "
        "Use a shorter text.",
    ),
    "rule": (
        {"rule": "sqrt_d"},
        "explain(): unknown rule 'sqrt_d'. Did you mean 'sqrt_dk'? Known: 'sqrt_dk', 'none', 'dk', 'sqrt_dmodel', "
        "'layer', 'log_n', 'learned', 'qk_norm', 'softcap'.",
    ),
    "score": (
        {"score": "aditive"},
        "explain(): unknown score 'aditive'. Did you mean 'additive'? Known: 'dot', 'additive', 'cosine'.",
    ),
    "heads": (
        {"heads": 7},
        "explain(): `d_model` must be a multiple of `heads`; got 512 and 7. Use 4 or 8 heads, or a d_model of 511 or 518.",
    ),
    "more heads than width": (
        {"heads": 3, "d_model": 2},
        "explain(): `d_model` must be a multiple of `heads`; got 2 and 3. Use 2 heads, or a d_model of 3.",
    ),
    "no heads": (
        {"heads": 0},
        "explain(): `heads` must be a whole number, at least 1; got 0. Leave it out to look at one head.",
    ),
    "heads and another d_k": (
        {"heads": 8, "d_k": 32},
        "explain(): with 8 heads `d_k` is d_model / heads = 64; got 32. Leave d_k out.",
    ),
    "d_k": ({"d_k": -1}, "explain(): `d_k` must be a whole number, at least 1; got -1. Use 64."),
    "d_model": ({"d_model": 0}, "explain(): `d_model` must be a whole number, at least 1; got 0. Use 512."),
    "far too wide": (
        {"d_model": 10**18 + 9, "heads": 7},
        "explain(): `d_model` may be 134,217,728; got 1,000,000,000,000,000,009. GPT-3 has 12288.",
    ),
    "too wide": (
        {"d_model": 10**6, "d_k": 1000},
        "explain(): `d_k` may be 8,192, and d_model × d_k 134,217,728; got d_model 1,000,000 and d_k 1,000. "
        "Use smaller ones: GPT-3 has 12288 and 128.",
    ),
    "seed": ({"seed": 0.5}, "explain(): `seed` must be a whole number; got 0.5. Use 0."),
    "layer": (
        {"rule": "layer", "layer": -1},
        "explain(): `layer` must be a whole number, at least 0; got -1. The first layer is 0.",
    ),
    "no layer": (
        {"rule": "layer"},
        "explain(): rule 'layer' (q·k / ((layer + 1) √d_k)) needs `layer`, the layer's place in the model, counted from "
        "0; got none. Add layer=3, or --layer 3 on the command line.",
    ),
    "sqrt_dmodel": (
        {"rule": "sqrt_dmodel", "d_k": 60},
        "explain(): rule 'sqrt_dmodel' (q·k / √d_model) needs a d_model that is a multiple of d_k; got 512 and 60. "
        "Use a d_model of 480 or 540.",
    ),
    "rule of another score": (
        {"rule": "dk", "score": "cosine"},
        "explain(): rule 'dk' (q·k / d_k) is for score 'dot'; score 'cosine' is q·k with the lengths divided out already. "
        "Leave the rule out, or use 'qk_norm' or 'none'.",
    ),
    "rule of additive": (
        {"rule": "softcap", "score": "additive"},
        "explain(): rule 'softcap' (c tanh(q·k / (c √d_k)), c = 50) is for score 'dot'; score 'additive' has no scale: its "
        "tanh bounds it. Leave the rule out, or use 'none'.",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), EXPLAIN.values(), ids=EXPLAIN)
def test_the_sentence_of_explain(changes, sentence):
    with pytest.raises(InputError) as error:
        attemper.explain(**{"text": "Love Apple phones", **changes})
    assert str(error.value) == sentence


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


NARROW = Serves(
    devices=("cuda",),
    additive=False,
    unless=lambda request: "serves lengths up to 1000" if request.keys > 1000 else None,
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
        choose("attention", replace(PLAIN, **change), "narrow")
    assert str(error.value) == f"attention(): kernel='narrow' {clause}. Change the inputs or use kernel='auto'."


def test_auto_takes_the_first_that_serves(monkeypatch):
    three = {"narrow": NARROW, "blockwise": Serves(), "reference": Serves()}
    monkeypatch.setattr(attemper.kernels, "KERNELS", three)
    assert choose("attention", PLAIN, "auto") == "narrow"
    assert choose("attention", replace(PLAIN, keys=1001), "auto") == "blockwise"
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
