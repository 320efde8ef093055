// Attention weights out of a scan's document: unpacked when first looked at, and asked row by row or column by column.

import { visible } from "./text.js";

/** The bytes of a base64 string. */
export const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** Little-endian numbers of 1, 2 or 4 bytes. */
export function numbers(text, count) {
  const raw = bytes(text), size = count ? raw.length / count : 1;
  if (size === 1) return raw;
  const view = new DataView(raw.buffer), out = new (size === 2 ? Uint16Array : Uint32Array)(count);
  for (let i = 0; i < count; i++) out[i] = size === 2 ? view.getUint16(2 * i, true) : view.getUint32(4 * i, true);
  return out;
}

/** One entry of `attention`, unpacked. `pairs(head, query)` lists [key, weight]; null where that row was not kept. */
export function unpacked(entry) {
  const { heads, queries, keys } = entry;
  if (entry.format === "dense") {
    const data = numbers(entry.data, heads * queries * keys), most = 2 ** entry.bits - 1;
    return { ...entry, digits: entry.bits > 8 ? 3 : 2, pairs(head, query) {
      const from = (head * queries + query) * keys;
      return Array.from({ length: keys }, (_, key) => [key, data[from + key] / most]);
    } };
  }
  const { rows, k } = entry, count = heads * rows.length * k;
  const indices = numbers(entry.indices, count), weights = numbers(entry.weights, count);
  const line = new Map(rows.map((query, i) => [query, i]));
  return { ...entry, digits: 3, pairs(head, query) {
    if (!line.has(query)) return null;
    const from = (head * rows.length + line.get(query)) * k;
    const pairs = Array.from({ length: k }, (_, i) => [indices[from + i], weights[from + i] / 65535]);
    return pairs.filter(([key, weight]) => weight > 0 && key < keys);
  } };
}

/** Finds the picture of a layer on an input, unpacking each once. */
export function album(entries) {
  const ready = new Map();
  return (layer, kind, input) => {
    const index = entries.findIndex((entry) => entry.layer === layer && entry.kind === kind && entry.input === input);
    if (index >= 0 && !ready.has(index)) ready.set(index, unpacked(entries[index]));
    return ready.get(index) ?? null;
  };
}

/** The weights that a query gives, or that a key receives, as a Map from the other side; null where they were not kept. */
export function look(picture, head, side, at) {
  if (side === "query") {
    const pairs = picture.pairs(head, at);
    return pairs && new Map(pairs);
  }
  const weights = new Map();
  for (let query = 0; query < picture.queries; query++) {
    for (const [key, weight] of picture.pairs(head, query) ?? []) if (key === at) weights.set(query, weight);
  }
  return weights;
}

/** The mean weight that each key receives from the rows that were kept. */
export function received(picture, head) {
  const sums = new Map();
  let rows = 0;
  for (let query = 0; query < picture.queries; query++) {
    const pairs = picture.pairs(head, query);
    rows += pairs ? 1 : 0;
    for (const [key, weight] of pairs ?? []) sums.set(key, (sums.get(key) ?? 0) + weight);
  }
  for (const [key, sum] of sums) sums.set(key, sum / rows);
  return sums;
}

/** A row's weight in three parts: shown, on hidden tokens, and on keys that were not kept. */
export function shares(weights, hidden) {
  let shown = 0, concealed = 0;
  for (const [key, weight] of weights) hidden.has(key) ? (concealed += weight) : (shown += weight);
  return { shown, hidden: concealed, rest: Math.max(0, 1 - shown - concealed) };
}

/** The names of an image's patches, row by row, after those of the tokens that are no patches. */
function patchNames({ patches: { columns, first }, keys }) {
  const name = (i) => (i >= first ? `patch ${Math.floor((i - first) / columns)},${(i - first) % columns}` : i ? `[extra ${i}]` : "[class]");
  return Array.from({ length: keys }, (_, i) => name(i));
}

/** The names of a picture's queries and keys; numbers if the input's tokens do not match them. */
export function labels(picture, input) {
  if (picture.patches) {
    const names = patchNames(picture), special = names.map((_, i) => i < picture.patches.first);
    return { queries: names, keys: names, special: { query: special, key: special } };
  }
  const tokens = input?.tokens ?? null;
  const named = (count) => (tokens?.length === count ? tokens.map(visible) : Array.from({ length: count }, (_, i) => `#${i}`));
  const own = (count) => (tokens?.length === count ? input.special ?? [] : []);
  // a cross-attention's queries are another sequence, even where the lengths agree
  const queries = picture.kind === "cross" ? Array.from({ length: picture.queries }, (_, i) => `#${i}`) : named(picture.queries);
  return { queries, keys: named(picture.keys),
    special: { query: picture.kind === "cross" ? [] : own(picture.queries), key: own(picture.keys) } };
}
