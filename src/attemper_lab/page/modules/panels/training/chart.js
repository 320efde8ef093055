// One quantity of all runs over the training steps, on one axis; the scrubber's step is a line through every chart.

import { written } from "../../../report/data/numbers.js";
import { asPower, axisBelow, axisLeft, held, linear, logarithmic, path, powers } from "../../draw/axes.js";
import { change, draw, picture } from "../../draw/svg.js";
import { ticks } from "../claims/bars.js";
import { RULE_NAMES, valueAt } from "./model.js";

const WIDE = 536,
  HIGH = 246,
  LEFT = 46,
  RIGHT = 528,
  TOP = 30,
  BOTTOM = 206;
const LANES = ["none", "other", "chosen"];

/** What is drawn, in this order; a chart without any value is left out. */
export const CHARTS = [
  { keys: ["loss"], title: "Training loss", unit: "nats", log: false },
  { keys: ["entropy"], title: "Entropy of the weights", unit: "nats, mean of the heads", log: false, zero: true },
  { keys: ["peak"], title: "Largest logit", unit: "logit (log)", log: true },
  { keys: ["grad_q_median", "grad_q_rms"], title: "Gradient at q", unit: "size of an entry (log); line: median, dashes: RMS", log: true },
];

/** All values of a chart that can be drawn. */
function valuesOf(all, keys, log) {
  return all
    .flatMap((series) => keys.flatMap((key) => [...(series.least[key] ?? []), ...(series.most[key] ?? [])]))
    .filter((value) => Number.isFinite(value) && value !== null && (!log || value > 0));
}

function ends(values, { log, zero }) {
  const low = Math.min(...values),
    high = Math.max(...values);
  if (log)
    return [
      10 ** Math.floor(Math.log10(low) + 1e-9),
      10 ** Math.max(Math.ceil(Math.log10(high) - 1e-9), Math.floor(Math.log10(low) + 1e-9) + 1),
    ];
  const from = zero ? 0 : Math.max(0, low - 0.05 * (high - low || 1)),
    marks = ticks([from, high > from ? high : from + 1]),
    step = marks[1] - marks[0];
  return [zero ? 0 : Math.floor(from / step) * step, Math.ceil((high > from ? high : from + 1) / step - 1e-9) * step];
}

/** A chart: `update(all, step)`; `scrub(step)` is called when one drags in it. */
export function runChart(page, about, scrub) {
  const pen = draw(page.document),
    { make } = page;
  const svg = picture(pen, { width: WIDE, height: HIGH, name: `${about.title} over the training steps` });
  const below = axisBelow(pen, { y: BOTTOM, name: "training step" });
  const left = axisLeft(pen, { x: LEFT, top: TOP - 5, name: about.unit, right: RIGHT, written: about.log ? asPower : (tick) => String(tick) });
  const lines = Object.fromEntries(
    LANES.map((lane) => [
      lane,
      about.keys.map((_, i) => ({
        band: pen(`path.band.${lane}`),
        line: pen(`path.run.${lane}${i ? ".second" : ""}`),
        dot: pen(`circle.now.${lane}${i ? ".second" : ""}`, { r: i ? 3 : 4 }),
      })),
    ]),
  );
  const cursor = pen("path.cursor");
  svg.append(
    left.node,
    below.node,
    ...LANES.flatMap((lane) => lines[lane].map((one) => one.band)),
    cursor,
    ...LANES.flatMap((lane) => lines[lane].flatMap((one) => [one.line, one.dot])),
  );
  const said = make("p.reading", { "aria-hidden": "true" });
  const node = make("figure.chart", {}, make("figcaption", {}, make("h2", {}, about.title), said), svg);
  let x = null;
  const drag = (event) => {
    if (!x || (event.type === "pointermove" && event.buttons !== 1)) return;
    const box = svg.getBoundingClientRect();
    scrub(x.back(((event.clientX - box.left) / box.width) * WIDE));
  };
  svg.addEventListener("pointerdown", drag);
  svg.addEventListener("pointermove", drag);

  function drawLane(series, key, parts, y, step, last) {
    const within = held(y),
      at = (values, i) => [x(series.steps[i]), values[i] === null || (about.log && !(values[i] > 0)) ? NaN : within(values[i])];
    const places = series.steps.map((_, i) => i),
      most = places.map((i) => at(series.most[key], i)),
      least = places.map((i) => at(series.least[key], i));
    const banded = series.seeds > 1 && [...most, ...least].every(([, place]) => Number.isFinite(place));
    change(parts.band, { d: banded ? `${path([...most, ...least.reverse()])}Z` : "" });
    change(parts.line, { d: path(places.map((i) => at(series.median[key], i))) });
    const value = valueAt(series, key, step),
      place = value === null || (about.log && !(value > 0)) ? null : within(value);
    change(parts.dot, { cx: x(Math.min(step, last)), cy: place ?? 0, display: place === null ? "none" : null });
  }
  return {
    node,
    svg,
    title: about.title,
    update(all, step, last) {
      const values = valuesOf(all, about.keys, about.log);
      node.hidden = !values.length;
      if (node.hidden) return;
      const domain = ends(values, about);
      x = linear([0, last || 1], [LEFT, RIGHT]);
      const y = (about.log ? logarithmic : linear)(domain, [BOTTOM, TOP]);
      below.update(x, ticks([0, last || 1]));
      const decades = about.log ? powers(domain) : [],
        every = Math.ceil(decades.length / 6);
      left.update(y, about.log ? decades.filter((_, i) => (decades.length - 1 - i) % every === 0) : ticks(domain));
      for (const lane of LANES) {
        const series = all.find((one) => one.lane === lane);
        lines[lane].forEach((parts, i) => {
          if (series?.median[about.keys[i]]) drawLane(series, about.keys[i], parts, y, step, last);
          else {
            change(parts.band, { d: "" });
            change(parts.line, { d: "" });
            change(parts.dot, { display: "none" });
          }
        });
      }
      change(cursor, { d: `M${x(Math.min(step, last))} ${TOP}V${BOTTOM}` });
      said.replaceChildren(
        ...[...all]
          .reverse()
          .map((series) =>
            make(
              `span.${series.lane}`,
              {},
              make("span.key", {}, `${RULE_NAMES[series.rule] ?? "now"} `),
              about.keys.map((key) => written(valueAt(series, key, step))).join(" · "),
            ),
          ),
      );
    },
  };
}
