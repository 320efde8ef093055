// Two lanes on shared axes: the histogram of the logits with the normal curve of theory, and the sorted weights.

import { axisBelow, linear, path } from "../../draw/axes.js";
import { barPath, counted } from "../../draw/histogram.js";
import { change, draw, picture } from "../../draw/svg.js";
import { say } from "../../draw/words.js";
import { criticalSpread } from "../../maths/signs.js";

const WIDE = 352,
  HIGH = 282,
  LEFT = 14,
  RIGHT = 340,
  BINS = 85;
const BASES = [116, 236],
  TALL = 78; // of the two lanes
const REACHES = [6, 12, 25, 50, 100, 150];

const rounded = (number) =>
  number >= 100
    ? number.toFixed(0)
    : number >= 10
      ? number.toFixed(1)
      : number >= 0.995 || number === 0
        ? number.toFixed(2)
        : Number(number.toPrecision(2)).toString();

/** The histogram of all logits, in two lanes with one axis. */
export function logitsChart(page) {
  const pen = draw(page.document),
    svg = picture(pen, { width: WIDE, height: HIGH, name: "Histogram of the logits, two lanes" });
  const below = axisBelow(pen, { y: BASES[1], name: "logit (heights: share of all scores, each lane to its own peak)", grid: 20 });
  const lanes = BASES.map((base, i) => {
    const kind = i ? "chosen" : "none";
    const lane = {
      base,
      bars: pen(`path.bars.${kind}`),
      curve: pen("path.curve"),
      bar: pen(`path.spread.${kind}`),
      limit: pen("path.limit"),
      name: pen(`text.lane-name.${kind}`, { x: 0, y: base - TALL - 12 }),
      words: pen("text", { x: RIGHT, y: base - TALL - 12, "text-anchor": "end" }),
    };
    return {
      ...lane,
      node: pen(
        `g.of-${kind}`,
        {},
        lane.bars,
        lane.curve,
        lane.limit,
        lane.bar,
        lane.name,
        lane.words,
        pen("path.axis", { d: `M${LEFT} ${base}H${RIGHT}` }),
      ),
    };
  });
  svg.append(below.node, ...lanes.map((lane) => lane.node));
  return {
    svg,
    update(state, found) {
      const wide = 3.1 * Math.max(...found.lanes.map((lane) => lane.signs.std), criticalSpread(state.n) / 2);
      const reach = REACHES.find((one) => one >= wide) ?? REACHES.at(-1),
        x = linear([-reach, reach], [LEFT, RIGHT]),
        bin = (2 * reach) / BINS;
      below.update(x, [-reach, -reach / 2, 0, reach / 2, reach]);
      found.lanes.forEach((lane, i) => {
        const { base, bars, curve, bar, limit, name, words } = lanes[i],
          shares = counted(lane.logits, -reach, reach, BINS);
        const theory = theorySpread(lane, state),
          density = (z) => (bin / (theory * Math.sqrt(2 * Math.PI))) * Math.exp(-0.5 * (z / theory) ** 2);
        // the bin's own share, which a curve narrower than a bin needs
        const most = Math.max(...shares, theory ? Math.min(1, density(0)) : 0),
          height = (share) => (TALL * share) / most;
        change(bars, { d: barPath(shares, (j) => x(-reach + j * bin), base, height, 0.7) });
        const points = theory
          ? Array.from({ length: 241 }, (_, j) => -reach + (j * reach) / 120).map((z) => [x(z), base - Math.min(TALL, height(density(z)))])
          : [];
        change(curve, { d: path(points) });
        const { std } = lane.signs,
          end = Math.min(RIGHT, x(std));
        change(bar, { d: `M${x(0)} ${base + 5}H${Math.max(x(0) + 1, end)}` });
        change(limit, { d: `M${x(criticalSpread(state.n))} ${base - 6}v16` });
        say(page, name, lane.rule.formula);
        words.textContent = `spread ${rounded(std)}`;
      });
    },
  };
}

/** The spread that unit normal q and k give, where there is a law for it; null for other scores. */
function theorySpread(lane, { d, heads, aligned }) {
  if (lane.rule.additive || aligned) return null;
  if (lane.rule.cosine) return 1;
  return Math.sqrt(d) * lane.rule.scale({ d, heads });
}

export const RANKS = 12;

/** The weights of a row, sorted, as a mean over rows: the first ranks as bars, all others as one number. */
export function weightsChart(page) {
  const pen = draw(page.document),
    svg = picture(pen, { width: WIDE, height: HIGH, name: "Sorted attention weights, two lanes" });
  const below = axisBelow(pen, { y: BASES[1], name: "keys, from the most to the least attended" }),
    x = linear([0, RANKS], [34, RIGHT]);
  const lanes = BASES.map((base, i) => {
    const kind = i ? "chosen" : "none",
      y = linear([0, 1], [base, base - TALL]);
    const ticks = [0, 0.5, 1].map((tick) => pen("text", { x: 28, y: y(tick) + 3.5, "text-anchor": "end" }, String(tick)));
    const lane = {
      base,
      y,
      bars: pen(`path.bars.${kind}`),
      even: pen("path.even"),
      name: pen(`text.lane-name.${kind}`, { x: 0, y: base - TALL - 12 }),
      words: pen("text", { x: RIGHT, y: base - TALL - 12, "text-anchor": "end" }),
      rest: pen("text", { x: RIGHT, y: base - TALL + 12, "text-anchor": "end" }),
    };
    const rules = pen("path.grid", { d: [0.5, 1].map((tick) => `M34 ${y(tick)}H${RIGHT}`).join("") });
    return {
      ...lane,
      node: pen(
        "g",
        {},
        rules,
        lane.bars,
        lane.even,
        lane.name,
        lane.words,
        lane.rest,
        ticks,
        pen("path.axis", { d: `M34 ${base}H${RIGHT}` }),
      ),
    };
  });
  svg.append(below.node, ...lanes.map((lane) => lane.node));
  return {
    svg,
    update(state, found) {
      const count = Math.min(RANKS, state.n);
      below.update(
        linear([0.5, RANKS + 0.5], [34, RIGHT]),
        Array.from({ length: count }, (_, i) => i + 1),
      );
      found.sorted.forEach(({ top, rest: others }, i) => {
        const { base, y, bars, even, name, words, rest } = lanes[i],
          lane = found.lanes[i];
        change(bars, {
          d: barPath(
            top,
            (j) => x(j) + 3,
            base,
            (share) => base - y(share),
            3,
          ),
        });
        change(even, { d: `M34 ${y(1 / state.n)}H${RIGHT}` });
        say(page, name, lane.rule.formula);
        words.textContent = `top key ${rounded(top[0])}`;
        rest.textContent = state.n > count ? `the other ${state.n - count} keys: ${rounded(others)} in all` : "";
      });
    },
  };
}
