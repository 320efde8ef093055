// A query and a key in the plane: the key is dragged, and the four scores follow.

import { linear } from "../../draw/axes.js";
import { change, draw, picture } from "../../draw/svg.js";
import { QUERY, SCORES, planeKey, planeScores } from "./model.js";

const SIDE = 300,
  MIDDLE = SIDE / 2,
  UNIT = 34;
const place = ([a, b]) => [MIDDLE + UNIT * a, MIDDLE - UNIT * b];

function arrow(from, to) {
  const angle = Math.atan2(to[1] - from[1], to[0] - from[0]),
    head = (turn) => `L${to[0] - 9 * Math.cos(angle + turn)} ${to[1] - 9 * Math.sin(angle + turn)}`;
  return `M${from[0]} ${from[1]}L${to[0]} ${to[1]}M${to[0]} ${to[1]}${head(0.4)}M${to[0]} ${to[1]}${head(-0.4)}`;
}

export function planeChart(page) {
  const pen = draw(page.document),
    svg = picture(pen, { width: SIDE, height: SIDE, name: "A query and a key in the plane" });
  const origin = [MIDDLE, MIDDLE],
    q = place(QUERY);
  const cross = pen("path.grid", { d: `M0 ${MIDDLE}H${SIDE}M${MIDDLE} 0V${SIDE}` }),
    ring = pen("circle.ring", { cx: MIDDLE, cy: MIDDLE });
  const wedge = pen("path.wedge"),
    fall = pen("path.fall"),
    key = pen("path.arrow.key"),
    query = pen("path.arrow.query", { d: arrow(origin, q) });
  const grip = pen("circle.grip", { r: 11 }),
    names = [pen("text.query", { x: q[0] + 6, y: q[1] - 6 }, "q"), pen("text.key", {}, "k")],
    angle = pen("text");
  svg.append(cross, ring, wedge, fall, query, key, grip, ...names, angle);
  const drag = (event) => {
    const box = svg.getBoundingClientRect(),
      a = (((event.clientX - box.left) / box.width) * SIDE - MIDDLE) / UNIT,
      b = (MIDDLE - ((event.clientY - box.top) / box.height) * SIDE) / UNIT;
    const turn = ((Math.atan2(b, a) - Math.atan2(QUERY[1], QUERY[0])) * 180) / Math.PI;
    page.set("scores", { turn: Math.round(((turn + 540) % 360) - 180), length: Math.round(10 * Math.hypot(a, b)) / 10 });
  };
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    drag(event);
  });
  svg.addEventListener("pointermove", (event) => {
    if (event.buttons & 1) drag(event);
  });
  return {
    svg,
    update(state) {
      const k = planeKey(state),
        tip = place(k),
        along = (QUERY[0] * k[0] + QUERY[1] * k[1]) / (QUERY[0] ** 2 + QUERY[1] ** 2),
        foot = place([along * QUERY[0], along * QUERY[1]]);
      const start = Math.atan2(QUERY[1], QUERY[0]),
        end = start + (state.turn * Math.PI) / 180,
        at = (turn, r) => [MIDDLE + r * Math.cos(turn), MIDDLE - r * Math.sin(turn)];
      const [a, b] = [at(start, 26), at(end, 26)],
        large = Math.abs(state.turn) > 180 ? 1 : 0;
      change(wedge, { d: `M${MIDDLE} ${MIDDLE}L${a}A26 26 0 ${large} ${state.turn > 0 ? 0 : 1} ${b}Z` });
      change(key, { d: arrow(origin, tip) });
      change(fall, { d: `M${tip}L${foot}M${origin}L${foot}` });
      change(ring, { r: UNIT * state.length });
      change(grip, { cx: tip[0], cy: tip[1] });
      change(names[1], { x: tip[0] + 10, y: tip[1] - 8 });
      const middle = at((start + end) / 2, 42);
      change(angle, { x: middle[0], y: middle[1] + 4, "text-anchor": "middle" });
      angle.textContent = `${Math.abs(state.turn)}°`;
    },
  };
}

const BAR_WIDE = 352,
  BAR_HIGH = 190,
  ROW = 42;

/** The four scores as bars from 0, on one axis. */
export function planeBars(page) {
  const pen = draw(page.document),
    svg = picture(pen, { width: BAR_WIDE, height: BAR_HIGH, name: "The four scores of this query and key" });
  const x = linear([-8, 8], [10, 342]);
  const rows = Object.entries(SCORES).map(([name, { label, formula }], i) => {
    const y = 20 + i * ROW,
      bar = pen(`path.bar.${name}`),
      number = pen("text.number", { y: y + 17 });
    return { name, y, bar, number, node: pen("g", {}, pen("text", { x: 10, y }, `${label}, ${formula}`), bar, number) };
  });
  svg.append(
    pen("path.grid", { d: [-4, 4].map((tick) => rows.map(({ y }) => `M${x(tick)} ${y + 5}v16`).join("")).join("") }),
    pen("path.axis", { d: `M${x(0)} 6V${BAR_HIGH - 10}` }),
    ...rows.map((row) => row.node),
    ...[-8, -4, 0, 4, 8].map((tick) => pen("text", { x: x(tick), y: BAR_HIGH, "text-anchor": "middle" }, String(tick).replace("-", "−"))),
  );
  return {
    svg,
    update(state) {
      const scores = planeScores(state);
      for (const { name, y, bar, number } of rows) {
        const end = x(Math.max(-8, Math.min(8, scores[name])));
        change(bar, { d: `M${x(0)} ${y + 6}H${end}V${y + 20}H${x(0)}Z` });
        number.textContent = scores[name].toFixed(2).replace("-", "−");
        change(number, {
          x: scores[name] >= 0 ? Math.min(310, end + 5) : Math.max(42, end - 5),
          "text-anchor": scores[name] >= 0 ? "start" : "end",
        });
      }
    },
  };
}
