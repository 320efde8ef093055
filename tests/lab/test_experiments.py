"""The contract: every experiment's question, options, rows and verdict; and what bad input gets."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch

from attemper import __version__
from attemper.errors import InputError
from attemper_lab import NAMES, experiment
from attemper_lab.claims import claims
from attemper_lab.engine.experiment import Expectation, generator, key
from attemper_lab.exact import jacobian, parallel
from attemper_lab.maths import gradients, moments, stats, theory
from close import in_float64, printed
from measured import GROUP, SMALL, small

pytestmark = pytest.mark.xdist_group(GROUP)  # in one process: what the figures are drawn from is measured once
TIMED = {"additive_cost", "parallel", "scale_cost", "heads_cost"}


@pytest.mark.parametrize("name", [name for name in NAMES if not experiment(name).trains])
def test_an_experiment_keeps_the_contract(name):
    subject = experiment(name)
    assert subject.name == name
    assert subject.question.endswith("?")
    rows = small(name)
    assert rows == json.loads(json.dumps(rows)) or any(value != value for row in rows for value in row.values())
    parameters = {parameter.name for parameter in subject.parameters}
    for row in rows:
        assert {"experiment", "attemper", "torch", "python", "seed", "device"} | parameters <= set(row)
        assert row["attemper"] == __version__
    verdict = subject.verdict(rows)
    assert verdict.sentence
    assert verdict.agrees == all(number.agrees for number in verdict.expectations)
    if name not in TIMED:  # the seed decides, and nothing else: the last cell measured alone, after whatever ran before
        *_, last = subject.cells({**subject.settings(), **SMALL[name]})
        alone = subject.rows(last)
        assert alone == rows[-len(alone) :]


def test_every_claim_of_an_experiment_is_a_claim():
    ids = {claim.id for claim in claims.CLAIMS}
    assert {claim for name in NAMES for claim in experiment(name).claims} <= ids


def test_a_random_stream_depends_on_its_names_alone():
    first = generator("cpu", "a", 1, 0.5).initial_seed()
    assert first == generator("cpu", "a", 1, 0.5).initial_seed()
    assert first != generator("cpu", "a", 2, 0.5).initial_seed()


def test_the_key_of_a_cell_does_not_depend_on_its_order():
    assert key({"a": 1, "b": 2.0}) == key({"b": 2.0, "a": 1})


def test_cells_are_every_combination():
    subject = experiment("two_keys")
    cells = subject.cells({"d": (1, 2), "samples": (1000,), "seed": (0, 1), "device": ("cpu",)})
    assert [(cell["d"], cell["seed"]) for cell in cells] == [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("two_keys", {"d": "0"}, "run two_keys: --d must be a whole number of at least 1; got '0'. Type --d 1,4,16."),
        ("two_keys", {"d": "1,x"}, "run two_keys: --d must be a whole number of at least 1; got 'x'. Type --d 1,4,16."),
        (
            "saturation",
            {"n": "1"},
            "run saturation: --n must be a whole number of at least 2 (one key always has all the weight); got '1'. "
            "Type --n 16,128,1024.",
        ),
        ("saturation", {"s": "-1"}, "run saturation: --s must be a number above 0; got '-1'. Type --s 0.25,0.5,1.0."),
        ("saturation", {"s": "inf"}, "run saturation: --s must be a number above 0; got 'inf'. Type --s 0.25,0.5,1.0."),
        (
            "divisors",
            {"rule": "sqrt_d"},
            "run divisors: unknown --rule 'sqrt_d'. Did you mean 'sqrt_dk'? "
            "Known: 'none', 'sqrt_dk', 'dk', 'sqrt_dmodel'.",
        ),
        (
            "two_keys",
            {"dd": "3"},
            "run two_keys: unknown option '--dd'. Did you mean '--d'? Known: '--d', '--samples', '--seed', '--device'.",
        ),
        (
            "two_keys",
            {"device": "warp"},
            "run two_keys: --device 'warp' is not usable here; `attemper env` lists what is. Type --device cpu.",
        ),
    ],
)
def test_impossible_parameters(name, options, sentence):
    with pytest.raises(InputError) as error:
        experiment(name).settings(options)
    assert str(error.value) == sentence


def test_an_unknown_experiment_and_preset():
    with pytest.raises(InputError, match=r"unknown experiment 'jacobain'. Did you mean 'jacobian'\?"):
        experiment("jacobain")
    with pytest.raises(InputError, match=r"run two_keys: unknown --preset 'full'. It has none: leave --preset out."):
        experiment("two_keys").settings(preset="full")


def test_measuring_needs_torch_alone():
    code = (
        "import sys\n"
        "for name in ('joblib', 'altair', 'pyarrow', 'vl_convert', 'pandas', 'rich', 'typer'): sys.modules[name] = None\n"
        "from attemper_lab import experiment\n"
        "from attemper_lab.engine.sweep import sweep\n"
        "found = experiment('two_keys')\n"
        "print(len(sweep(found, {**found.settings(), 'd': (2,), 'samples': (1000,)}).rows))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "1\n", done.stderr


def test_closed_forms():
    assert theory.critical_std(1024) == printed(3.7233, 4)
    assert theory.jacobian_square(0.5) == in_float64(1 / 12)
    assert theory.two_key_slope(64) == printed(0.0353, 4)
    assert theory.top_weight_cap(1.0, 1024) == printed(0.007, 3)
    assert theory.bound_for(0.9, 1024) == printed(4.56, 2)
    assert theory.bound_for(0.9, 131072) == printed(6.99, 2)
    assert theory.jacobian_trace(3.0, 1024) is None
    assert theory.entropy(8.0, 1024) > theory.entropy(32.0, 1024) > 0


def test_t_quantiles_are_those_of_the_tables():
    """Two-sided 5 %, from any table of Student's t; and a normal law's for many degrees of freedom."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 7: 2.365, 31: 2.040, 10_000: 1.960}
    assert {freedom: round(stats.t_quantile(freedom, 0.05), 3) for freedom in table} == table
    assert stats.t_quantile(7, 1 / 16_000) == printed(8.4845, 4)  # and not 4
    assert math.isnan(stats.t_quantile(0, 0.05))


@pytest.mark.parametrize("batches", [2, 8])
def test_an_interval_of_few_batches_covers_as_often_as_it_says(batches):
    """Eight batches, 95 %: with the normal law's 1.96 it would be 91 %. Two: with two degrees of freedom, not one, 86 %."""
    stream = torch.Generator().manual_seed(0)
    found = [stats.over_batches(torch.randn(batches, generator=stream)).columns("x") for _ in range(4000)]
    inside = sum(row["x_low"] <= 0 <= row["x_high"] for row in found) / len(found)
    assert abs(inside - 0.95) < 4 * math.sqrt(0.95 * 0.05 / len(found))


@pytest.mark.parametrize(("s", "n"), [(0.02, 4), (0.5, 2), (1.0, 16), (4.0, 3), (8.0, 64)])
def test_exact_moments_are_those_of_drawn_logits(s, n):
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(20_000, n, generator=stream, dtype=torch.float64)
    weights = torch.softmax(s * x, -1)
    p2, p3 = weights.square().sum(-1), weights.pow(3).sum(-1)
    along = (weights * (x - (weights * x).sum(-1, keepdim=True))).square().sum(-1)  # |Jx|²
    drawn = (1 - p2, p2 - 2 * p3 + p2.square(), along, -torch.special.xlogy(weights, weights).sum(-1))
    for exact, values in zip(moments.of_logits(s, n), drawn, strict=True):
        assert abs(exact - values.mean()) < 4.5 * values.std() / math.sqrt(len(values)) + 1e-7


def test_the_mean_top_weight_is_that_of_draws():
    """With two keys it is the mean of a logistic function of |z₁ − z₂|, one integral; with more, that of many draws."""
    z = torch.linspace(0, 40, 40_001, dtype=torch.float64)
    for s in (0.3, 1.0, 4.0):
        density = torch.exp(-(z / s).square() / 4) / (s * math.sqrt(math.pi))
        assert moments.top_weight(s, 2) == printed(float(torch.trapezoid(torch.sigmoid(z) * density, z)), 6)
    stream = torch.Generator().manual_seed(5)
    for n, s in ((16, 1.0), (16, 6.0), (300, 3.0)):
        top = (s * torch.randn(20_000, n, generator=stream, dtype=torch.float64)).softmax(-1).amax(-1)
        assert abs(float(top.mean()) - moments.top_weight(s, n)) < 4.5 * float(top.std()) / math.sqrt(len(top))
    assert moments.top_weight(moments.spread_at(1024, 0.5), 1024) == printed(0.5, 5)
    bare = moments.top_weight_of_dot_products(64, 1024, 1.0)
    assert moments.top_weight(7.0, 1024) < bare < moments.top_weight(9.0, 1024)


GRADIENT = {"d": (2, 4, 16), "n": (128,), "rule": ("none", "sqrt_dk"), "batches": (800,), "projected": (0,)}


@pytest.fixture(scope="module")
def gradient_rows():
    return experiment("gradient").run(**GRADIENT)


def test_the_gradient_is_that_of_its_closed_form(gradient_rows):
    """At small d_k, where every part of it counts: RMS and median, at the softmax's input and at q."""
    subject = experiment("gradient").expect(gradient_rows)
    assert len(subject) == 4 * len(gradient_rows)
    assert [number for number in subject if not number.agrees] == []


def test_the_gradient_at_q_without_its_part_along_q_does_not_agree(gradient_rows, monkeypatch):
    """scale² d_k E‖J‖_F², which takes J to be independent of the keys along q, is no closed form."""

    def independent(d, n, scale):
        square = moments.of_dot_products(d, n, scale).square
        return {"logits": math.sqrt(square), "query": scale * math.sqrt(d * square)}

    changed = [
        {
            **row,
            "query_rms_theory": independent(row["d"], row["n"], 1 if row["rule"] == "none" else row["d"] ** -0.5)[
                "query"
            ],
        }
        for row in gradient_rows
    ]
    missed = [number.quantity for number in experiment("gradient").expect(changed) if not number.agrees]
    assert len(missed) >= 4
    assert all(name.startswith("RMS gradient at q") for name in missed)


def test_lengths_without_vectors_are_those_of_vectors():
    """|dL/dq| by autograd through torch's own softmax in float64, against the law that leaves the vectors out."""
    d, n, scale, queries = 8, 16, 1.0, 4000
    stream = torch.Generator().manual_seed(3)
    query, upstream = torch.randn(2, queries, d, generator=stream, dtype=torch.float64)
    key, value = torch.randn(2, queries, n, d, generator=stream, dtype=torch.float64)
    query.requires_grad_()
    weights = torch.softmax(scale * torch.einsum("qd,qnd->qn", query, key), -1)
    output = torch.einsum("qn,qnd->qd", weights, value)
    (to_query,) = torch.autograd.grad(output, query, torch.nn.functional.normalize(upstream, dim=-1))
    drawn = gradients.lengths(d, n, scale)["query"].flatten()
    for share in (0.1, 0.5, 0.9):
        below = (to_query.norm(dim=-1) < drawn.quantile(share)).double().mean()
        assert abs(below - share) < 4.5 * math.sqrt(share * (1 - share) / queries)


def test_the_crossings_that_are_written_down_are_those_of_fresh_draws():
    """They are the means over 96 sets of draws; one more set differs from them by its own error."""
    for (n, unit), written in gradients.CROSSINGS.items():
        if n == 128:
            error = math.sqrt(96) * gradients.CROSSING_ERRORS[n, unit]
            assert abs(gradients.estimate(n, unit, seed=99) - written) < 4.5 * error
    assert gradients.crossing(128, "logits") < gradients.crossing(128, "query")


def test_chi_square_quantiles():
    """From any table: the median and the 95 % point of one, ten and a hundred degrees of freedom."""
    uniform = torch.tensor([0.5, 0.95], dtype=torch.float64)
    for freedom, table in ((1, (0.455, 3.841)), (10, (9.342, 18.307)), (100, (99.334, 124.342))):
        for found, expected in zip(gradients.chi_square(freedom, uniform).tolist(), table, strict=True):
            assert found == printed(expected, 3)


def test_the_peak_of_the_jacobian_is_its_largest_value():
    at, most = jacobian.peak(128)
    around = [moments.of_dot_products(d, 128, 1.0).square for d in range(2, 60)]
    assert most == max(around)
    assert around.index(most) + 2 == at


def test_a_test_of_the_sign_has_no_interval():
    """Half a nat expected, give or take half a nat, is a test of the sign in disguise: 0.999 would pass and 1.001 not."""
    number = Expectation("gain", 0.0, 1.2, 0.0, "source", "sign", above=True)
    assert number.agrees
    assert number.written() == ("> 0", "sign")
    assert not dataclasses.replace(number, measured=0.0).agrees
    assert not dataclasses.replace(number, measured=math.nan).agrees


def test_exact_moments_of_two_keys_are_an_integral():
    """tr J of two keys is 2 E p(1−p), p = σ(x), x ~ N(0, 2s²): a sum over a fine grid says the same to ten digits."""
    x = torch.linspace(-60, 60, 200_001, dtype=torch.float64)
    density = torch.exp(-x.square() / (4 * 9.0))
    p = torch.sigmoid(x)
    expected = float((2 * p * (1 - p) * density).sum() / density.sum())
    assert moments.of_logits(3.0, 2).trace == in_float64(expected)
    assert moments.of_logits(1e6, 4) is None


def test_moments_approach_the_random_energy_model():
    """m(1−m)/3 and m from above and below, as n grows at the same m."""
    m = 0.4
    off = [abs(moments.of_logits(theory.critical_std(n) / m, n).trace / m - 1) for n in (2**8, 2**16, 2**32)]
    assert off[0] > off[1] > off[2]
    assert off[2] < 0.1


def test_a_loop_without_its_calls_is_the_fastest_of_each_call_and_never_less_than_nothing():
    """Two tokens, three rounds; a disturbed round of either call changes nothing, and noise does not make work negative."""
    quiet = {"call": [5.0, 5.0, 5.0], "empty": [3.0, 3.0, 3.0]}
    assert parallel.without_calls([quiet, quiet]) == (6.0, 4.0)
    assert parallel.without_calls([quiet, {"call": [90.0, 5.0, 7.0], "empty": [3.0, 80.0, 4.0]}]) == (6.0, 4.0)
    assert parallel.without_calls([{"call": [3.0], "empty": [3.5]}]) == (3.5, 0.0)
