// The spread of the logits against d_k, under three divisors: the law as lines, what was measured as dots, one for each d_k that
// was visited. Dragging in the picture moves d_k.

import { axisBelow, axisLeft, held, logarithmic, path } from "../../draw/axes.js";
import { change, draw, picture } from "../../draw/svg.js";
import { criticalSpread } from "../../maths/signs.js";
import { D_STEPS } from "./model.js";

const WIDE = 352,
  HIGH = 282,
  LEFT = 34,
  RIGHT = 346,
  TOP = 28,
  BOTTOM = 244;
const LINES = [
  { name: "none", law: (d) => Math.sqrt(d), words: "no divisor: √d_k" },
  { name: "sqrt_dk", law: () => 1, words: "÷ √d_k: 1" },
  { name: "dk", law: (d) => 1 / Math.sqrt(d), words: "÷ d_k: 1/√d_k" },
];
const TURN = 238; // from here on the dots reach the names of the lines
/** Where the names of the lines end: beside them and never across, at the right or, where the dots are there, in the middle. */
const PLACES = {
  none: [(y) => [RIGHT - 4, y(13.4) + 16], (y) => [218, y(7.75) - 10]],
  sqrt_dk: [(y) => [RIGHT - 4, y(1) - 8], (y) => [218, y(1) - 8]],
  dk: [(y) => [RIGHT - 4, y(1 / Math.sqrt(130)) - 6], (y) => [218, y(1 / 7.75) + 15]],
};

export function spreadChart(page) {
  const pen = draw(page.document),
    x = logarithmic([1, 1024], [LEFT, RIGHT]),
    y = logarithmic([0.02, 50], [BOTTOM, TOP]),
    inside = held(y);
  const svg = picture(pen, { width: WIDE, height: HIGH, name: "Spread of the logits against d_k" });
  const below = axisBelow(pen, { y: BOTTOM, name: "d_k (log)" }),
    left = axisLeft(pen, { x: LEFT, top: TOP, name: "spread (std) of the logits, log", right: RIGHT, written: (tick) => String(tick) });
  below.update(x, [1, 4, 16, 64, 256, 1024]);
  left.update(y, [0.1, 1, 10]);
  const zone = pen("path.zone"),
    zoneName = pen("text.zone-name", { x: LEFT + 8 });
  const flat = pen("path.zone.flat", { d: `M${LEFT} ${y(0.25)}H${RIGHT}V${BOTTOM}H${LEFT}Z` });
  const flatName = pen("text.zone-name", { x: LEFT + 8, y: BOTTOM - 8 }, "all keys look alike");
  const limit = pen("path.limit");
  const lines = LINES.map(({ name, law }) => pen(`path.law.${name}`, { d: path(D_STEPS.map((d) => [x(d), inside(law(d))])) }));
  const names = LINES.map(({ name, words }) => pen(`text.law-name.${name}`, { "text-anchor": "end" }, words));
  const trail = pen("g.trail"),
    cursor = pen("path.cursor"),
    now = LINES.map(({ name }) => pen(`circle.now.${name}`, { r: 5 }));
  const chosen = pen("path.now-chosen");
  svg.append(zone, flat, limit, left.node, below.node, ...lines, zoneName, flatName, cursor, trail, ...names, ...now, chosen);
  const visited = new Set();
  let kept = "";
  const drag = (event) => {
    const box = svg.getBoundingClientRect(),
      at = ((event.clientX - box.left) / box.width) * WIDE;
    page.set("bench", { d: Math.round(x.back(Math.min(RIGHT, Math.max(LEFT, at)))) });
  };
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    drag(event);
  });
  svg.addEventListener("pointermove", (event) => {
    if (event.buttons & 1) drag(event);
  });
  /** The spread under each divisor, from the one without. */
  const under = (d, raw) => ({ none: raw, sqrt_dk: raw / Math.sqrt(d), dk: raw / d });
  /** Leave the dots of a d_k; a second visit leaves none. */
  function visit(d, raw) {
    if (visited.has(d)) return;
    visited.add(d);
    const places = under(d, raw);
    trail.append(...LINES.map(({ name }) => pen(`circle.dot.${name}`, { cx: x(d), cy: inside(places[name]), r: 2.4 })));
  }
  return {
    svg,
    visit,
    update(state, { bare, second }) {
      const key = `${state.n} ${state.seed} ${state.aligned}`;
      if (key !== kept) {
        visited.clear();
        trail.replaceChildren();
        kept = key;
      }
      const { d, n } = state,
        place = under(d, bare.signs.std),
        at = x(d),
        freeze = criticalSpread(n);
      visit(d, bare.signs.std);
      change(zone, { d: `M${LEFT} ${TOP}H${RIGHT}V${y(freeze)}H${LEFT}Z` });
      change(limit, { d: `M${LEFT} ${y(freeze)}H${RIGHT}` });
      zoneName.textContent = `above √(2 ln ${n}) = ${freeze.toFixed(1)}: a few keys take all`;
      change(zoneName, { y: TOP + 13 });
      change(cursor, { d: `M${at} ${TOP}V${BOTTOM}` });
      LINES.forEach(({ name }, i) => {
        const [right, low] = PLACES[name][at > TURN ? 1 : 0](y);
        change(names[i], { x: right, y: low });
        change(now[i], { cx: at, cy: inside(place[name]) });
      });
      const mark = inside((state.rule === "none" ? bare : second).signs.std);
      change(chosen, { d: `M${at - 9} ${mark}a9 9 0 1 0 18 0a9 9 0 1 0 -18 0` });
    },
  };
}
