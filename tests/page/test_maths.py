"""The page's arithmetic in a real Chromium against the library's: every sign, gradient and rule, on the same inputs."""

import base64
import math
import re

import pytest
import torch

import attemper
from attemper_lab.maths import theory
from attemper_lab.page import joined, normal
from attemper_lab.page.draws import STREAMS
from close import in_float32, in_float64
from judge import SIGNS, assert_within
from page.opened import GROUP

pytestmark = pytest.mark.xdist_group(GROUP)

RULES = ["sqrt_dk", "none", "dk", "sqrt_dmodel", "after", "fp16", "qk_norm", "cosine", "softcap", "additive"]
DERIVED = ["top_weight", "effective_keys", "evenness", "jacobian_trace"]
SHAPES = [
    (8, 16, 1),
    (12, 64, 64),
    (5, 37, 130),
    (4, 200, 1024),
]  # queries, keys, d_k: also those that no loop's step divides
HEADS = 8
SHOWN = 9
"""Weights that the page draws one by one."""
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def maths(browser):
    """Calls a function in a page that has nothing but the page's modules: `maths("(needed, given) => …", given)`."""
    page = browser.new_page()
    entries = (
        "page/maths/rules.js",
        "page/maths/random.js",
        "page/panels/bench/model.js",
        "page/panels/bench/numbers.js",
    )
    page.add_script_tag(content=joined.script(*entries))
    yield lambda function, given=None: page.evaluate(function, given)
    page.close()


def drawn(m: int, n: int, d: int) -> dict[str, torch.Tensor]:
    weight = normal("weight", 1, d)[0] / math.sqrt(d)
    return {"q": normal("query", m, d), "k": normal("key", n, d), "g": normal("gradient", m, n), "weight": weight}


def by_library(rule: str, given: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Signs, weights and both gradients. The values are the unit vectors, so that dL/d(output) is dL/dp."""
    q, k, g, weight = (given[name].to(dtype, copy=True) for name in ("q", "k", "g", "weight"))
    d, n = q.shape[-1], len(k)
    q.requires_grad_()
    bias = torch.zeros(len(q), n, dtype=dtype, requires_grad=True)  # its gradient is that at the softmax's input
    unit, factor = torch.eye(n, dtype=dtype), 1.0
    if rule == "additive":
        output, vitals = attemper.additive_attention(q, k, unit, weight, mask=bias)
    elif rule in ("qk_norm", "cosine"):
        scale = attemper.rule("qk_norm").scale(head_dim=d) if rule == "qk_norm" else 1.0
        output, vitals = attemper.cosine_attention(q, k, unit, scale=scale, mask=bias)
    elif rule == "fp16":
        scores = q @ k.T
        rounded = scores + (scores.half().to(dtype) - scores).detach()  # the gradient passes the rounding as it is
        # one query of one entry, 1, for each row: its keys are the logits
        ones = torch.ones(len(q), 1, 1, dtype=dtype)
        output, vitals = attemper.attention(
            ones, rounded[..., None], unit.expand(len(q), n, n), scale=1.0, mask=bias[:, None]
        )
        output, vitals = output[:, 0], vitals.each(lambda sign: sign[:, 0])
    else:
        name = "none" if rule == "after" else rule
        factor = d**-0.5 if rule == "after" else 1.0
        scale = attemper.rule(name).scale(head_dim=d, heads=HEADS)
        output, vitals = attemper.attention(q, k, unit, scale=scale, softcap=attemper.rule(name).softcap, mask=bias)
    to_query, to_logits = torch.autograd.grad(factor * output, (q, bias), g)
    found = {name: getattr(vitals, name).detach() for name in (*SIGNS, *DERIVED)}
    gradients = {"logits": to_logits.norm(dim=-1), "query": to_query.norm(dim=-1)}
    for unit_name, lengths in gradients.items():
        found |= {
            f"gradient at {unit_name}": lengths,
            f"median at {unit_name}": lengths.quantile(0.5),
            f"rms at {unit_name}": lengths.square().mean().sqrt(),
        }
    weights = output.detach() * factor
    over_rows = {f"{name} over rows": found[name].mean() for name in (*SIGNS, *DERIVED) if name not in ("peak", "lse")}
    over_rows |= {"peak over rows": found["peak"].max(), "std over rows": found["variance"].mean().sqrt()}
    largest = weights.sort(descending=True).values.mean(0)
    over_rows |= {"largest weights": largest[:SHOWN], "all other weights": largest[SHOWN:].sum()}
    return {**found, **over_rows, "weights": weights}


IN_PAGE = """([name, given]) => {
  const { m, n, d, heads } = given, stride = Math.max(n, d);
  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (one) => one.charCodeAt(0)).buffer);
  const wide = (text, rows) => {
    const given = floats(text), width = given.length / rows, all = new Float32Array(rows * stride);
    for (let i = 0; i < rows; i++) all.set(given.subarray(i * width, (i + 1) * width), i * stride);
    return all;
  };
  const { subject, lane, sortedWeights } = needed["page/maths/rules.js"], weight = floats(given.weight);
  const vectors = { q: wide(given.q, m), k: wide(given.k, n), g: wide(given.g, m), weight };
  const found = lane(name, subject({ ...vectors, m, n, d, heads, stride }));
  const signs = Object.fromEntries(Object.keys(found.rows[0]).map((sign) => [sign, found.rows.map((row) => row[sign])]));
  const { logits, query } = found.statistics, sorted = sortedWeights(found, { m, n }, given.shown);
  const over = Object.fromEntries(Object.entries(found.signs).map(([sign, value]) => [`${sign} over rows`, value]));
  return { ...signs, ...over, "largest weights": [...sorted.top], "all other weights": sorted.rest,
    weights: [...found.weights].map((one) => one * found.factor),
    "gradient at logits": [...found.gradients.logits], "gradient at query": [...found.gradients.query],
    "median at logits": logits.median, "median at query": query.median, "rms at logits": logits.rms, "rms at query": query.rms };
}"""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_page_computes_what_the_library_does(maths, rule, shape):
    m, n, d = shape
    given = drawn(m, n, d)
    if rule == "fp16":  # products that are exact, so that every way rounds the same number
        given = given | {name: (given[name] * 16).round() / 16 for name in ("q", "k")}
    exact, plain = (by_library(rule, given, dtype) for dtype in (torch.float64, torch.float32))
    arrays = {name: base64.b64encode(tensor.numpy().tobytes()).decode() for name, tensor in given.items()}
    arguments = arrays | {"m": m, "n": n, "d": d, "heads": HEADS, "shown": SHOWN}
    found = maths(IN_PAGE, [rule, arguments])
    # a logit is a float32 number: what rounding the largest one moves
    room = EPS * exact["peak"].abs().max().item()
    for name, truth in exact.items():
        ours = torch.tensor(found[name], dtype=torch.float32).reshape(truth.shape)
        size = max(1.0, truth[truth.isfinite()].abs().max().item())
        assert_within(f"{rule} {shape} {name}", ours, truth, plain[name], room * size)


def test_the_draws_are_the_same(maths):
    for what in STREAMS:
        for seed in (0, 7):
            call = "([what, seed]) => [...needed['page/maths/random.js'].normalTable(what, seed)(3, 1024)]"
            ours = torch.tensor(maths(call, [what, seed]), dtype=torch.float64).reshape(3, 1024)
            theirs = normal(what, 3, 1024, seed).double()
            # both compute in float64; the last bit of a logarithm or a cosine may turn the rounding to float32
            assert ((ours - theirs).abs() <= EPS * theirs.abs()).all()
            assert (ours != theirs).double().mean() < 0.001


def test_a_table_that_grows_keeps_its_numbers(maths):
    grown = """() => { const table = needed["page/maths/random.js"].normalTable("key", 3); table(2, 5); table(4, 3);
      const all = table(4, 7); return Array.from({ length: 4 }, (_, i) => [...all.slice(1024 * i, 1024 * i + 7)]); }"""
    whole = """() => { const all = needed["page/maths/random.js"].normalTable("key", 3)(4, 7);
      return Array.from({ length: 4 }, (_, i) => [...all.slice(1024 * i, 1024 * i + 7)]); }"""
    assert maths(grown) == maths(whole)


def test_half_precision_rounds_as_torch_does(maths):
    exact = [
        0.0,
        1.0,
        2049.0,
        2051.0,
        65504.0,
        65519.0,
        65520.0,
        1e9,
        6e-8,
        2.9e-8,
        3e-5,
        6.1e-5,
        0.1,
        -1 / 3,
        1023.75,
        4095.9,
    ]
    scattered = (normal("key", 4, 512) * torch.tensor([[1e-6], [1.0], [300.0], [3e4]])).flatten().double().tolist()
    found = maths("(all) => all.map((one) => String(needed['page/maths/softmax.js'].half(one)))", exact + scattered)
    expected = torch.tensor(exact + scattered, dtype=torch.float64).half().double()
    assert torch.equal(
        torch.tensor([float(one.replace("Infinity", "inf")) for one in found], dtype=torch.float64), expected
    )


def test_the_threshold_is_the_labs(maths):
    for n in (2, 16, 1024):
        assert maths("(n) => needed['page/maths/signs.js'].criticalSpread(n)", n) == in_float64(theory.critical_std(n))


def test_every_rule_of_the_page_is_one_of_the_library_or_named_here(maths):
    names = maths("() => Object.keys(needed['page/maths/rules.js'].BENCH_RULES)")
    assert sorted(names) == sorted(RULES)
    assert set(names) - set(attemper.RULES) == {"after", "fp16", "additive", "cosine"}
    for name in set(names) & set(attemper.RULES):
        scale = attemper.rule(name).scale(head_dim=48, heads=HEADS)
        call = "(name) => needed['page/maths/rules.js'].BENCH_RULES[name].scale({ d: 48, heads: 8 })"
        assert maths(call, name) == in_float64(scale)


SAID = """([rule, d, n, heads]) => {
  const { computed } = needed["page/panels/bench/model.js"], words = needed["page/panels/bench/numbers.js"];
  const state = { d, n, heads, rule, aligned: false, seed: 1 }, found = computed(state);
  const of = (lane) => ({ ...lane.signs, rows: lane.rows.length, factor: lane.factor, overflowing: lane.overflowing });
  const { logits, query } = found.bare.statistics, other = found.second.statistics;
  const sentences = [...words.verdict(state, found), words.gradientWords(found)];
  const ratios = [logits.median / other.logits.median, query.median / other.query.median,
    logits.rms / other.logits.rms, query.rms / other.query.rms];
  return { bare: of(found.bare), second: of(found.second), sentences, ratios };
}"""
STORIES = ["sqrt_dk", "none", "dk", "sqrt_dmodel", "after", "fp16", "qk_norm", "softcap", "additive"]
ENDS = [(d, n, heads) for d in (1, 2, 64, 1024) for n in (2, 1024) for heads in (1, 96)]


@pytest.mark.parametrize("rule", STORIES)
def test_every_sentence_of_the_bench_holds_at_the_ends_of_its_sliders(maths, rule):
    for d, n, heads in ENDS:
        found = maths(SAID, [rule, d, n, heads])
        (first, then, gradients), bare, second = found["sentences"], found["bare"], found["second"]
        where = (rule, d, n, heads, first, then, gradients)
        limit = math.sqrt(2 * math.log(n))
        assert (f"above √(2 ln {n})" in first) == (bare["std"] > limit), where
        assert (f"below √(2 ln {n})" in first) == (bare["std"] <= limit), where
        assert ("near 1" in then) == (rule in ("sqrt_dk", "none") and d > 1 and abs(second["std"] - 1) < 0.1), where
        if "nothing changes" in then:
            assert second["std"] == bare["std"], where
            assert second["factor"] == 1, where
        assert "only" not in then or second["factor"] < 1, where
        if "hardly matters" in then:
            assert second["effective_keys"] > 0.95 * n, where
        if "times smaller than by √d_k" in then:
            assert second["std"] * math.sqrt(d * heads) == in_float32(bare["std"], terms=2), where
            assert heads > 1, where
        assert "With one head" not in then or heads == 1, where
        lowered = bare["peak"] / math.sqrt(d) - second["peak"]
        assert ("nothing to do" in then) == (rule == "softcap" and lowered < 0.01), where
        if rule == "fp16":
            assert then.startswith(f"{second['overflowing']} of {second['rows']} rows "), where
            assert ("rows has" in then) == (second["overflowing"] == 1), where
        if rule == "additive":
            assert f"on {second['rows']} queries" in then, where
        if "Both lanes" in gradients:
            assert found["ratios"] == [1, 1, 1, 1], where
        assert not re.search(r"NaN|undefined|Infinity|−0\b", " ".join(found["sentences"])), where


def test_a_rule_leaves_the_lane_beside_it_alone(maths):
    lanes = [maths(SAID, [rule, 64, 64, 8])["bare"] for rule in STORIES]
    assert all(lane == lanes[0] for lane in lanes)
