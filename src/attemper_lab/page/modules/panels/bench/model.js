// What the bench computes: the same random vectors under two rules. The vectors of a smaller d_k are the first entries of those of
// a larger one, so that a step of a slider changes as little as it can.

import { WIDEST, normalTable } from "../../maths/random.js";
import { lane, subject } from "../../maths/rules.js";

export const ALIGNED = 0.5; // an aligned key is half its query, plus noise that brings its variance back to 1
const STEPS = (count, base) => [...new Set(Array.from({ length: count }, (_, i) => Math.round(base ** i)))];
export const D_STEPS = STEPS(41, 2 ** 0.25).filter((d) => d <= 1024);
export const N_STEPS = STEPS(21, Math.SQRT2).filter((n) => n >= 2 && n <= 1024);
export const HEAD_STEPS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96];

/** The number of queries: fewer with more keys, so that a step stays fast; an additive score takes four times as long. */
const queriesFor = (n) => Math.max(16, Math.min(64, Math.floor(16384 / n)));
const ADDITIVE_SHARE = 4;

/** The rule of the second lane: the chosen one, or 1/√d_k where none is chosen; the first lane has none. */
const secondRule = (rule) => (rule === "none" ? "sqrt_dk" : rule);

const tables = new Map(); // by seed
function tablesOf(seed) {
  if (!tables.has(seed)) {
    tables.clear();
    tables.set(seed, Object.fromEntries(["query", "key", "gradient", "weight"].map((what) => [what, normalTable(what, seed)])));
  }
  return tables.get(seed);
}

/** Keys of which the first are aligned, each with its own query. */
function aligned(q, k, { m, n, d }) {
  const found = k.slice(0, n * WIDEST),
    rest = Math.sqrt(1 - ALIGNED ** 2);
  for (let i = 0; i < Math.min(m, n); i++) {
    for (let x = i * WIDEST; x < i * WIDEST + d; x++) found[x] = ALIGNED * q[x] + rest * k[x];
  }
  return found;
}

/** Both lanes of a state: `{bare, second}`. */
export function computed(state) {
  const { d, n, heads, rule, seed } = state,
    m = queriesFor(n),
    drawn = tablesOf(seed);
  const q = drawn.query(m, d),
    g = drawn.gradient(m, n),
    plain = drawn.key(n, d);
  const k = state.aligned ? aligned(q, plain, { m, n, d }) : plain;
  const weight = Float64Array.from(drawn.weight(1, d).subarray(0, d), (one) => one / Math.sqrt(d));
  const given = subject({ q, k, g, weight, m, n, d, heads, stride: WIDEST });
  const few = rule === "additive" ? subject({ ...given, weight, m: Math.max(4, m / ADDITIVE_SHARE) }) : given;
  return { bare: lane("none", given), second: lane(secondRule(rule), few) };
}

/** The lanes that the opening and the story show, whatever rule was chosen below: unrelated vectors, without a divisor and with √d_k. */
export function plainLanes(state, found = null) {
  const fits = found && !state.aligned && (state.rule === "sqrt_dk" || state.rule === "none");
  return fits ? found : computed({ ...state, rule: "sqrt_dk", aligned: false });
}
