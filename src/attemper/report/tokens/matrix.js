// The whole matrix of a head as a small picture: stripes, diagonals and blocks at a glance.

import { shade } from "../data/numbers.js";

const PIXELS = 160, TALLEST = 320; // the width before the layout is known, and the height in the style sheet

/** How many pixels a matrix of rows × keys gets: one for each weight, or those that the screen has. */
function resolution(canvas, rows, keys) {
  const shown = canvas.clientWidth || PIXELS, fine = canvas.ownerDocument.defaultView.devicePixelRatio;
  const tall = Math.min(TALLEST, (shown * rows) / Math.max(1, keys));
  const least = (count, there) => Math.max(1, Math.min(count, Math.floor(there * fine)));
  return { width: least(keys, shown), height: least(rows, tall) };
}

/** The largest weight in each of height × width pixels, so that a diagonal stays visible. */
export function pooled(picture, head, queries, keys, height, width) {
  const most = new Float32Array(height * width);
  const column = new Map(keys.map((key, at) => [key, Math.floor((at * width) / keys.length)]));
  queries.forEach((query, at) => {
    const line = Math.floor((at * height) / queries.length) * width;
    for (const [key, weight] of picture.pairs(head, query) ?? []) {
      if (column.has(key)) most[line + column.get(key)] = Math.max(most[line + column.get(key)], weight);
    }
  });
  return most;
}

/** Draw the rows of `queries` against `keys`; returns the largest weight, which is the darkest shade. */
export function paint(canvas, picture, head, queries, keys, theme) {
  const { width, height } = resolution(canvas, queries.length, keys.length);
  Object.assign(canvas, { width, height });
  canvas.classList.toggle("pooled", width < keys.length || height < queries.length);
  const most = pooled(picture, head, queries, keys, height, width), largest = most.reduce((a, b) => Math.max(a, b), 1e-9);
  const pen = canvas.getContext("2d"), image = pen.createImageData(width, height);
  const colours = Array.from({ length: 256 }, (_, i) => [...shade(theme, i / 255).rgb, 255]);
  most.forEach((weight, i) => image.data.set(colours[Math.round(255 * Math.sqrt(weight / largest))], 4 * i));
  pen.putImageData(image, 0, 0);
  return largest;
}
