// The document of attemper_lab.page.data.heads.read_heads(), with lookups of layers, heads, findings and logits.

import { SIGNS, measured, shortened } from "../../../report/data/numbers.js";
import { cleaned, visible } from "../../../report/data/text.js";
import { floats } from "../flow/source.js";
import { tempered } from "./temper.js";

/** Signs that the page computes again for another scale; the others are those of the scan, at the model's own. */
export const LIVE = new Set([
  "peak",
  "variance",
  "entropy",
  "effective_keys",
  "evenness",
  "top_weight",
  "saturated",
  "sum_p2",
  "jacobian_trace",
  "mean",
]);

/** A text in a model: `layers`, `find(layer, head)`, `logits(layer, head)` (null while it is not here), `signs`. */
export function readText(given) {
  const { scan } = given,
    document = cleaned(scan),
    all = given.logits ? floats(given.logits) : null,
    kept = new Map();
  const names = shortened(given.layers.map((one) => one.layer));
  let start = 0;
  const layers = given.layers.map((one, index) => {
    const about = document.layers.find((row) => row.layer === one.layer && row.kind === one.kind);
    const layer = {
      ...one,
      index,
      label: one.kind === "cross" ? `${names[index]} ×` : names[index],
      start,
      about,
      rows: document.heads.filter((row) => row.layer === one.layer && row.kind === one.kind),
    };
    start += one.heads * one.queries * one.keys;
    return layer;
  });
  const findings = (layer, head) =>
    document.findings.filter(
      (one) => one.layer === layers[layer].layer && one.kind === layers[layer].kind && (one.head === head || one.head === null),
    );
  const tokens = (given.tokens ?? []).map(visible);
  return {
    text: given.text,
    tokens,
    special: given.special ?? [],
    document,
    layers,
    findings,
    whole: all !== null,
    kept,
    signs: measured(document.heads, SIGNS),
    columns: Math.max(...layers.map((one) => one.heads)),
    keys: Math.max(...layers.map((one) => one.keys)),
    has: (layer, head) => layers[layer] !== undefined && head >= 0 && head < layers[layer].heads,
    logits(layer, head) {
      const one = layers[layer],
        size = one.queries * one.keys;
      return all ? all.subarray(one.start + head * size, one.start + (head + 1) * size) : (kept.get(`${layer}.${head}`) ?? null);
    },
    keep: (layer, head, logits) => kept.set(`${layer}.${head}`, logits),
    /** The names of a layer's queries or keys; numbers where they are not those of the text. */
    names: (layer, side) => {
      const count = layers[layer][side];
      return count === tokens.length && (side === "keys" || layers[layer].kind === "self")
        ? tokens
        : Array.from({ length: count }, (_, i) => `#${i}`);
    },
    isSpecial: (layer, i) => layers[layer].keys === tokens.length && Boolean(given.special?.[i]),
  };
}

/** The signs of every head: those of the scan, or with `times` those the page computes. With `weighed`, also its `weights`. */
export function signsOf(text, times, weighed = false) {
  return text.layers.map((layer) =>
    layer.rows.map((row, head) => {
      const logits = times === 1 && !weighed ? null : text.logits(layer.index, head);
      if (!logits) return row;
      const { signs, weights } = tempered(logits, layer.queries, layer.keys, times);
      return { ...row, ...(times === 1 ? {} : signs), weights };
    }),
  );
}

/** A head's weights as the report's views read them. `weights()` gives the matrix of this moment, queries × keys. */
export function pictured({ kind, queries, keys }, weights) {
  const pairs = (_, query) => Array.from({ length: keys }, (_, key) => [key, weights()[query * keys + key]]);
  return { kind, queries, keys, digits: 2, pairs };
}

/** What the thumbnail of a head is drawn from: its weights, or what the server made of those that it keeps; null without either. */
export const small = (layer, row) => (row.weights ? pictured(layer, () => row.weights) : layer.thumbnail ? layer : null);

/** "4.3" → [4, 3], if it is a head of the text; null otherwise. */
export function placeOf(text, words) {
  const [, layer, head] = words.match(/^(\d+)\.(\d+)$/) ?? [];
  return layer !== undefined && text.has(Number(layer), Number(head)) ? [Number(layer), Number(head)] : null;
}
