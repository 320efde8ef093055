"""A misspelt argument of anything public gets a sentence with the nearest name, and is still a TypeError."""

import inspect

import pytest

import attemper
from attemper import health, integrations, kernels, testing
from attemper.errors import InputError, UnknownOption

FOUND = {  # what users read, and do not make
    *("Alert", "Attended", "Clip", "Explanation", "HeadSummary", "Monitor", "Projections", "Record", "Rule", "Scan"),
    "Vitals",  # takes signs by name, and says which it knows
}
HOT = {"attention", "measure", "sdpa"}  # a wrapper costs 6 % of a small call; Python 3.13 names the nearest by itself
PLAIN = {"page", "register_attention"}  # they have no options
PUBLIC = {
    name: called
    for module, names in (
        (attemper, attemper.__all__),
        (integrations, set(integrations.__all__) - {"LightningCallback"}),  # its import takes seconds
        (testing, [name for name in vars(testing) if name.startswith("assert_")]),
        (kernels, ["why"]),
        (health, ["check"]),
    )
    for name in sorted(names)
    if callable(called := getattr(module, name)) and name not in FOUND | HOT | PLAIN
}


def options(called):
    return [name for name in inspect.signature(called).parameters if name not in ("self", "cls", "options")]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_misspelt_option_gets_the_nearest(name):
    called = PUBLIC[name]
    assert options(called)
    for right in options(called):
        wrong = f"{right}_"
        with pytest.raises(UnknownOption) as error:
            called(**{wrong: 1})
        assert str(error.value).startswith(f"{name}(): unknown option {wrong!r}. Did you mean {right!r}? Known: '")
        assert isinstance(error.value, TypeError)
        assert isinstance(error.value, InputError)


@pytest.mark.parametrize(
    ("called", "sentence"),
    [
        (
            attemper.MultiHeadAttention.from_torch,
            "MultiHeadAttention.from_torch(): unknown option 'rul'. Did you mean 'rule'?",
        ),
        (attemper.Projections.named, "Projections.named(): unknown option 'rul'. Known: 'model', 'heads'"),
        (
            lambda **option: integrations.HuggingFaceCallback.attach(None, **option),
            "HuggingFaceCallback(): unknown option 'rul'.",
        ),
    ],
)
def test_class_methods(called, sentence):
    with pytest.raises(UnknownOption) as error:
        called(rul=1)
    assert str(error.value).startswith(sentence)
