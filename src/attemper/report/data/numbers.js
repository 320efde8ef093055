// Signs, numbers and colours: how they are read, written and shaded. Runs without a page.

const SHARE = () => [0, 1];

/**
 * What can be mapped. `of` reads a head; `range` is the scale's ends for all heads (null: from the numbers);
 * `marks` are the thresholds of attemper.health, drawn on the legend.
 */
export const SIGNS = [
  { key: "peak", label: "peak logit", digits: 1,
    marks: [[30, "note"], [50, "warn"], [100, "error"], [1000, "critical"], [10000, "diverging"]],
    says: "The largest logit of any row. Softmax sees differences, so a peak that grows means weights that freeze." },
  { key: "variance", label: "logit std", digits: 2, of: (head) => root(head.variance),
    says: "How far the logits of a row spread. About 1 for unit normal q and k under 1/√d_k." },
  { key: "entropy", label: "entropy", unit: "nats", digits: 2, range: (keys) => [0, Math.log(keys)],
    says: "The entropy of a row's weights: 0 when one key has all the weight, ln(keys) when all are equal." },
  { key: "effective_keys", label: "effective keys", unit: "keys", digits: 1, range: (keys) => [1, keys],
    says: "exp(entropy): how many keys share the weight." },
  { key: "evenness", label: "evenness", digits: 2, range: SHARE, marks: [[0.99, "flat"]],
    says: "Entropy over ln(keys seen), so that rows of different length can be compared." },
  { key: "top_weight", label: "top weight", digits: 2, range: SHARE, says: "The largest weight of a row, averaged over rows." },
  { key: "saturated", label: "saturated rows", unit: "share", digits: 2, range: SHARE, marks: [[0.5, "saturated"]],
    says: "The share of rows that give more than 0.99 of their weight to one key." },
  { key: "sink_weight", label: "weight on a sink", unit: "share", digits: 2, range: SHARE, marks: [[0.3, "sink"]],
    says: "The weight on the first or a special token. Most trained models have such attention sinks; they are healthy." },
  { key: "evenness_without_sinks", label: "evenness without sinks", digits: 2, range: SHARE, marks: [[0.05, "collapsed"]],
    says: "The evenness of the other weights when the first and the special tokens are left out." },
  { key: "neighbour_weight", label: "weight on a neighbour", unit: "share", digits: 2, range: SHARE, marks: [[0.5, "positional"]],
    says: "The largest weight on one position: the token itself, or one or two tokens before or after it." },
  { key: "text_distance", label: "distance between texts", digits: 2, range: SHARE, marks: [[0.02, "dead"]],
    says: "How much the weights change with the text. Near 0: the head does the same whatever it reads." },
  { key: "sum_p2", label: "Σp²", digits: 2, range: SHARE, says: "1 when one key has all the weight, 1/keys when all are equal." },
  { key: "jacobian_trace", label: "1 − Σp²", digits: 2, range: SHARE,
    says: "The trace of the softmax's Jacobian: near 0, the row is saturated." },
  { key: "mean", label: "mean logit", digits: 2, says: "No effect by itself: softmax ignores a shift." },
];

/** Which sign shows a finding, by its name. */
export const SIGN_OF = {
  peak: "peak", overflow: "peak", nan: "peak", saturated: "saturated", flat: "evenness", collapsed: "evenness_without_sinks",
  sink: "sink_weight", positional: "neighbour_weight", dead: "text_distance", scale: "variance",
};
/** From the mildest to the worst. */
export const LEVELS = ["healthy", "ok", "note", "warn", "error", "critical", "diverging"];
/** A shape for every level, so that no one needs the colour. */
export const SHAPES = { healthy: "◇", ok: "✓", note: "●", warn: "▲", error: "◆", critical: "■", diverging: "✕" };
export const RULES = {
  none: "no scale", sqrt_dk: "1/√d_k", dk: "1/d_k", sqrt_dmodel: "1/√d_model", layer: "1/((layer+1)√d_k)", log_n: "s ln n/√d_k",
  learned: "g/√d_k", qk_norm: "QK-norm", softcap: "1/√d_k, capped",
};

const root = (number) => (given(number) ? Math.sqrt(number) : null);

/** A sign's number for a head; null if it was not measured. */
export function value(sign, head) {
  const number = sign.of ? sign.of(head) : head[sign.key];
  return Number.isFinite(number) ? number : null;
}

/** The signs that at least one head has. */
export const measured = (heads, signs = SIGNS) => signs.filter((sign) => heads.some((head) => value(sign, head) !== null));

/** One scale for all the heads given: its ends, and whether it is logarithmic. */
export function scale(sign, heads, keys) {
  const values = heads.map((head) => value(sign, head)).filter((number) => number !== null);
  // the first threshold is always on the scale, so that its distance can be seen
  const free = () => [Math.min(0, ...values), Math.max(0, sign.marks?.[0][0] ?? 0, ...values)];
  const [low, high] = sign.range ? sign.range(Math.max(2, keys)) : free();
  const middle = [...values].sort((a, b) => a - b)[values.length >> 1];
  const wide = !sign.range && low >= 0 && middle > 0 && high > 50 * middle;
  if (wide) return { low: Math.min(...values.filter((number) => number > 0)), high, log: true };
  return { low, high: high > low ? high : low + 1, log: false };
}

/** Where a number lies on a scale, from 0 to 1. */
export function place({ low, high, log }, number) {
  const share = log ? Math.log(Math.max(number, low) / low) / Math.log(high / low) : (number - low) / (high - low);
  return Math.min(1, Math.max(0, share));
}

/** A number for people: with `digits` decimals if given, else with three or four significant digits. */
export function written(number, digits) {
  if (!Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  if (size >= 1e5 || (size > 0 && size < 1e-4 && digits === undefined)) return number.toExponential(1);
  if (digits === undefined) digits = size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return number.toFixed(size >= 100 ? Math.min(1, digits) : digits).replace("-", "−");
}

export const given = (value) => value !== null && value !== undefined;
/** A threshold without trailing zeros. */
export const plain = (number) => String(Number(number.toPrecision(4)));
export const percent = (share) => (share > 0 && share < 0.005 ? "< 1 %" : `${Math.round(100 * share)} %`);
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// Lightness alone carries the number: scales read the same with any colour vision, and on paper.
const STOPS = {
  light: [[244, 247, 250], [190, 215, 232], [107, 168, 208], [41, 108, 168], [10, 42, 92]],
  dark: [[27, 34, 48], [36, 74, 112], [58, 124, 165], [136, 187, 196], [250, 236, 178]],
};

/** The colour for a share from 0 to 1, and black or white, whichever reads better on it. */
export function shade(theme, share) {
  const stops = STOPS[theme], at = share * (stops.length - 1), from = Math.min(Math.floor(at), stops.length - 2);
  const rgb = stops[from].map((channel, i) => Math.round(channel + (at - from) * (stops[from + 1][i] - channel)));
  return { rgb, css: `rgb(${rgb.join(" ")})`, ink: luminance(rgb) > 0.179 ? "#000" : "#fff" };
}

/** Relative luminance, as WCAG defines it. */
export function luminance(rgb) {
  const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Custom properties for a shaded cell: the style sheet picks the theme's pair. */
export function shading(share) {
  const light = shade("light", share), dark = shade("dark", share);
  return { "--light": light.css, "--light-ink": light.ink, "--dark": dark.css, "--dark-ink": dark.ink };
}

/** Layer names without the parts that all of them share; a layer that runs several times keeps the number of its call. */
export function shortened(names) {
  if (names.length < 2) return names.map(String);
  const call = / \(call (\d+)\)$/, end = names.some((name) => call.test(name)) ? ".1" : "";
  const split = names.map((name) => (call.test(name) ? name.replace(call, ".$1") : name + end).split("."));
  const same = (i) => split.every((parts) => parts.length === split[0].length && parts[i] === split[0][i]);
  return split.map((parts) => parts.filter((_, i) => !same(i)).join(".") || parts.join("."));
}
