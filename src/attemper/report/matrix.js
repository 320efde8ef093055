// The whole matrix of a head as a small picture: stripes, diagonals and blocks at a glance.

import { shade } from "./numbers.js";

const PIXELS = 512; // longer inputs are pooled by their largest weight

/** The largest weight in each pixel, of height × width pixels. */
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
  const height = Math.max(1, Math.min(PIXELS, queries.length)), width = Math.max(1, Math.min(PIXELS, keys.length));
  Object.assign(canvas, { width, height });
  const most = pooled(picture, head, queries, keys, height, width), largest = most.reduce((a, b) => Math.max(a, b), 1e-9);
  const pen = canvas.getContext("2d"), image = pen.createImageData(width, height);
  const colours = Array.from({ length: 256 }, (_, i) => [...shade(theme, i / 255).rgb, 255]);
  most.forEach((weight, i) => image.data.set(colours[Math.round(255 * Math.sqrt(weight / largest))], 4 * i));
  pen.putImageData(image, 0, 0);
  return largest;
}
