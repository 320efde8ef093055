// Scales and axes. A scale maps a number to a place in the picture; an axis shows its ticks, its name and its unit.

import { change } from "./svg.js";

export function linear([low, high], [from, to]) {
  const at = (value) => from + ((value - low) / (high - low)) * (to - from);
  return Object.assign(at, {
    back: (place) => low + ((place - from) / (to - from)) * (high - low),
    domain: [low, high],
    range: [from, to],
  });
}

export function logarithmic([low, high], [from, to]) {
  const a = Math.log(low),
    b = Math.log(high);
  const at = (value) => from + ((Math.log(Math.max(value, 1e-300)) - a) / (b - a)) * (to - from);
  return Object.assign(at, {
    back: (place) => Math.exp(a + ((place - from) / (to - from)) * (b - a)),
    domain: [low, high],
    range: [from, to],
  });
}

/** The same scale, clamped to its ends. */
export const held = (scale) => (value) => {
  const place = scale(value),
    [from, to] = scale.range;
  return Math.min(Math.max(from, to), Math.max(Math.min(from, to), Number.isNaN(place) ? from : place));
};

/** Powers of ten (or of `base`) within the ends. */
export function powers([low, high], base = 10) {
  const found = [];
  for (let e = Math.ceil(Math.log(low) / Math.log(base) - 1e-9); base ** e <= high * (1 + 1e-9); e++) found.push(base ** e);
  return found;
}

const UP = "⁰¹²³⁴⁵⁶⁷⁸⁹";
/** 10⁻⁴ where decimals would be too many. */
export function asPower(value) {
  const e = Math.round(Math.log10(value));
  if (e >= -2 && e <= 3) return String(Number(value.toPrecision(3)));
  return `10${e < 0 ? "⁻" : ""}${[...String(Math.abs(e))].map((digit) => UP[digit]).join("")}`;
}

/** Leave out labels of an axis that would stand nearer than `apart` to one before them. */
function spaced(ticks, at, apart) {
  const kept = [];
  for (const tick of ticks) if (kept.every((other) => Math.abs(at(other) - at(tick)) >= apart)) kept.push(tick);
  return kept;
}

/** A horizontal axis at height y: `axis.update(scale, ticks)`. */
export function axisBelow(pen, { y, name, written = String, grid = null }) {
  const rule = pen("path.axis"),
    lines = pen("path.grid"),
    texts = pen("g"),
    title = pen("text.axis-name", { "text-anchor": "middle" }, name);
  let drawn = "";
  return {
    node: pen("g", {}, lines, rule, texts, title),
    update(scale, ticks) {
      const [from, to] = scale.range,
        wanted = `${scale.range} ${scale.domain} ${ticks}`;
      if (wanted === drawn) return;
      drawn = wanted;
      change(rule, { d: `M${from} ${y}H${to}${ticks.map((tick) => `M${scale(tick)} ${y}v4`).join("")}` });
      if (grid !== null) change(lines, { d: ticks.map((tick) => `M${scale(tick)} ${grid}V${y}`).join("") });
      texts.replaceChildren(
        ...spaced(ticks, scale, 26).map((tick) => pen("text", { x: scale(tick), y: y + 16, "text-anchor": "middle" }, written(tick))),
      );
      change(title, { x: (from + to) / 2, y: y + 31 });
    },
  };
}

/** A vertical axis at x. Its name stands above it, to be read without turning the head. */
export function axisLeft(pen, { x, top, name, written = String, right = null }) {
  const rule = pen("path.axis"),
    lines = pen("path.grid"),
    texts = pen("g");
  const title = pen("text.axis-name", { x: 0, y: top - 9 }, name);
  return {
    node: pen("g", {}, lines, rule, texts, title),
    update(scale, ticks) {
      const [from, to] = scale.range;
      change(rule, { d: `M${x} ${from}V${to}${ticks.map((tick) => `M${x - 4} ${scale(tick)}h4`).join("")}` });
      if (right !== null) change(lines, { d: ticks.map((tick) => `M${x} ${scale(tick)}H${right}`).join("") });
      texts.replaceChildren(
        ...spaced(ticks, scale, 11).map((tick) => pen("text", { x: x - 7, y: scale(tick) + 3.5, "text-anchor": "end" }, written(tick))),
      );
    },
  };
}

/** A line through points; a point that is not a number interrupts it. */
export function path(points) {
  let open = false,
    text = "";
  for (const [x, y] of points) {
    if (!Number.isFinite(x) || !Number.isFinite(y)) {
      open = false;
      continue;
    }
    text += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    open = true;
  }
  return text;
}
