// A thumbnail of every head: its weights, summed in at most 16 × 16 blocks.

import { shade } from "../data/numbers.js";
import { bytes } from "../data/weights.js";

const SIDE = 16; // blocks along a side, as the scan makes them
/** What a thumbnail's shades mean: as a sign, for a legend, and in a sentence. */
export const SHARE_OF = { unit: "of the weight", digits: 0 };
export const SMALL = "Each cell is a head's attention: queries go down, keys to the right, shaded by √share of the weight, on one scale for all heads.";

/** The share of each block of queries' weight on each block of keys: {rows, columns, shares}. */
export function blocks(picture, head) {
  const { thumbnail, queries, keys } = picture;
  if (thumbnail) {
    const size = thumbnail.rows * thumbnail.columns;
    picture.small ??= bytes(thumbnail.data);
    return { ...thumbnail, shares: Float32Array.from(picture.small.subarray(head * size, (head + 1) * size), (share) => share / 255) };
  }
  const rows = Math.min(SIDE, queries), columns = Math.min(SIDE, keys), shares = new Float32Array(rows * columns);
  const counts = new Uint32Array(rows), line = (query) => Math.floor((query * rows) / queries);
  for (let query = 0; query < queries; query++) {
    const pairs = picture.pairs(head, query);
    counts[line(query)] += pairs ? 1 : 0;
    for (const [key, weight] of pairs ?? []) shares[line(query) * columns + Math.floor((key * columns) / keys)] += weight;
  }
  return { rows, columns, shares: shares.map((share, at) => share / Math.max(1, counts[Math.floor(at / columns)])) };
}

const PALETTES = {}; // by theme

/** Draw a head's thumbnail into a canvas, a pixel for each block; the style sheet sizes it. */
export function paintSmall(canvas, picture, head, theme) {
  const { rows, columns, shares } = blocks(picture, head);
  PALETTES[theme] ??= Array.from({ length: 256 }, (_, i) => [...shade(theme, Math.sqrt(i / 255)).rgb, 255]);
  Object.assign(canvas, { width: columns, height: rows });
  const pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows);
  shares.forEach((share, i) => image.data.set(PALETTES[theme][Math.round(255 * Math.min(1, share))], 4 * i));
  pen.putImageData(image, 0, 0);
}
