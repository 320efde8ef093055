// The figure of a claim: its numbers as bars on one axis, from zero or, on a logarithmic axis, from the reference.

import { written } from "../../../report/data/numbers.js";
import { asPower, axisBelow, linear, logarithmic, powers } from "../../draw/axes.js";
import { draw, picture } from "../../draw/svg.js";
import { lowered } from "../../draw/words.js";

const ROW = 38,
  TOP = 22,
  SIDE = 8,
  AFTER = 56;

/** With the scale, without it, or neither: the colour of a bar. */
const laneOf = (name) => (/no scale/.test(name) ? "none" : /÷ √d(_k|$)/.test(name) ? "chosen" : "plain");

/** Round numbers from one end to the other, about five of them. */
export function ticks([low, high]) {
  if (!(high > low)) return [low];
  const rough = (high - low) / 4,
    base = 10 ** Math.floor(Math.log10(rough));
  const step = base * [1, 2, 2.5, 5, 10].find((times) => times * base >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(Number((i * step).toPrecision(8)));
  return found;
}

/** The ends of the axis and where bars begin. */
function extent(figure) {
  const values = figure.bars.map((bar) => bar.value).filter(Number.isFinite),
    held = figure.reference ? [figure.reference.at] : [];
  if (figure.log) {
    const all = [...values, ...held].filter((value) => value > 0);
    const ends = [10 ** Math.floor(Math.log10(Math.min(...all))), 10 ** Math.ceil(Math.log10(Math.max(...all)) + 1e-9)];
    return { ends, from: figure.reference ? figure.reference.at : ends[0] };
  }
  const low = Math.min(0, ...values, ...held),
    high = Math.max(0, ...values, ...held),
    steps = ticks([low, high === low ? low + 1 : high]);
  const step = steps[1] - steps[0];
  return {
    ends: [Math.min(low, steps[0] - (low < steps[0] ? step : 0)), Math.max(high, steps.at(-1) + (high > steps.at(-1) ? step : 0))],
    from: 0,
  };
}

/** A picture of a claim's numbers; null where it has none. */
export function barsFigure(page, claim, width) {
  const figure = claim.figure;
  if (!figure) return null;
  const pen = draw(page.document),
    { ends, from } = extent(figure),
    height = TOP + figure.bars.length * ROW + 46,
    bottom = TOP + figure.bars.length * ROW;
  const scale = (figure.log ? logarithmic : linear)(ends, [SIDE, width - AFTER]);
  const svg = picture(pen, { width, height, name: `${claim.id}: ${figure.unit}` });
  const below = axisBelow(pen, {
    y: bottom,
    name: lowered(pen, figure.unit),
    written: figure.log ? asPower : (tick) => String(tick).replace("-", "−"),
    grid: TOP,
  });
  below.update(scale, figure.log ? powers(ends) : ticks(ends));
  svg.append(below.node);
  if (figure.reference) {
    const x = scale(figure.reference.at),
      end = x > width * 0.6;
    svg.append(
      pen("path.held", { d: `M${x} ${TOP - 6}V${bottom}` }),
      pen(
        "text.held-name",
        { x: x + (end ? -5 : 5), y: TOP - 8, "text-anchor": end ? "end" : "start" },
        lowered(pen, figure.reference.name),
      ),
    );
  }
  figure.bars.forEach((bar, i) => {
    const y = TOP + i * ROW,
      lane = laneOf(bar.name),
      at = Number.isFinite(bar.value) ? scale(figure.log ? Math.max(bar.value, ends[0]) : bar.value) : scale(from);
    const [left, right] = [Math.min(at, scale(from)), Math.max(at, scale(from))];
    svg.append(
      pen("text.bar-name", { x: SIDE, y: y + 13 }, lowered(pen, bar.name)),
      pen(`rect.bar.${lane}`, { x: left, y: y + 20, width: Math.max(right - left, 1.5), height: 9, rx: 2 }),
      pen("text.bar-value", { x: Math.max(at, scale(from)) + 6, y: y + 28.5 }, bar.value === null ? "∞" : written(bar.value)),
    );
  });
  return svg;
}
