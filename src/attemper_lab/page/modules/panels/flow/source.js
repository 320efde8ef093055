// Where a flow comes from: the lesson of attemper.explain, drawn here from the words alone, or a head of a real model.
// Either way: tokens, X, the projections by their first columns, and q, k, v of every head, as plain arrays.

import { bytes } from "../../../report/data/weights.js";
import { visible } from "../../../report/data/text.js";
import { named } from "./drawn.js";

export const LESSON = { d_model: 512, heads: 8, d_k: 64 };
export const SHOWN = 16; // columns of a projection that are known, and drawn
export const MOST = 64; // words of a lesson

const drawnOnce = new Map();

/** One head's share of a matrix of the lesson, N(0, 1/512). */
function projection(name, head, count) {
  const key = `matrix ${name} ${head}`;
  if (!drawnOnce.has(key))
    drawnOnce.set(
      key,
      named(key, count).map((number) => number * LESSON.d_model ** -0.5),
    );
  return drawnOnce.get(key);
}

/** (rows × inner) · (inner × columns). */
export function product(a, b, rows, inner, columns) {
  const out = new Float64Array(rows * columns);
  for (let i = 0; i < rows; i++) {
    for (let k = 0; k < inner; k++) {
      const factor = a[i * inner + k];
      for (let j = 0; j < columns; j++) out[i * columns + j] += factor * b[k * columns + j];
    }
  }
  return out;
}

/** The first columns of a matrix. */
function corner(matrix, rows, columns, kept) {
  const out = new Float64Array(rows * kept);
  for (let i = 0; i < rows; i++) out.set(matrix.subarray(i * columns, i * columns + kept), i * kept);
  return out;
}

/** The words of a text, as attemper.explain splits it. */
export const wordsOf = (text) => text.split(/\s+/u).filter(Boolean);

/** A text through the lesson: random vectors and projections of unit variance, the same numbers as attemper.explain's. */
export function lessonFlow(text, head = 0) {
  const { d_model: wide, heads, d_k: width } = LESSON,
    all = wordsOf(text),
    words = all.slice(0, MOST),
    n = words.length;
  const X = new Float64Array(n * wide);
  words.forEach((word, i) => {
    const key = `word ${word}`;
    if (!drawnOnce.has(key)) drawnOnce.set(key, named(key, wide));
    X.set(drawnOnce.get(key), i * wide);
  });
  const project = (name) => Array.from({ length: heads }, (_, h) => product(X, projection(`W_${name}`, h, wide * width), n, wide, width));
  const own = (name) => ({
    rows: wide,
    columns: width,
    shown: SHOWN,
    bias: null,
    data: corner(projection(`W_${name}`, head, wide * width), wide, width, SHOWN),
  });
  const out = new Float64Array(wide * SHOWN);
  for (let h = 0; h < heads; h++) out.set(corner(projection("W_O", h, width * wide), width, wide, SHOWN), h * width * SHOWN);
  return {
    way: "lesson",
    text,
    model: null,
    tokens: words.map(visible),
    special: words.map(() => false),
    words: all.length,
    n,
    d_model: wide,
    d_k: width,
    d_v: width,
    heads,
    groups: 1,
    head,
    layer: 0,
    layers: 1,
    scale: width ** -0.5,
    plain: true,
    without: null,
    X,
    W_Q: own("Q"),
    W_K: own("K"),
    W_V: own("V"),
    Q: project("Q"),
    K: project("K"),
    V: project("V"),
    logits: null,
    W_O: { rows: heads * width, columns: wide, shown: SHOWN, bias: null, data: out },
  };
}

/** Base64 of float32 as numbers. */
export function floats(text) {
  const raw = bytes(text),
    view = new DataView(raw.buffer);
  return Float32Array.from({ length: raw.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

/** One array for each head. */
function split({ shape: [heads, rows, columns], data }) {
  const all = floats(data),
    size = rows * columns;
  return Array.from({ length: heads }, (_, h) => all.subarray(h * size, (h + 1) * size));
}

function matrix(given) {
  if (!given) return null;
  return {
    rows: given.shape[0],
    columns: given.shape[1],
    shown: given.columns,
    data: floats(given.data),
    bias: given.bias && floats(given.bias),
  };
}

/** What read_flow() of attemper_lab.page.data.flow gives, unpacked. */
export function modelFlow(given) {
  return {
    way: "model",
    text: given.text,
    model: given.model,
    tokens: given.tokens.map(visible),
    special: given.special,
    n: given.tokens.length,
    d_model: given.d_model,
    d_k: given.d_k,
    d_v: given.d_v,
    heads: given.heads,
    groups: given.heads / given.key_heads,
    head: given.head,
    layer: given.layer,
    layers: given.layers,
    scale: given.scale,
    plain: given.plain,
    without: given.without,
    X: given.X && floats(given.X.data),
    W_Q: matrix(given.W_Q),
    W_K: matrix(given.W_K),
    W_V: matrix(given.W_V),
    Q: split(given.Q),
    K: split(given.K),
    V: split(given.V),
    logits: split(given.logits),
    W_O: matrix(given.W_O),
  };
}
