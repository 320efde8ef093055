// A curve over the steps of a run, on the axis that the map below it has.

import { place, written } from "../data/numbers.js";

const CURVE_HEIGHT = 100; // of the viewBox; the style sheet sets the real one

/** The ends of a scale for a curve, with a margin. */
export function span(values, floor = null) {
  const finite = values.filter(Number.isFinite), low = floor ?? Math.min(...finite), high = Math.max(...finite);
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  return { low: floor ?? low - air, high: high + air, log: false };
}

/** The path of points [x from 0 to 1000, value]; a missing number interrupts it. */
function pathOf(points, ends) {
  let open = false;
  return points.map(([x, value]) => {
    if (!Number.isFinite(value)) { open = false; return ""; }
    const command = open ? "L" : "M";
    open = true;
    return `${command}${x.toFixed(2)} ${(CURVE_HEIGHT * (1 - place(ends, value))).toFixed(2)}`;
  }).join("");
}

/** Curves with their scale: `lines` is [{points, kind}], `marks` are thresholds. Its numbers are beside it. */
export function curve(make, lines, ends, words, marks = []) {
  const rule = ([at, level]) => {
    const y = CURVE_HEIGHT * (1 - place(ends, at));
    return make(`line.rung.${level}`, { x1: 0, x2: 1000, y1: y, y2: y, "vector-effect": "non-scaling-stroke" });
  };
  const inside = marks.filter(([at]) => at > ends.low && at < ends.high);
  const drawn = lines.map(({ points, kind }) => {
    const lone = points.filter(([, value], i) => Number.isFinite(value) && !Number.isFinite(points[i - 1]?.[1]) && !Number.isFinite(points[i + 1]?.[1]));
    return [make(`path.${kind}`, { d: pathOf(points, ends), "vector-effect": "non-scaling-stroke" }),
      ...lone.map(([x, value]) => make(`path.${kind}.dot`, { d: `M${x} ${CURVE_HEIGHT * (1 - place(ends, value))}h0`, "vector-effect": "non-scaling-stroke" }))];
  });
  const svg = make("svg.curve", { viewBox: `0 0 1000 ${CURVE_HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": words },
    inside.map(rule), drawn);
  const label = (at, kind) => make(`span.tick${kind}`, { "--y": 1 - place(ends, at) }, written(at));
  const numbers = [label(ends.high, ".top"), label(ends.low, ".bottom")];
  const named = []; // from the top down, those that do not overlap
  for (const mark of [...inside].reverse()) {
    if (!named.length || place(ends, named[named.length - 1][0]) - place(ends, mark[0]) > 0.1) named.push(mark);
  }
  return { svg, numbers, marks: named.map(([at, name]) => make("span.rung-name", { "--y": 1 - place(ends, at) }, `${at} ${name}`)) };
}
