// A head under another scale: its logits times a factor, their softmax, and the signs of the result, as attemper defines them.

import { rowSigns } from "../../maths/signs.js";
import { softmaxRow } from "../../maths/softmax.js";

const SATURATED = 0.99,
  SATURABLE = 8; // as in attemper.heads
const MEANS = ["mean", "variance", "entropy", "sum_p2", "top_weight", "effective_keys", "jacobian_trace"];

/**
 * The weights and signs of a head, `queries × keys` logits, whose scale is multiplied by `times`. A logit of -inf is a hidden key.
 * Signs are means over rows that see a key; `peak` is the largest logit. `{weights, signs}`
 */
export function tempered(logits, queries, keys, times) {
  const weights = new Float32Array(queries * keys),
    row = new Float64Array(keys),
    out = new Float64Array(keys),
    seen = new Int32Array(keys);
  const sums = Object.fromEntries(MEANS.map((name) => [name, 0]));
  let rows = 0,
    peak = -Infinity,
    even = 0,
    evens = 0,
    saturable = 0,
    saturated = 0;
  for (let i = 0; i < queries; i++) {
    let n = 0;
    for (let j = 0; j < keys; j++) {
      const logit = logits[i * keys + j];
      if (logit === -Infinity) continue;
      row[n] = times * logit;
      seen[n++] = j;
    }
    if (!n) continue;
    const one = rowSigns(row, out, 0, n, softmaxRow(row, out, 0, n));
    for (let k = 0; k < n; k++) weights[i * keys + seen[k]] = out[k];
    for (const name of MEANS) sums[name] += one[name];
    rows++;
    peak = Math.max(peak, one.peak);
    if (n > 1) {
      even += one.evenness;
      evens++;
    }
    if (n >= SATURABLE) {
      saturable++;
      saturated += one.top_weight > SATURATED ? 1 : 0;
    }
  }
  const signs = Object.fromEntries(MEANS.map((name) => [name, sums[name] / rows]));
  return { weights, signs: { ...signs, rows, peak, evenness: even / evens, saturated: saturated / saturable } };
}

/** The ends of the logits that are visible. */
export function ends(logits) {
  let low = Infinity,
    high = -Infinity;
  for (const one of logits) {
    if (one === -Infinity) continue;
    if (one < low) low = one;
    if (one > high) high = one;
  }
  return [low, high];
}
