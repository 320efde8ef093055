// The arithmetic of a flow: every matrix from X to Y, and for any cell the cells and the products that made it.

import { softmaxRow } from "../../maths/softmax.js";
import { product } from "./source.js";

const TOP = 5; // products that are named, of many

/** q·k of one head, n × n. */
function scores(flow, h) {
  const { n, d_k } = flow,
    Q = flow.Q[h],
    K = flow.K[Math.floor(h / flow.groups)],
    out = new Float64Array(n * n);
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < n; j++) {
      let sum = 0;
      for (let d = 0; d < d_k; d++) sum += Q[i * d_k + d] * K[j * d_k + d];
      out[i * n + j] = sum;
    }
  }
  return out;
}

/** The standard deviation of numbers that are finite. */
export function spread(numbers) {
  const seen = [...numbers].filter(Number.isFinite),
    mean = seen.reduce((a, b) => a + b, 0) / seen.length;
  return Math.sqrt(seen.reduce((sum, one) => sum + (one - mean) ** 2, 0) / seen.length);
}

/** All matrices: with `skip`, the scores go into the softmax as they are. Each is {rows, columns, shown, data}. */
export function computed(flow, skip) {
  const { n, heads, d_k, d_v, head } = flow,
    wide = heads * d_v,
    concat = new Float64Array(n * wide),
    all = [];
  let S, Z, C;
  for (let h = 0; h < heads; h++) {
    const raw = scores(flow, h),
      logits = flow.plain || skip ? raw.map((one) => (skip ? one : one * flow.scale)) : Float64Array.from(flow.logits[h]);
    // a hidden key stays hidden, whatever the scale
    if (flow.logits)
      flow.logits[h].forEach((one, i) => {
        if (one === -Infinity) logits[i] = -Infinity;
      });
    const P = new Float64Array(n * n);
    for (let i = 0; i < n; i++) if (softmaxRow(logits, P, i * n, n).peak === -Infinity) P.fill(0, i * n, (i + 1) * n); // sees no key
    const context = product(P, flow.V[Math.floor(h / flow.groups)], n, n, d_v);
    for (let i = 0; i < n; i++) concat.set(context.subarray(i * d_v, (i + 1) * d_v), i * wide + h * d_v);
    all.push(P);
    if (h === head) [S, Z, C] = [raw, logits, context];
  }
  const vector = (data, columns) => ({ rows: n, columns, shown: columns, data }),
    own = Math.floor(head / flow.groups);
  const square = (data) => ({ rows: n, columns: n, shown: n, data });
  const Y = flow.W_O && output(flow, concat, wide);
  return {
    X: flow.X && vector(flow.X, flow.d_model),
    W_Q: flow.W_Q,
    W_K: flow.W_K,
    W_V: flow.W_V,
    Q: vector(flow.Q[head], d_k),
    K: vector(flow.K[own], d_k),
    V: vector(flow.V[own], d_v),
    S: square(S),
    Z: square(Z),
    P: square(all[head]),
    C: vector(C, d_v),
    concat: vector(concat, wide),
    W_O: flow.W_O,
    Y,
    all,
  };
}

/** The first columns of concat · W_O, with its bias. */
function output(flow, concat, wide) {
  const { n, W_O } = flow,
    data = product(concat, W_O.data, n, wide, W_O.shown);
  if (W_O.bias)
    data.forEach((_, at) => {
      data[at] += W_O.bias[at % W_O.shown];
    });
  return { rows: n, columns: W_O.columns, shown: W_O.shown, data };
}

/** The parts with the weights of the other lane: U, made of the logits that `bare` has. */
export const beside = (parts, bare) => ({ ...parts, U: bare.P, others: bare.Z });

/** The number in a cell. */
export const at = (part, row, column) => part.data[row * part.shown + column];

/** Pairs of factors with their products; the largest first, and what the others add up to. */
function summed(pairs, name) {
  const products = pairs.map(([a, b], i) => ({ i, a, b, product: a * b, name: name(i) }));
  const sorted = [...products].sort((x, y) => Math.abs(y.product) - Math.abs(x.product)),
    named = sorted.slice(0, TOP);
  return {
    terms: named,
    count: pairs.length,
    rest: sorted.slice(TOP).reduce((sum, one) => sum + one.product, 0),
    largest: Math.abs(sorted[0]?.product ?? 1),
    products: products.map((one) => one.product),
  };
}

const dimension = (i) => `#${i + 1}`;

/** A cell of a projected matrix: a row of one times a column of another, plus a bias. */
function projected(parts, from, by, row, column) {
  const left = parts[from],
    right = parts[by];
  if (!left || !right) return null;
  const pairs = Array.from({ length: left.columns }, (_, k) => [left.data[row * left.shown + k], right.data[k * right.shown + column]]);
  return {
    ...summed(pairs, dimension),
    bias: right.bias?.[column] ?? null,
    sources: [
      { part: from, row },
      { part: by, column },
    ],
  };
}

/**
 * The arithmetic of a cell: `{value, sources, terms, rest, count, words}`. `sources` are rows, columns or cells of other parts,
 * `terms` the largest products with their factors.
 */
export function madeOf(flow, parts, id, row, column, skip) {
  const value = at(parts[id], row, column),
    here = { id, row, column, value };
  const token = (i) => flow.tokens[i];
  if (id === "X" || id.startsWith("W_")) return { ...here, kind: "given", sources: [] };
  if (id === "Q" || id === "K" || id === "V") {
    const made = projected(parts, "X", `W_${id}`, row, column);
    return made ? { ...here, kind: "sum", ...made } : { ...here, kind: "given", sources: [] };
  }
  if (id === "S") {
    const { d_k } = flow,
      pairs = Array.from({ length: d_k }, (_, d) => [parts.Q.data[row * d_k + d], parts.K.data[column * d_k + d]]);
    return {
      ...here,
      kind: "sum",
      ...summed(pairs, dimension),
      sources: [
        { part: "Q", row },
        { part: "K", row: column },
      ],
    };
  }
  if (id === "Z") {
    return {
      ...here,
      kind: "scaled",
      score: at(parts.S, row, column),
      factor: skip ? 1 : flow.scale,
      added: !flow.plain && !skip,
      sources: [{ part: "S", row, column }],
    };
  }
  if (id === "P" || id === "U") {
    const logits = Array.from({ length: flow.n }, (_, j) => at(id === "P" ? parts.Z : parts.others, row, j)),
      peak = Math.max(...logits);
    const terms = logits.map((logit, j) => ({ name: token(j), logit, exp: Math.exp(logit - peak), j }));
    return { ...here, kind: "softmax", terms, total: terms.reduce((sum, one) => sum + one.exp, 0), peak, sources: [{ part: id === "P" ? "Z" : "S", row }] };
  }
  if (id === "C") {
    const pairs = Array.from({ length: flow.n }, (_, j) => [at(parts.P, row, j), at(parts.V, j, column)]);
    return {
      ...here,
      kind: "sum",
      ...summed(pairs, token),
      sources: [
        { part: "P", row },
        { part: "V", column },
      ],
    };
  }
  if (id === "concat") {
    const head = Math.floor(column / flow.d_v);
    return {
      ...here,
      kind: "copied",
      head,
      from: column % flow.d_v,
      sources: head === flow.head ? [{ part: "C", row, column: column % flow.d_v }] : [],
    };
  }
  const made = projected(parts, "concat", "W_O", row, column);
  return { ...here, kind: "sum", ...made };
}
