// The opening: one slider, and in two lanes on one scale how far apart the scores lie, and who gets the weight.

import { linear } from "../../draw/axes.js";
import { barPath } from "../../draw/histogram.js";
import { change, draw, picture } from "../../draw/svg.js";
import { sortedWeights } from "../../maths/rules.js";
import { criticalSpread } from "../../maths/signs.js";
import { stepSlider } from "./controls.js";
import { D_STEPS, plainLanes } from "./model.js";

const WIDE = 400,
  HIGH = 252;
const LINE = 48, // of the scores
  TICK = 24; // the height of one
const TOP = 84,
  BASE = 230, // of the weights
  BARS = 12; // the keys that get most
const PACE = 70, // milliseconds for each d_k of the sweep that plays once
  WAITS = 600; // and before it begins
const LANES = [
  { kind: "none", title: "Not divided", name: "softmax(q·k)" },
  { kind: "chosen", title: "Divided by √d_k", name: "softmax(q·k / √d_k)" },
];

/** The scores of a query from the highest on, as a mean over queries, as its weights are. */
function sortedScores({ logits, rows }, n) {
  const means = new Float64Array(n);
  for (let i = 0; i < rows.length; i++)
    logits
      .slice(i * n, (i + 1) * n)
      .sort()
      .forEach((score, rank) => {
        means[n - 1 - rank] += score / rows.length;
      });
  return means;
}

/** A lane: the scores as ticks on a line, and below them the weights that softmax makes of them, as bars. */
function laneOf(page, { kind, title, name }) {
  const { make } = page,
    pen = draw(page.document),
    svg = picture(pen, { width: WIDE, height: HIGH, name: `Scores and attention weights, ${name}` }),
    y = linear([0, 1], [BASE, TOP]),
    label = (x, at, words, anchor) => pen("text.axis-name", { x, y: at, "text-anchor": anchor }, words);
  const ticks = pen(`path.ticks.${kind}`),
    spread = pen(`path.spread.${kind}`),
    spreadWords = pen(`text.spread-name.${kind}`, { x: WIDE, y: 15, "text-anchor": "end" }),
    bars = pen(`path.bars.${kind}`),
    top = pen(`text.top.${kind}`),
    others = label(WIDE, BASE + 20, "", "end");
  const once = (node) => kind === "none" && node; // what both lanes would say
  svg.append(
    pen(
      "g",
      {},
      once(label(0, 15, "scores")),
      spreadWords,
      ticks,
      pen("path.axis", { d: `M0 ${LINE}H${WIDE}` }),
      spread,
      once(label(0, TOP - 8, "weights")),
      pen("path.grid", { d: `M0 ${y(1)}H${WIDE}M0 ${y(0.5)}H${WIDE}` }),
      bars,
      pen("path.axis", { d: `M0 ${BASE}H${WIDE}` }),
      top,
      others,
    ),
  );
  return {
    node: make("div", {}, make(`p.lane.${kind}`, {}, title), svg),
    svg,
    show(lane, scores, n) {
      const most = criticalSpread(n) * Math.sqrt(D_STEPS.at(-1)), // the highest score at the largest d_k: so that the line stays as it is
        place = linear([-most, most], [0, WIDE]);
      change(ticks, { d: Array.from(scores, (score) => `M${place(score).toFixed(1)} ${LINE - TICK}v${TICK}`).join("") });
      change(spread, { d: `M${place(-lane.signs.std)} ${LINE + 5}H${place(lane.signs.std)}` });
      spreadWords.textContent = `spread ±${lane.signs.std.toFixed(1)}`;
      const count = Math.min(BARS, n),
        { top: weights, rest } = sortedWeights(lane, { m: lane.rows.length, n }, count),
        x = linear([0, BARS], [0, WIDE]),
        high = y(weights[0]) - 8;
      change(bars, {
        d: barPath(
          weights,
          (i) => x(i),
          BASE,
          (weight) => BASE - y(weight),
          5,
        ),
      });
      change(top, high > TOP + 12 ? { x: 0, y: high } : { x: x(1), y: TOP + 22 }); // above its bar, or beside it
      top.textContent = weights[0].toFixed(2);
      others.textContent = rest < 0.005 ? "" : `others ${rest.toFixed(2)}`;
    },
  };
}

/** `{node, svgs, update(state, shown), stop()}`. The sweep moves the picture alone: the state stays what the address says. */
export function opening(page) {
  const { make } = page;
  const d = stepSlider(page, { key: "d", id: "opening-d", label: "d_k", says: "head size", steps: D_STEPS }),
    lanes = LANES.map((lane) => laneOf(page, lane)),
    pair = make("figure.pair", { "aria-label": "Who gets the weight" }, [lanes[0].node, lanes[1].node]);
  const down = make(
    "button.plain.down",
    { type: "button", onclick: () => page.head.scrollIntoView({ behavior: page.motion ? "smooth" : "auto" }) },
    "Derivation",
  );
  const node = make("div.opening", {}, pair, d.node, down);
  let playing = 0,
    played = false;
  function show(shown, state) {
    const scores = sortedScores(shown.bare, state.n);
    lanes[0].show(shown.bare, scores, state.n);
    lanes[1].show(
      shown.second,
      scores.map((score) => score / Math.sqrt(state.d)),
      state.n,
    );
    d.show(state);
  }
  function stop() {
    clearTimeout(playing);
    playing = 0;
  }
  /** Every d_k from 1 to that of the state, once. */
  function play(state, i = 0) {
    const at = { ...state, d: Math.min(D_STEPS[i] ?? state.d, state.d) };
    show(plainLanes(at), at);
    playing = at.d === state.d ? 0 : setTimeout(() => play(state, i + 1), i ? PACE : WAITS);
  }
  return {
    node,
    svgs: lanes.map((lane) => lane.svg),
    stop,
    update(state, shown) {
      stop();
      if (!played && page.motion) play(state);
      else show(shown, state);
      played = true;
    },
  };
}
