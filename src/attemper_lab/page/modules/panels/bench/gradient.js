// The gradient of each query, both units, both lanes, on one logarithmic axis: how they are spread, the median and the RMS.

import { asPower, axisBelow, held, logarithmic, path, powers } from "../../draw/axes.js";
import { change, draw, picture } from "../../draw/svg.js";
import { say } from "../../draw/words.js";

const HIGH = 262,
  LEFT = 14,
  ENDS = [1e-8, 100],
  BINS = 96;
const STRIPS = [
  ["logits", 0, 62],
  ["logits", 1, 106],
  ["query", 0, 170],
  ["query", 1, 214],
];
const TALL = 36;

/** A smooth outline of how logarithms of lengths are spread. */
function outline(lengths, x, base, [from, to]) {
  const shares = new Float64Array(BINS + 1),
    width = (to - from) / BINS,
    reach = 2.2 * (64 / lengths.length) ** 0.4;
  for (const length of lengths) {
    const at = (x(length) - from) / width;
    for (let bin = Math.max(0, Math.floor(at - 9)); bin <= Math.min(BINS, Math.ceil(at + 9)); bin++)
      shares[bin] += Math.exp(-0.5 * ((bin - at) / reach) ** 2);
  }
  const most = Math.max(...shares, 1e-9);
  const points = Array.from(shares, (share, bin) => [from + bin * width, base - (TALL * share) / most]);
  return `${path([[from, base], ...points, [to, base]])}Z`;
}

export function gradientChart(page) {
  const WIDE = page.document.defaultView.innerWidth < 700 ? 352 : 736,
    RIGHT = WIDE - 8,
    range = [LEFT, RIGHT];
  const pen = draw(page.document),
    svg = picture(pen, { width: WIDE, height: HIGH, name: "Gradient of each query, at the softmax's input and at q" });
  const x = held(logarithmic(ENDS, range)),
    least = WIDE > 400 ? "≤ " : "", // what is smaller is drawn at the end
    below = axisBelow(pen, {
      y: 222,
      name: "length of the gradient (log)",
      written: (value) => (value > ENDS[0] ? asPower(value) : least + asPower(value)),
      grid: 22,
    });
  below.update(logarithmic(ENDS, range), powers(ENDS));
  const strips = STRIPS.map(([unit, which, base]) => {
    const kind = which ? "chosen" : "none";
    const strip = {
      unit,
      which,
      base,
      shape: pen(`path.ridge.${kind}`),
      median: pen(`path.median.${kind}`),
      rms: pen(`path.rms.${kind}`),
      name: pen(`text.lane-name.${kind}`, { x: RIGHT, y: base - 8, "text-anchor": "end" }),
    };
    return {
      ...strip,
      node: pen("g", {}, strip.shape, pen("path.axis", { d: `M${LEFT} ${base}H${RIGHT}` }), strip.rms, strip.median, strip.name),
    };
  });
  svg.append(
    below.node,
    pen("text.unit-name", { x: LEFT, y: 14 }, "at the softmax's input, |J · dL/dp|"),
    pen("text.unit-name", { x: LEFT, y: 124 }, "at q, |dL/dq|"),
    ...strips.map((strip) => strip.node),
  );
  return {
    svg,
    update(state, found) {
      for (const { unit, which, base, shape, median, rms, name } of strips) {
        const lane = found.lanes[which],
          statistics = lane.statistics[unit];
        change(shape, { d: outline(lane.gradients[unit], x, base, range) });
        const at = x(statistics.median),
          mean = x(statistics.rms);
        change(median, { d: `M${at} ${base - TALL}V${base}` });
        change(rms, { d: `M${mean} ${base - 12}l5 6l-5 6l-5 -6Z` });
        say(page, name, lane.rule.formula);
      }
    },
  };
}
