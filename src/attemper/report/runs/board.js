// The board: one axis of steps with the loss, the findings and every head of every layer under one another.

import { LEVELS, SHAPES, place, plural, shade, written } from "../data/numbers.js";
import { curve, span } from "./curve.js";
import { ticks } from "./series.js";

const STRIP_WIDTH = 1200; // pixels of a strip; the page scales it
const STRIPS_HEIGHT = 560; // what all strips share
const NO_NUMBER = { light: [232, 204, 204], dark: [92, 48, 56] };

/** How high the row of a head is. */
const heightOf = (rows) => Math.max(2, Math.min(18, Math.floor(STRIPS_HEIGHT / rows)));

/** The strip of a layer: a row of pixels for each head, shaded by a sign. */
function paintStrip(canvas, run, layer, sign, ends, theme) {
  const count = layer.heads.length, context = canvas.getContext("2d");
  canvas.width = STRIP_WIDTH;
  canvas.height = count;
  const image = context.createImageData(STRIP_WIDTH, count), { axis } = run;
  for (let x = 0; x < STRIP_WIDTH; x++) {
    const step = axis.step((x + 0.5) / STRIP_WIDTH), column = axis.column(step);
    if (step >= axis.ends[column]) continue; // nothing was watched here
    for (let y = 0; y < count; y++) {
      const number = run.number(sign, layer.start + y, column);
      const rgb = number === null ? NO_NUMBER[theme] : shade(theme, place(ends, number)).rgb, at = 4 * (y * STRIP_WIDTH + x);
      [image.data[at], image.data[at + 1], image.data[at + 2], image.data[at + 3]] = [...rgb, 255];
    }
  }
  context.putImageData(image, 0, 0);
}

/** The loss, or whatever was logged, above the map. */
function lossOf(make, run) {
  const { logged } = run.document, name = ["loss", "train_loss", ...Object.keys(logged)].find((one) => logged[one]?.length);
  if (!name) return null;
  const x = (step) => 1000 * run.axis.share(step), points = (key) => logged[key].map(([step, value]) => [x(step), value]);
  const lines = [{ points: points(name), kind: "loss" }];
  if (name !== "eval_loss" && logged.eval_loss?.length) lines.push({ points: points("eval_loss"), kind: "evaluated" });
  const values = lines.flatMap((line) => line.points.map(([, value]) => value));
  if (!values.some(Number.isFinite)) return null;
  const first = values.find(Number.isFinite), last = logged[name][logged[name].length - 1][1];
  const words = `${name} from ${written(first)} to ${written(last)}`;
  return { name, both: lines.length > 1, ...curve(make, lines, span(values), words) };
}

/** The findings of each column as one shape: the worst, with how many there are. */
function lane(make, run, act) {
  const groups = new Map();
  for (const finding of run.document.findings) {
    const key = run.axis.column(finding.step);
    groups.set(key, [...(groups.get(key) ?? []), finding]);
  }
  return [...groups].map(([column, all]) => {
    const worst = all.reduce((one, other) => (LEVELS.indexOf(other.level) > LEVELS.indexOf(one.level) ? other : one));
    const many = all.length > 1 ? `${plural(all.length, "finding")}, the worst: ` : "";
    const words = `step ${worst.step}: ${many}${worst.level}, ${worst.title}, ${worst.layer || "the model"}${worst.head === null ? "" : ` head ${worst.head}`}`;
    return make(`button.flag.${worst.level}`, { type: "button", "--at": run.axis.center(column), title: words, "aria-label": words,
      onclick: (event) => { event.stopPropagation(); act.find(worst); } }, SHAPES[worst.level]);
  });
}

/** The whole board. `act.point(row, column)` follows the pointer, `act.choose` a click. */
export function runBoard(make, run, act) {
  const height = heightOf(run.rows.length), { axis } = run;
  const line = (label, kind, ...content) => [make("div.row-name", {}, label), make(`div.plot.${kind}`, {}, ...content)];
  const loss = lossOf(make, run), flags = lane(make, run, act);
  const canvases = run.layers.map((layer) => make("canvas.heads", { "aria-hidden": "true", "--height": `${height * layer.heads.length}px` }));
  const frame = make("div.at-head", { "aria-hidden": "true" }), cursor = make("div.at-step", { "aria-hidden": "true" });
  const every = Math.ceil(14 / (height * run.layers[0].heads.length + 2)); // layers whose names have room
  const strips = run.layers.map((layer, i) => line(
    make(i % every ? "bdi.unseen" : "bdi", { title: layer.layer }, layer.label), "head-rows", canvases[i]));
  const marks = ticks(axis).map((step) => make("span", { "--at": axis.share(step) }, String(step)));
  const area = make("div.overlay", {}, frame, cursor);
  const grid = make("div.timeline", { tabindex: "0", role: "group", "--label": run.label,
    "aria-label": "Every head over time. Arrow keys move: left and right through steps, up and down through heads." },
    loss ? line(make("span", {}, loss.name, loss.both ? make("small", {}, "┄ eval") : null), "above", loss.svg, loss.numbers) : [],
    line(make("span", {}, "findings"), "lane", flags.length ? flags : make("span.dim", {}, "none from the level “warn” on")),
    strips, line(make("span", {}, "step"), "ticks", marks), area);
  const at = (event) => {
    const canvas = canvases.find((one) => { const box = one.getBoundingClientRect(); return event.clientY >= box.top && event.clientY < box.bottom; });
    const box = (canvas ?? canvases[0]).getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    if (share < 0 || share > 1) return null;
    const layer = canvas ? run.layers[canvases.indexOf(canvas)] : null;
    const head = layer ? Math.min(layer.heads.length - 1, Math.floor((event.clientY - box.top) / box.height * layer.heads.length)) : null;
    return { column: axis.column(axis.step(share)), row: layer ? layer.start + head : null };
  };
  grid.addEventListener("pointermove", (event) => { const found = at(event); if (found) act.point(found); });
  grid.addEventListener("pointerleave", () => act.point(null));
  grid.addEventListener("click", (event) => { const found = at(event); if (found) act.choose(found); });
  grid.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!by || event.target !== grid) return;
    event.preventDefault();
    act.move(...by);
  });
  let drawn = "";
  return { node: grid, show(state, theme) {
    const sign = run.signs.find((one) => one.key === state.sign), key = `${sign.key} ${theme}`;
    if (drawn !== key) run.layers.forEach((layer, i) => paintStrip(canvases[i], run, layer, sign, run.scales.get(sign.key), theme));
    drawn = key;
    const row = run.rows[state.row], canvas = canvases[row.layer], inside = state.row - run.layers[row.layer].start;
    const outer = area.getBoundingClientRect(), box = canvas.getBoundingClientRect();
    frame.style.setProperty("--top", `${box.top - outer.top + inside * height}px`);
    frame.style.setProperty("--tall", `${height}px`);
    cursor.style.setProperty("--at", axis.center(state.column));
  } };
}
