// The card beside the flow: the step in words, and the arithmetic of the cell under the pointer.

import { written } from "../../../report/data/numbers.js";
import { NAMES, spelled } from "./steps.js";

const number = (value) => written(value, Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 10 ? 2 : 3);

/** The name of a cell: Q[it, 5]. */
function cellName(flow, { id, row, column }) {
  const square = "SZPU".includes(id),
    token = (i) => flow.tokens[i] ?? `#${i + 1}`;
  const left = id.startsWith("W_") ? String(row + 1) : token(row);
  return `${id === "U" ? "P′" : id}[${left}, ${square ? token(column) : column + 1}]`;
}

/** The source of a number that the page does not compute. */
function origin(id) {
  if (id === "X") return "It is given to the layer.";
  return id.startsWith("W_") ? "It is the same for every token." : "The model computes it by more than one matrix.";
}

/** The arithmetic of a cell in one line, for screen readers and for the copy in words. */
export function told(flow, made) {
  const name = cellName(flow, made),
    value = number(made.value),
    token = (i) => flow.tokens[i];
  if (made.kind === "given") return `${name} = ${value}. ${origin(made.id)}`;
  if (made.kind === "scaled")
    return `${name} = ${number(made.score)} × ${number(made.factor)} = ${value}${made.added ? ", with what the model adds" : ""}`;
  if (made.kind === "softmax") return `${name} = e^${number(at(made))} / Σ e^… = ${value}, of ${flow.n} keys`;
  if (made.kind === "copied") return `${name} = ${value}, number ${made.from + 1} of head ${made.head}`;
  const [a, b] = {
    S: [`the query of ${token(made.row)}`, `the key of ${token(made.column)}`],
    C: [`the weights of ${token(made.row)}`, `number ${made.column + 1} of every value`],
  }[made.id] ?? [
    `row ${token(made.row)} of ${made.id === "Y" ? "all heads side by side" : "X"}`,
    `column ${made.column + 1} of ${made.id === "Y" ? "W_O" : `W_${made.id}`}`,
  ];
  const bias = made.bias === null || made.bias === undefined ? "" : ` and a bias of ${number(made.bias)}`;
  return `${name} = ${a} · ${b}: ${made.count} products${bias} = ${value}`;
}

const at = (made) => made.terms.find((one) => one.j === made.column).logit;

/** A line of arithmetic with a bar for its size. */
function line(make, words, size, amount, less, own) {
  return make(
    `li.term${less ? ".less" : ""}${own ? ".own" : ""}`,
    { "--size": `${(100 * Math.min(1, size)).toFixed(1)}%` },
    make("span.what", {}, ...words),
    make("span.amount", {}, amount),
  );
}

/** The terms of a sum: the largest by name, and the rest. */
function sum(make, made) {
  const terms = made.terms.map((one) =>
    line(
      make,
      [make("bdi", {}, one.name), ` ${number(one.a)} × ${number(one.b)}`],
      Math.abs(one.product) / made.largest,
      number(one.product),
      one.product < 0,
    ),
  );
  const others = made.count - made.terms.length;
  if (others > 0)
    terms.push(line(make, [`${others} more, together`], Math.abs(made.rest) / made.largest, number(made.rest), made.rest < 0));
  if (made.bias !== null && made.bias !== undefined)
    terms.push(line(make, ["bias"], Math.abs(made.bias) / made.largest, number(made.bias), made.bias < 0));
  return make("ol.terms", {}, terms);
}

/** The terms of a softmax: e to each logit, over their sum. */
function softmax(make, made) {
  const most = [...made.terms].sort((a, b) => b.exp - a.exp).slice(0, 6);
  if (!most.some((one) => one.j === made.column)) most[most.length - 1] = made.terms[made.column];
  return make(
    "ol.terms",
    {},
    most.map((one) =>
      line(
        make,
        [make("bdi", {}, one.name), one.logit === -Infinity ? " hidden" : ` e^${number(one.logit)}`],
        one.exp / made.total,
        written(one.exp / made.total, 3),
        false,
        one.j === made.column,
      ),
    ),
  );
}

/** The arithmetic of a cell as nodes. */
export function arithmetic(make, flow, made) {
  const parts = { sum, softmax }[made.kind];
  return [
    make("p.cell-name", {}, make(`b.ink-${hue(made.id)}`, {}, cellName(flow, made)), ` = ${number(made.value)}`),
    make("p.dim", {}, told(flow, made).slice(cellName(flow, made).length + 3)),
    parts ? parts(make, made) : null,
  ].filter(Boolean);
}

const hue = (id) =>
  ({
    Q: "query",
    W_Q: "query",
    K: "key",
    W_K: "key",
    V: "value",
    W_V: "value",
    C: "value",
    concat: "value",
    S: "weight",
    Z: "weight",
    P: "weight",
    U: "other",
    heads: "weight",
  })[id] ?? "plain";

/** The words of a step; those that name a part can be pointed at. */
export function stepWords(make, step, name) {
  return spelled(step.words).flatMap(
    ([words, part]) =>
      part
        ? make(
            `span.part-word.ink-${hue(part)}`,
            {
              "data-names": part,
              tabindex: "0",
              role: "note",
              "aria-label": `${words} (${NAMES[part] ?? "tokens"})`,
              onpointerenter: () => name(part),
              onpointerleave: () => name(null),
              onfocus: () => name(part),
              onblur: () => name(null),
            },
            words,
          )
        : [...make("span", {}, words).childNodes], // with its subscripts
  );
}
