"""What a wrong call of each public function gets: an error that names function, argument and next step (sentences.json)."""

import math
import re

import pytest
import torch

import attemper
from attemper.errors import AttemperError, InputError
from snapshots import Sentences, assert_told

KEPT = Sentences("public")
Q = torch.zeros(2, 4, 5, 8)
MASK = torch.ones(5, 5, dtype=torch.bool)
WEIGHT = torch.zeros(8)


class Answers(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


BAD = {
    "query": [torch.zeros(8), [[1.0]], Q.to_sparse(), Q.long(), Q[:, :0], Q.to(torch.complex64)],
    "key": [Q[..., :4], Q.repeat(2, 1, 1, 1)[:3], Q[:, :3], Q.repeat(1, 2, 1, 1), Q.double(), Q.to("meta"), None],
    "value": [Q[:, :, :4], Q[:, :2], Q.bfloat16(), "v"],
    "mask": [
        MASK[:3],
        MASK.expand(1, 2, 4, 5, 5),
        MASK.long(),
        "causal",
        MASK.to("meta"),
        MASK.as_subclass(Answers),
        MASK.to_sparse(),
    ],
    "causal": [1, "bottom_right", None],
    "scale": [
        math.nan,
        math.inf,
        1e39,
        "sqrt_dk",
        torch.ones(3),
        torch.ones(4, dtype=torch.int64),
        torch.ones(4).to_sparse(),
    ],
    "window": [0, -1, 2.5, "5"],
    "softcap": [0, -1.0, math.nan, "50"],
    "dropout": [1.5, -0.1, math.nan, "0.1"],
    "signs": [("entorpy",), None, "entropi", ([1],), 3],
    "kernel": ["blockwize", ["cpu"], "flash"],
    "weight": [torch.zeros(7), torch.zeros(3, 8), 1.0],
    "documents": [torch.tensor([0, 7]), torch.tensor([0, 5], dtype=torch.uint16), [0, 5], torch.tensor([[[0, 5]]])],
    "sink": [torch.zeros(3), torch.zeros(1), 1.0, torch.zeros(4, dtype=torch.int64)],
    "is_causal": ["lower_right"],
    "attn_mask": [MASK[:3]],
    "dropout_p": [2.0],
}
ATTENTION = ("query", "key", "value", "mask", "causal", "scale", "window", "softcap", "dropout", "signs", "kernel")
ATTENTION += ("documents", "sink")
ENTRIES = {
    "attention": (attemper.attention, {"query": Q, "key": Q, "value": Q}, ATTENTION),
    "measure": (attemper.measure, {"query": Q, "key": Q}, tuple(n for n in ATTENTION if n not in ("value", "dropout"))),
    "weights": (
        attemper.weights,
        {"query": Q, "key": Q},
        ("query", "key", "mask", "causal", "scale", "window", "softcap", "documents", "sink"),
    ),
    "sdpa": (
        attemper.sdpa,
        {"query": Q, "key": Q, "value": Q},
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
    ),
    "cosine_attention": (
        attemper.cosine_attention,
        {"query": Q, "key": Q, "value": Q, "scale": 2.0},
        tuple(n for n in ATTENTION if n != "softcap"),
    ),
    "additive_attention": (
        attemper.additive_attention,
        {"query": Q, "key": Q, "value": Q, "weight": WEIGHT},
        ("query", "key", "value", "weight", "mask", "causal", "window", "dropout", "signs", "documents", "sink"),
    ),
    "why": (
        attemper.kernels.why,
        {"query": Q, "key": Q, "value": Q},
        ("key", "mask", "scale", "window", "documents", "kernel"),
    ),
}
CASES = {
    f"{entry} {argument} {number}": (entry, argument, value)
    for entry, (_, _, arguments) in ENTRIES.items()
    for argument in arguments
    for number, value in enumerate(BAD[argument])
    if not (entry == "why" and value is None)
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument(case):
    entry, argument, value = CASES[case]
    function, given, _ = ENTRIES[entry]
    others = ("key", "query", "value", "heads", argument)
    if entry == "sdpa" and argument in ("query", "key", "value", "scale"):
        others += ("enable_gqa",)
    with pytest.raises(InputError) as error:
        function(**given | {argument: value})
    assert_told(str(error.value), entry, *others)
    assert isinstance(error.value, ValueError | TypeError)
    KEPT.compare(entry, f"{argument} {case.rsplit(' ', 1)[1]}", str(error.value))


def test_every_sentence_is_of_a_case():
    for entry in ENTRIES:
        KEPT.assert_cases(entry, [case.split(" ", 1)[1] for case in CASES if case.split(" ", 1)[0] == entry])


NO_OFFSETS = ([0, 3], [0, 7], [0, 4, 2, 5], [0], [1, 5])
WAYS = {
    "attention": lambda d: attemper.attention(Q, Q, Q, documents=d),
    "definition": lambda d: attemper.attention(Q, Q, Q, documents=d, kernel="reference"),
    "measure": lambda d: attemper.measure(Q, Q, documents=d),
    "weights": lambda d: attemper.weights(Q, Q, documents=d),
    "keys": lambda d: attemper.weights(Q, Q, documents=(torch.linspace(0, 5, len(d)).long(), d)),
    "cosine": lambda d: attemper.cosine_attention(Q, Q, Q, scale=1.0, documents=d),
    "additive": lambda d: attemper.additive_attention(Q, Q, Q, WEIGHT, documents=d),
    "vmapped": lambda d: torch.vmap(lambda q: attemper.weights(q, q, documents=d))(Q),
    "vmapped offsets": lambda d: torch.vmap(lambda q, d: attemper.weights(q, q, documents=d))(Q, d.expand(2, -1)),
    "compiled": lambda d: torch.compile(lambda d: attemper.weights(Q, Q, documents=d), backend="eager")(d),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("numbers", NO_OFFSETS, ids=str)
def test_numbers_that_are_no_offsets(numbers, way):
    with pytest.raises(InputError, match=r"`documents` must begin with 0, never fall, and end with the number of"):
        way(torch.tensor(numbers))


def test_signs_that_no_memory_holds():
    """A query may be expanded without memory for its rows, of which there may be more than integers count."""
    for size in (2**13, 2**20):
        y = torch.zeros(1, 1, 1, 1).expand(size, size, size, 1)
        with pytest.raises((MemoryError, RuntimeError), match=r"memory|allocate|overflow"):
            attemper.measure(y, y[..., :1, :])


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_name_that_a_function_does_not_know(entry):
    function, given, _ = ENTRIES[entry]
    with pytest.raises(TypeError, match=rf"^{entry}\(\): unknown option 'is_causal_'") as error:
        function(**given, is_causal_=True)
    assert isinstance(error.value, AttemperError)
    KEPT.compare("unknown option", entry, str(error.value))


OTHERS = {
    "merge": [lambda: attemper.merge([]), lambda: attemper.merge([3]), lambda: attemper.merge(Q)],
    "Vitals": [lambda: attemper.Vitals(entorpy=Q)],
    "rule": [lambda: attemper.rule("sqrt_d"), lambda: attemper.rule(3)],
    "entropy_floor": [
        lambda: attemper.entropy_floor(attemper.measure(Q, Q), floor=2.0),
        lambda: attemper.entropy_floor([]),
        lambda: attemper.entropy_floor(attemper.measure(Q, Q, signs=("peak",))),
    ],
    "MultiHeadAttention": [
        lambda: attemper.MultiHeadAttention(10, 4),
        lambda: attemper.MultiHeadAttention(16, 4, rule="sqrt"),
        lambda: attemper.MultiHeadAttention(16, 4, kv_heads=3),
        lambda: attemper.MultiHeadAttention(16, 4, dropout=2.0),
        lambda: attemper.MultiHeadAttention(16, 4)(torch.zeros(2, 5, 15)),
    ],
    "watch": [
        lambda: attemper.watch(3),
        lambda: attemper.watch(torch.nn.Linear(2, 2), every=0),
        lambda: attemper.watch(torch.nn.Linear(2, 2), signs=("entorpy",)),
        lambda: attemper.watch(torch.nn.Linear(2, 2), kernel="blockwize"),
        lambda: attemper.watch(torch.nn.Linear(2, 2), passes="some"),
        lambda: attemper.watch(torch.nn.Linear(2, 2), path="record.txt"),
        lambda: attemper.watch(torch.nn.Linear(2, 2), keep_steps=-1),
    ],
    "instrument": [lambda: attemper.instrument(torch.nn.Linear(2, 2)), lambda: attemper.instrument(3)],
}
SINGLE = {f"{name} {number}": make for name, makers in OTHERS.items() for number, make in enumerate(makers)}


@pytest.mark.parametrize("case", SINGLE)
def test_a_wrong_call_of_another_function(case):
    with pytest.raises(AttemperError) as error:
        SINGLE[case]()
    said = str(error.value)
    assert re.match(r"[A-Za-z_.]+(\(\): | )", said)
    assert said.endswith(".")
    KEPT.compare("others", case, said)


def test_no_error_of_the_inside_is_shown():
    """The traceback ends in one error, without "during handling of …"."""
    for case in CASES:
        entry, argument, value = CASES[case]
        function, given, _ = ENTRIES[entry]
        with pytest.raises(InputError) as error:
            function(**given | {argument: value})
        assert error.value.__suppress_context__ or error.value.__context__ is None, case
