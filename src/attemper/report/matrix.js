// The whole matrix of a head as a small picture: stripes, diagonals and blocks at a glance.

import { shade } from "./numbers.js";

const PIXELS = 512; // longer inputs are pooled by their largest weight

/** The largest weight in each pixel, of rows × columns pixels. */
export function pooled(picture, head, left, rows, columns) {
  const most = new Float32Array(rows * columns);
  const column = new Map(left.key.map((key, at) => [key, Math.floor((at * columns) / left.key.length)]));
  left.query.forEach((query, at) => {
    const line = Math.floor((at * rows) / left.query.length) * columns;
    for (const [key, weight] of picture.pairs(head, query) ?? []) {
      if (column.has(key)) most[line + column.get(key)] = Math.max(most[line + column.get(key)], weight);
    }
  });
  return most;
}

/** Draw it; returns the largest weight, which is the darkest shade. */
export function paint(canvas, picture, head, left, theme) {
  const rows = Math.max(1, Math.min(PIXELS, left.query.length)), columns = Math.max(1, Math.min(PIXELS, left.key.length));
  Object.assign(canvas, { width: columns, height: rows });
  const most = pooled(picture, head, left, rows, columns), largest = most.reduce((a, b) => Math.max(a, b), 1e-9);
  const pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows);
  const colours = Array.from({ length: 256 }, (_, i) => [...shade(theme, i / 255).rgb, 255]);
  most.forEach((weight, i) => image.data.set(colours[Math.round(255 * Math.sqrt(weight / largest))], 4 * i));
  pen.putImageData(image, 0, 0);
  return largest;
}
