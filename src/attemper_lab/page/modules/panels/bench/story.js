// The derivation as a story: prose on one side, and on the other the histogram of the scores, which moves with d_k.

import { asPower } from "../../draw/axes.js";
import { say } from "../../draw/words.js";
import { criticalSpread } from "../../maths/signs.js";
import { stepSlider } from "./controls.js";
import { logitsChart } from "./lanes.js";
import { D_STEPS } from "./model.js";

const PAPERS = {
  vaswani: "https://arxiv.org/abs/1706.03762",
  t5: "https://arxiv.org/abs/1910.10683",
  mup: "https://arxiv.org/abs/2203.03466",
  derrida: "https://doi.org/10.1103/PhysRevB.24.2613",
};
const link = (words, paper) => ({ link: PAPERS[paper], words });
const term = (words, part) => ({ part, words });
const digits = (number, places) => (number >= 100 ? number.toFixed(0) : number.toFixed(places));
/** A factor as one says it: 2.7, 2,400, or a power of ten. */
const factor = (number) =>
  number < 10
    ? number.toFixed(1)
    : number < 1e6
      ? Math.round(Number(number.toPrecision(2))).toLocaleString("en")
      : asPower(10 ** Math.round(Math.log10(number)));

/** How far the best key of a query leads the second, as a mean over queries. */
function lead({ rows, logits }, n) {
  let sum = 0;
  for (let i = 0; i < rows.length; i++) {
    let first = -Infinity,
      second = -Infinity;
    for (let j = i * n; j < (i + 1) * n; j++) {
      if (logits[j] > first) [first, second] = [logits[j], first];
      else if (logits[j] > second) second = logits[j];
    }
    sum += first - second;
  }
  return sum / rows.length;
}

/** Sections: a heading, the part of the picture that it is about, and paragraphs of words, terms, links and live numbers. */
const SECTIONS = [
  {
    title: "A score is a sum",
    part: "bars",
    text: [
      [
        "To compare a query q with a key k, attention multiplies the two vectors number by number and adds up the d_k products. Take vectors " +
          "that have nothing to do with each other: every entry is random, with mean 0 and variance 1. Then each product has mean 0 and " +
          "variance 1 too. The sums are the ",
        term("scores in the histogram", "bars"),
        ": as many below zero as above.",
      ],
    ],
  },
  {
    title: "Variances add up",
    part: "spread",
    text: [
      ["The products are independent, so the variance of their sum is the sum of their variances:"],
      { formula: "Var(q·k) = 1 + 1 + … + 1 = d_k" },
      [
        "The ",
        term("spread", "spread"),
        ", or standard deviation, is its root, √d_k. For d_k = ",
        ({ d }) => String(d),
        " that is ",
        ({ d }) => digits(Math.sqrt(d), 2),
        "; the scores drawn here measure ",
        ({ spread }) => digits(spread, 2),
        ". Nothing about the vectors' meaning is in this number. It counts dimensions.",
      ],
    ],
  },
  {
    title: "Softmax sees differences",
    part: "none",
    text: [
      [
        "Softmax makes weights of scores with the exponential function, so a key that leads by 1 gets 2.7 times the weight of the next, and a key " +
          "that leads by 8 gets 3,000 times. ",
        term("Without the divisor", "none"),
        " the best of ",
        ({ n }) => String(n),
        " keys leads the second by ",
        ({ ahead }) => digits(ahead, 1),
        " on average, a factor of ",
        ({ ahead }) => factor(Math.exp(ahead)),
        ", and takes ",
        ({ top }) => top.toFixed(2),
        " of the weight. No key is related to any query here. ",
        ({ top }) =>
          top > 0.5
            ? "A model that starts like this has made its choices before it has learned anything."
            : "At so small a d_k the choice is still open; drag it to the right.",
      ],
    ],
  },
  {
    title: "Why the root",
    part: "chosen",
    text: [
      [
        "Divide all scores by a number c, and their variance is divided by c². To make it 1 for heads of every size, c² must be d_k, so c is ",
        term("√d_k", "chosen"),
        ". Divided by √d_k, the scores spread by ",
        ({ scaled }) => digits(scaled, 2),
        ({ scaled }) =>
          Math.abs(scaled - 1) < 0.3
            ? " here, and stay near 1 when you drag d_k."
            : " here: so few random numbers stray, and more of them come near 1.",
        " Divided by d_k itself they would spread by ",
        ({ d, spread }) => (spread / d).toPrecision(2),
        ": the larger the head, the more alike all keys would look. The argument is a footnote of ",
        link("Attention Is All You Need", "vaswani"),
        ".",
      ],
    ],
  },
  {
    title: "How wide is too wide?",
    part: "limit",
    text: [
      [
        "The largest of n random scores lies about √(2 ln n) spreads above their mean. Softmax over them has a threshold at the same number: while " +
          "their spread is below ",
        term("√(2 ln n)", "limit"),
        ", many keys share the weight; above it the weight condenses on a few, as physicists know it from ",
        link("the random energy model", "derrida"),
        ". For ",
        ({ n }) => String(n),
        " keys the threshold is ",
        ({ limit }) => limit.toFixed(2),
        ", which unscaled scores pass at d_k = ",
        ({ limit }) => String(Math.ceil(limit ** 2)),
        ".",
      ],
    ],
  },
  {
    title: "It is a start, not a law",
    part: "chosen",
    text: [
      [
        "All this is true of random vectors, and so of a model before training. Training aligns queries with their keys, and W_Q and W_K can learn any " +
          "factor. ",
        link("T5", "t5"),
        " divides by nothing and draws W_Q smaller instead, and ",
        link("µP", "mup"),
        " divides by d_k, for models that are made wider. What a model loses without the divisor is measured at the end of this page.",
      ],
    ],
  },
];

/** `{node, svg, update(state, found), stop()}`: `found` has both lanes, without a divisor and with √d_k. */
export function story(page) {
  const { make } = page,
    live = [];
  const slider = stepSlider(page, { key: "d", id: "story-d", label: "d_k", says: "numbers per vector", steps: D_STEPS }),
    chart = logitsChart(page),
    figure = make("figure", {}, chart.svg, slider.node);
  const show = (part) => {
    figure.dataset.part = part;
  };
  function piece(given, home) {
    if (typeof given === "string") return given;
    if (given.link) return make("a", { href: given.link, target: "_blank", rel: "noreferrer noopener" }, given.words);
    if (given.part) {
      const there = () => show(given.part),
        back = () => show(home);
      return make(`span.tie.${given.part}`, { onpointerenter: there, onpointerleave: back }, given.words);
    }
    const node = make("span.live");
    live.push([node, given]);
    return node;
  }
  const sections = SECTIONS.map(({ title, part, text }) =>
    make(
      "section",
      { "data-part": part },
      make("h2", {}, title),
      text.map((one) =>
        one.formula
          ? make("p.formula", {}, one.formula)
          : make(
              "p",
              {},
              one.map((given) => piece(given, part)),
            ),
      ),
    ),
  );
  // the picture points out what is being read
  const read = new Set(); // of two that are there, the one that came later
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) read[isIntersecting ? "add" : "delete"](target);
      if (read.size) show([...read].at(-1).dataset.part);
    },
    { rootMargin: "-45% 0px -50% 0px" },
  );
  for (const section of sections) seen.observe(section);
  show(SECTIONS[0].part);
  return {
    node: make("div.story-line", { "data-control": "bench.story" }, make("div.prose", {}, sections), figure),
    svg: chart.svg,
    stop: () => seen.disconnect(),
    update(state, found) {
      const { bare, second } = found;
      const numbers = {
        d: state.d,
        n: state.n,
        spread: bare.signs.std,
        top: bare.signs.top_weight,
        ahead: lead(bare, state.n),
        scaled: second.signs.std,
        limit: criticalSpread(state.n),
      };
      slider.show(state);
      chart.update({ ...state, aligned: false }, { lanes: [bare, second] });
      for (const [node, of] of live) say(page, node, of(numbers));
    },
  };
}
