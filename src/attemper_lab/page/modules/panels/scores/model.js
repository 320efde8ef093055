// Four ways to compare a query with a key: in the plane, where one can see them, and on random vectors of d entries.

import { WIDEST, normalTable } from "../../maths/random.js";
import { lane, subject } from "../../maths/rules.js";

/** Name → how a score is written and what bounds it. `rule` is the bench's name for it. */
export const SCORES = {
  dot: { label: "dot product", formula: "q·k", rule: "none", bound: "none", cost: "1 product per number" },
  scaled: { label: "scaled dot product", formula: "q·k / √d", rule: "sqrt_dk", bound: "none", cost: "1 product per number" },
  cosine: { label: "cosine", formula: "q·k / (|q| |k|)", rule: "cosine", bound: "|score| ≤ 1", cost: "1 product per number, 2 lengths" },
  additive: { label: "additive", formula: "Σ w tanh(q + k)", rule: "additive", bound: "|score| ≤ Σ|w|", cost: "1 tanh per number" },
};
export const QUERY = [1.6, 0.8]; // of the plane
export const QUERIES = 16;
export const KEYS = 64;

/** The key of the plane: `turn` degrees from the query, of a length. */
export function planeKey({ turn, length }) {
  const angle = Math.atan2(QUERY[1], QUERY[0]) + (turn * Math.PI) / 180;
  return [length * Math.cos(angle), length * Math.sin(angle)];
}

/** The four scores of the plane; w is (1, 1). */
export function planeScores(state) {
  const k = planeKey(state),
    dot = QUERY[0] * k[0] + QUERY[1] * k[1],
    size = Math.hypot(...QUERY) * state.length;
  return {
    dot,
    scaled: dot / Math.SQRT2,
    cosine: size ? dot / size : 0,
    additive: Math.tanh(QUERY[0] + k[0]) + Math.tanh(QUERY[1] + k[1]),
  };
}

const drawn = new Map(); // by seed
function tables(seed) {
  if (!drawn.has(seed)) {
    drawn.clear();
    drawn.set(seed, {
      ...Object.fromEntries(["query", "key", "gradient", "weight"].map((what) => [what, normalTable(what, seed)])),
      spreads: null,
    });
  }
  return drawn.get(seed);
}

function given(d, seed) {
  const { query, key, gradient, weight } = tables(seed),
    w = Float64Array.from(weight(1, d).subarray(0, d), (one) => one / Math.sqrt(d));
  return subject({
    q: query(QUERIES, d),
    k: key(KEYS, d),
    g: gradient(QUERIES, KEYS),
    weight: w,
    m: QUERIES,
    n: KEYS,
    d,
    heads: 1,
    stride: WIDEST,
  });
}

/** What each score makes of the same vectors; a bare cosine is QK-norm without its √d. */
export function compared({ d, seed }) {
  const shared = given(d, seed);
  return Object.fromEntries(Object.entries(SCORES).map(([name, { rule }]) => [name, lane(rule, shared)]));
}

/** The spread of each score at every d of a list; measured once for each seed. */
export function spreads(seed, ds) {
  const kept = tables(seed);
  kept.spreads ??= ds.map((d) => {
    const found = compared({ d, seed });
    return Object.fromEntries(Object.keys(SCORES).map((name) => [name, found[name].signs.std]));
  });
  return kept.spreads;
}
