// The rules of the bench, and a lane: the numbers of one rule on the same queries, keys and upstream gradients.

import { acrossQuery, keysTimes, lengthOf, throughSoftmax, throughTanh } from "./gradients.js";
import { additiveScores, cosineScores, dotScores, lengthsOf, tanhOf } from "./scores.js";
import { medianOf, overRows, rmsOf, rowSigns } from "./signs.js";
import { HALF_EXP_MOST, half, softmaxRow } from "./softmax.js";

const SOFTCAP = 50;

/** Name → how a rule is written, what it multiplies q·k with, and what else it does. */
export const BENCH_RULES = {
  sqrt_dk: { label: "÷ √d_k", formula: "q·k / √d_k", scale: ({ d }) => 1 / Math.sqrt(d) },
  none: { label: "no divisor", formula: "q·k", scale: () => 1 },
  dk: { label: "÷ d_k", formula: "q·k / d_k", scale: ({ d }) => 1 / d },
  sqrt_dmodel: { label: "÷ √d_model", formula: "q·k / √d_model", scale: ({ d, heads }) => 1 / Math.sqrt(d * heads) },
  after: { label: "after softmax", formula: "softmax(q·k) / √d_k", scale: () => 1, after: ({ d }) => 1 / Math.sqrt(d) },
  fp16: { label: "float16", formula: "float16(q·k)", scale: () => 1, half: true },
  qk_norm: { label: "cosine", formula: "√d_k cos(q, k)", scale: ({ d }) => Math.sqrt(d), cosine: true },
  cosine: { label: "bare cosine", formula: "cos(q, k)", scale: () => 1, cosine: true },
  softcap: { label: "softcap", formula: "50 tanh(q·k / (50 √d_k))", scale: ({ d }) => 1 / Math.sqrt(d), cap: SOFTCAP },
  additive: { label: "additive", formula: "wᵀ tanh(q + k)", scale: () => 1, additive: true },
};

/** The queries, keys and upstream gradients that lanes share. What is derived from them is computed once, on first use. */
export function subject({ q, k, g, weight, m, n, d, heads, stride }) {
  const shape = { m, n, d, stride },
    made = {};
  const once = (name, make) => () => (made[name] ??= make());
  return {
    q,
    k,
    g,
    weight,
    heads,
    ...shape,
    shape,
    raw: once("raw", () => dotScores(q, k, shape)),
    qLengths: once("qLengths", () => lengthsOf(q, m, shape)),
    kLengths: once("kLengths", () => lengthsOf(k, n, shape)),
    tq: once("tq", () => tanhOf(q, m, shape)),
    tk: once("tk", () => tanhOf(k, n, shape)),
  };
}

/** The logits of a rule, m × n. */
function logitsOf(name, given) {
  const rule = BENCH_RULES[name],
    scale = rule.scale(given);
  if (rule.additive) return additiveScores(given.tq(), given.tk(), given.weight, given.shape);
  const scores = rule.cosine ? cosineScores(given.raw(), given.qLengths(), given.kLengths(), given.shape) : given.raw();
  if (rule.half) return scores.map(half);
  if (rule.cap) return scores.map((score) => rule.cap * Math.tanh((score * scale) / rule.cap));
  return scale === 1 ? scores : scores.map((score) => score * scale);
}

/** dL/dq of one query; `u` is its J dL/dp, which is used up. */
function queryGradient(rule, given, logits, i, u, into) {
  const { n, d, stride, shape } = given,
    scale = rule.scale(given);
  if (rule.additive) return throughTanh(u, given.tq(), given.tk(), given.weight, i, shape, into);
  if (rule.cosine) return scale * acrossQuery(u, given.k, given.kLengths(), given.q, i * stride, given.qLengths()[i], shape, into);
  if (rule.cap) for (let j = 0; j < n; j++) u[j] *= 1 - (logits[i * n + j] / rule.cap) ** 2;
  return scale * lengthOf(keysTimes(u, given.k, shape, into), d);
}

/** Everything that one rule gives for a subject: logits, weights, signs by row and over rows, both gradients by row. */
export function lane(name, given) {
  const rule = BENCH_RULES[name],
    { m, n, d, g, stride } = given;
  const logits = logitsOf(name, given),
    weights = new Float32Array(m * n),
    rows = [];
  const atLogits = new Float64Array(m),
    atQuery = new Float64Array(m);
  const u = new Float64Array(n),
    into = new Float64Array(d),
    factor = rule.after ? rule.after(given) : 1;
  let overflowing = 0;
  for (let i = 0; i < m; i++) {
    const top = softmaxRow(logits, weights, i * n, n);
    rows.push(rowSigns(logits, weights, i * n, n, top));
    if (top.peak > HALF_EXP_MOST) overflowing++;
    atLogits[i] = factor * throughSoftmax(weights, i * n, n, g, i * stride, u);
    atQuery[i] = factor * queryGradient(rule, given, logits, i, u, into);
  }
  return {
    name,
    rule,
    logits,
    weights,
    rows,
    factor,
    signs: overRows(rows),
    overflowing,
    gradients: { logits: atLogits, query: atQuery },
    statistics: { logits: { median: medianOf(atLogits), rms: rmsOf(atLogits) }, query: { median: medianOf(atQuery), rms: rmsOf(atQuery) } },
  };
}

/** The largest weights of a row, from the largest on, and the sum of all others: means over rows, times what a rule does after softmax. */
export function sortedWeights({ weights, factor }, { m, n }, count) {
  const top = new Float64Array(count),
    row = new Float64Array(count);
  let rest = 0;
  for (let i = 0; i < m; i++) {
    row.fill(0);
    for (let j = i * n; j < (i + 1) * n; j++) {
      const weight = weights[j];
      let at = count - 1;
      rest += Math.min(weight, row[at]); // not among the largest, or no longer
      if (weight <= row[at]) continue;
      for (; at > 0 && row[at - 1] < weight; at--) row[at] = row[at - 1];
      row[at] = weight;
    }
    for (let j = 0; j < count; j++) top[j] += row[j];
  }
  return { top: top.map((total) => (factor * total) / m), rest: (factor * rest) / m };
}
