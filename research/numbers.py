"""The closed forms and published numbers that the exact experiments are held to, measured, as docs/numbers.md."""

from __future__ import annotations

from attemper_lab import experiment
from attemper_lab.engine.experiment import Expectation, Value

SETTINGS: dict[str, list[dict[str, tuple[Value, ...]]]] = {
    "worked": [{}],
    "variance": [
        {"d": (2, 16, 64, 256), "init": ("unit",), "samples": (200_000,)},
        {"d": (64,), "init": ("fan_in", "linear", "xavier", "gpt2", "t5")},
        {"d": (48,), "init": ("gpt2",)},
        {"d": (128,), "init": ("gpt3_width",)},
    ],
    "two_keys": [{"d": (16, 64, 256)}],
    "saturation": [{"n": (1024,), "s": (0.5, 1.0, 8.0, 16.0)}],
    "jacobian": [
        {"n": (256,), "d": (16, 64, 256, 1024), "rule": ("none",)},
        {"n": (256,), "d": (64,), "rule": ("sqrt_dk",)},
        {"n": (1024,), "d": (64, 256, 1024), "rule": ("none",)},
    ],
    "gradient": [
        {"d": (2, 16), "rule": ("none", "sqrt_dk"), "batches": (200,), "projected": (0,)},
        {"d": (64, 1024), "rule": ("none", "sqrt_dk"), "batches": (24,)},
    ],
    "divisors": [{"d": (128,), "heads": (96,)}],
    "bounded": [
        {"score": ("cosine", "softcap", "additive"), "bound": (1.0, 4.56), "n": (1024,)},
        {"score": ("cosine",), "bound": (6.99,), "n": (131072,)},
    ],
    "precision": [
        {"dtype": ("bfloat16",), "size": (32.0, 64.0, 128.0, 1000.0)},
        {"dtype": ("float16", "float32"), "size": (64.0,)},
    ],
    "init": [{"d": (48, 64)}],
    "width": [{}],
    "similarity": [{}],
    "ranges": [{}],
    "three_scores": [{"d": (64,), "n": (256,)}],
    "plateau": [{"steps": (2,)}],
    "antecedent": [{"rule": ("sqrt_dk",), "query": ("pronoun",)}],
    "real_heads": [{}],
    "subspaces": [{}],
}
"""The cells to measure: small, so that a test can repeat them."""


def measured() -> dict[str, list[Expectation]]:
    """Measure every cell; the numbers of each experiment beside what is expected."""
    found = {}
    for name, parts in SETTINGS.items():
        one = experiment(name)
        found[name] = [number for part in parts for number in one.expect(one.run(**part))]
    return found


def page(found: dict[str, list[Expectation]]) -> str:
    """docs/numbers.md."""
    every = [number for numbers in found.values() for number in numbers]
    same = sum(is_identity(number) for number in every)
    lines = [
        "# Numbers",
        "",
        "<!-- made by `make figures`; do not edit -->",
        "",
        f"{len(every)} numbers beside what this code measures. Sources: closed forms, exact means by quadrature, papers. A",
        "measurement agrees when it lies within the interval; the source of the interval is given. No interval is wider than a",
        f"quarter of its number, but for the levels of two tests (two fifths). {same} of them are identities: their interval is",
        "rounding, or they are counted. These test this code and are no evidence about attention.",
        "`tests/lab/test_numbers.py` measures all of them again.",
        "",
    ]
    for name, numbers in found.items():
        one = experiment(name)
        lines += [f"## {name}", "", f"{one.question} `attemper run {name}`", ""]
        lines += [
            "| quantity | expected | measured | within | agrees | source | interval |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {cell(number.quantity)} | {number.written()[0]} | {number.measured:.4g} | {number.written()[1]} | "
            f"{'yes' if number.agrees else '**no**'} | {cell(number.source)} | {cell(number.because)} |"
            for number in numbers
        ]
        lines.append("")
    return "\n".join(lines)


def is_identity(number: Expectation) -> bool:
    """Whether a number must come out if the code is right: what it is held to leaves nothing to chance."""
    return "rounding" in number.because or number.because in ("exact", "two decimals", "the digits given")


def cell(text: str) -> str:
    """Text for a Markdown table, where a bar would end the cell."""
    return text.replace("|", "\\|")


def anchored(claim: str, sentence: str) -> str:
    """The sentence of a claim in its row, where links to the claim lead."""
    return f'<a id="{claim.lower()}"></a>{sentence}'
