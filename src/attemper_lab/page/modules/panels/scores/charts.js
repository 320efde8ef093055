// The four scores on random vectors: their spread against d, and each of them against the scaled dot product, pair by pair.

import { axisBelow, axisLeft, held, linear, logarithmic, path } from "../../draw/axes.js";
import { change, draw, picture } from "../../draw/svg.js";
import { SCORES, spreads } from "./model.js";

const WIDE = 352,
  HIGH = 288,
  LEFT = 40,
  RIGHT = 346,
  TOP = 28,
  BOTTOM = 250;
const DS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
const NAMED = { dot: [1024, 14, "end"], scaled: [1024, -7, "end"], additive: [1024, 14, "end"], cosine: [1024, -9, "end"] };

export function spreadsChart(page) {
  const pen = draw(page.document),
    svg = picture(pen, { width: WIDE, height: HIGH, name: "Spread of the four scores against d" });
  const x = logarithmic([1, 1024], [LEFT, RIGHT]),
    y = held(logarithmic([0.02, 50], [BOTTOM, TOP]));
  const below = axisBelow(pen, { y: BOTTOM, name: "d, numbers in a vector (log)" }),
    left = axisLeft(pen, { x: LEFT, top: TOP, name: "spread (std) of the scores, log", right: RIGHT });
  below.update(x, [1, 4, 16, 64, 256, 1024]);
  left.update(logarithmic([0.02, 50], [BOTTOM, TOP]), [0.1, 1, 10]);
  const cursor = pen("path.cursor"),
    lines = Object.keys(SCORES).map((name) => [
      name,
      pen(`path.run.${name}`),
      pen(`text.name.${name}`, { "text-anchor": NAMED[name][2] }, SCORES[name].label),
    ]);
  svg.append(left.node, below.node, cursor, ...lines.flatMap(([, line, label]) => [line, label]));
  return {
    svg,
    update(state) {
      const measured = spreads(state.seed, DS);
      for (const [name, line, label] of lines) {
        change(line, { d: path(DS.map((d, i) => [x(d), y(measured[i][name])])) });
        change(label, { x: RIGHT - 2, y: y(measured.at(name === "dot" || name === "cosine" ? -3 : -1)[name]) + NAMED[name][1] });
      }
      change(cursor, { d: `M${x(state.d)} ${TOP}V${BOTTOM}` });
    },
  };
}

/** Pairs as dots: across, the scaled dot product; up, another score, brought to a spread of 1. */
export function pairsChart(page, name, axis) {
  const pen = draw(page.document),
    svg = picture(pen, { width: WIDE, height: HIGH, name: `${SCORES[name].label} against the scaled dot product, pair by pair` });
  const x = linear([-4, 4], [LEFT, RIGHT]),
    y = linear([-4, 4], [BOTTOM, TOP]),
    hold = [held(x), held(y)];
  const below = axisBelow(pen, { y: BOTTOM, name: "scaled dot product, q·k / √d" }),
    left = axisLeft(pen, { x: LEFT, top: TOP, name: axis, right: RIGHT });
  below.update(x, [-4, -2, 0, 2, 4]);
  left.update(y, [-4, -2, 0, 2, 4]);
  const dots = pen(`path.dots.${name}`),
    same = pen("path.even", { d: `M${x(-4)} ${y(-4)}L${x(4)} ${y(4)}` }),
    words = pen("text.correlation", { x: LEFT + 8, y: TOP + 14 });
  svg.append(left.node, below.node, same, dots, words);
  return {
    svg,
    update(state, found) {
      const a = found.scaled.logits,
        b = found[name].logits,
        spread = found[name].signs.std || 1,
        mean = found[name].signs.mean;
      let text = "";
      for (let i = 0; i < a.length; i++) text += `M${hold[0](a[i]).toFixed(1)} ${hold[1]((b[i] - mean) / spread).toFixed(1)}h0`;
      change(dots, { d: text });
      words.textContent = `correlation ${correlation(a, b).toFixed(2).replace("-", "−")}`;
    },
  };
}

/** Pearson's. */
export function correlation(a, b) {
  const mean = (all) => all.reduce((sum, one) => sum + one, 0) / all.length,
    [p, q] = [mean(a), mean(b)];
  let ab = 0,
    aa = 0,
    bb = 0;
  for (let i = 0; i < a.length; i++) {
    ab += (a[i] - p) * (b[i] - q);
    aa += (a[i] - p) ** 2;
    bb += (b[i] - q) ** 2;
  }
  return ab / Math.sqrt(aa * bb);
}
