// Softmax and half precision, on rows of typed arrays.

/** The weights of one row of `n` logits from `at` on, into `weights` at the same place. Gives the row's peak and lse. */
export function softmaxRow(logits, weights, at, n) {
  let peak = -Infinity,
    sum = 0;
  for (let j = at; j < at + n; j++) if (logits[j] > peak) peak = logits[j];
  for (let j = at; j < at + n; j++) sum += weights[j] = Math.exp(logits[j] - peak);
  for (let j = at; j < at + n; j++) weights[j] /= sum;
  return { peak, lse: peak + Math.log(sum) };
}

const LARGEST_HALF = 65504;

/** The nearest float16, ties to even; what is too large is infinite. */
export function half(number) {
  const size = Math.abs(number);
  if (!(size < 65520)) return size >= 65520 ? Math.sign(number) * Infinity : number;
  const exponent = Math.max(-14, Math.floor(Math.log2(size || 1)));
  let unit = 2 ** (exponent - 10),
    steps = size / unit;
  if (steps >= 2048) {
    unit *= 2;
    steps /= 2;
  } // log2 may round up or down beside a power of two
  const low = Math.floor(steps),
    rest = steps - low;
  const even = rest > 0.5 || (rest === 0.5 && low % 2 === 1) ? low + 1 : low;
  return Math.sign(number) * Math.min(LARGEST_HALF, even * unit);
}
/** exp() of more than this is infinite in float16. */
export const HALF_EXP_MOST = Math.log(65520);
