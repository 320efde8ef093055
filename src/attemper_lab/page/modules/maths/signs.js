// The vital signs of rows of logits, as attemper.Vitals has them, and their means over rows.

/** The signs of one row of logits; `weights` has its softmax at the same index. */
export function rowSigns(logits, weights, at, n, { peak, lse }) {
  let sum = 0,
    sum_p2 = 0,
    away = 0;
  for (let j = at; j < at + n; j++) {
    sum += logits[j];
    sum_p2 += weights[j] * weights[j];
    if (weights[j] > 0) away += weights[j] * (logits[j] - peak);
  }
  const mean = sum / n,
    entropy = Math.max(0, lse - peak - away);
  let square = 0;
  for (let j = at; j < at + n; j++) square += (logits[j] - mean) ** 2;
  return {
    mean,
    variance: square / n,
    peak,
    lse,
    entropy,
    sum_p2,
    top_weight: Math.exp(peak - lse),
    effective_keys: Math.exp(entropy),
    evenness: n > 1 ? entropy / Math.log(n) : NaN,
    jacobian_trace: 1 - sum_p2,
  };
}

const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
/** The mean of the two in the middle, where there are two: torch's quantile(0.5). Its median is the lower of them. */
export const medianOf = (values) => {
  const sorted = Float64Array.from(values).sort(),
    half = (sorted.length - 1) / 2;
  return (sorted[Math.floor(half)] + sorted[Math.ceil(half)]) / 2;
};
export const rmsOf = (values) => Math.sqrt(values.reduce((sum, value) => sum + value * value, 0) / values.length);

/** The means over rows, the largest peak, and the spread of the logits: the root of the mean variance. */
export function overRows(rows) {
  const mean = (sign) => meanOf(rows.map((row) => row[sign]));
  return {
    mean: mean("mean"),
    variance: mean("variance"),
    std: Math.sqrt(mean("variance")),
    peak: Math.max(...rows.map((row) => row.peak)),
    entropy: mean("entropy"),
    sum_p2: mean("sum_p2"),
    top_weight: mean("top_weight"),
    effective_keys: mean("effective_keys"),
    evenness: mean("evenness"),
    jacobian_trace: mean("jacobian_trace"),
  };
}

/** The spread from which on a few of many keys get nearly all the weight: Derrida's √(2 ln n). */
export const criticalSpread = (n) => Math.sqrt(2 * Math.log(n));
