// A run's document as the views read it: rows of heads, columns of steps, signs, the axis of steps. Runs without a page.

import { LEVELS, SIGNS, scale, shortened } from "../data/numbers.js";
import { cleaned } from "../data/text.js";

const GRADIENTS = [
  { key: "grad_q_rms", label: "|dq|, root mean square", says: "The size of the gradient that reaches the queries of this head." },
  { key: "grad_k_rms", label: "|dk|, root mean square", says: "The size of the gradient that reaches the keys of this head." },
];
const FAR = 3; // a step this many usual steps wide is a gap, not a wide column

const middle = (numbers) => [...numbers].sort((a, b) => a - b)[numbers.length >> 1];

/** The axis of steps: where each column begins and ends, and a step as a share of the width. */
function axisOf(from, to) {
  const gaps = from.slice(1).map((step, i) => step - to[i]), usual = Math.max(1, gaps.length ? middle(gaps) : 1);
  const ends = from.map((_, i) => (i + 1 < from.length && gaps[i] <= FAR * usual ? from[i + 1] : to[i] + usual));
  const low = from[0], high = ends[ends.length - 1];
  const share = (step) => Math.min(1, Math.max(0, (step - low) / (high - low)));
  const column = (step) => {
    let left = 0, right = from.length - 1;
    while (left < right) {
      const half = (left + right + 1) >> 1;
      if (from[half] <= step) left = half; else right = half - 1;
    }
    return left;
  };
  return { low, high, from, to, ends, share, column, center: (i) => share((from[i] + ends[i]) / 2), step: (at) => low + at * (high - low) };
}

/** Five or so round steps for the axis. */
export function ticks({ low, high }) {
  const rough = (high - low) / 6, size = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  const by = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= rough) ?? 10 * size;
  const found = [];
  for (let step = Math.ceil(low / by) * by; step <= high; step += by) found.push(step);
  return found;
}

/** The document, read. */
export function readRun(given) {
  const document = cleaned(given), names = shortened(document.layers.map((one) => one.layer));
  const kinds = new Set(document.layers.map((one) => one.kind)), rows = [];
  const layers = document.layers.map((one, index) => {
    const label = (kinds.size > 1 && one.kind === "cross" ? `${names[index]} ×` : names[index]) || "model", start = rows.length;
    for (const head of one.heads) rows.push({ layer: index, head, name: one.layer, kind: one.kind, label });
    return { ...one, index, label, start };
  });
  const known = [...SIGNS, ...GRADIENTS].filter((sign) => document.signs[sign.key]);
  const axis = axisOf(document.from, document.to);
  const find = (finding) => rows.findIndex((row) => row.name === finding.layer && row.kind === finding.kind
    && (finding.head === null || row.head === finding.head));
  const number = (sign, row, column) => {
    const found = document.signs[sign.key][row][column];
    return found !== null && sign.of ? sign.of({ [sign.key]: found }) : found;
  };
  const scales = new Map(known.map((sign) => {
    const cells = document.signs[sign.key].flat().filter((one) => one !== null).map((one) => ({ [sign.key]: one }));
    return [sign.key, scaleOf(sign, cells, document.keys)];
  }));
  const worst = Math.max(0, ...document.findings.map((one) => LEVELS.indexOf(one.level)));
  const widest = Math.max("findings".length, ...layers.map((layer) => layer.label.length));
  return { document, layers, rows, signs: known, axis, find, number, scales, worst: LEVELS[worst], label: `${Math.min(16, widest)}ch` };
}

/** One scale for the whole run. Peaks grow by factors: from 100 on their scale is logarithmic. */
function scaleOf(sign, cells, keys) {
  const most = 20_000; // numbers that are sampled for the ends of a scale; the largest is exact
  const every = Math.ceil(cells.length / most), some = cells.filter((_, i) => i % every === 0);
  const largest = cells.reduce((top, cell) => (cell[sign.key] > top[sign.key] ? cell : top), cells[0] ?? {});
  if (sign.key === "peak" && largest.peak > 100) return { low: 1, high: largest.peak, log: true };
  return scale(sign, [...some, largest], keys);
}
