// The steps of the flow in words. A word in braces names a part of the picture: {Q|queries}.

import { written } from "../../../report/data/numbers.js";
import { spread } from "./parts.js";

const PLACE = ["first", "second", "third"];

/** A number with two digits that count. */
const two = (number) => written(number, Math.abs(number) >= 10 ? 1 : 2);

/** The largest weight of all rows, and the mean largest one. */
function sharp(P, n) {
  let sum = 0;
  for (let i = 0; i < n; i++) sum += Math.max(...P.data.subarray(i * n, (i + 1) * n));
  return sum / n;
}

/** All steps: `{title, parts, formula, words}`. Numbers are those of this flow. */
export function steps(flow, parts, bare, skip) {
  const lesson = flow.way === "lesson", { n, d_model, d_k, heads } = flow, root = `√${d_k} = ${two(Math.sqrt(d_k))}`;
  const divide = Math.abs(flow.scale * Math.sqrt(d_k) - 1) < 1e-6, by = divide ? `÷ ${root}` : `× ${written(flow.scale)}`;
  const raw = spread(parts.S.data), scaled = spread(parts.Z.data), name = flow.model;
  return [
    { title: "Words", parts: ["tokens"], formula: `${n} tokens`,
      words: lesson ? "The sentence is split into {tokens|words}. Every word will ask every word, itself included: how much of you do I need?"
        : `${name} splits the sentence into {tokens|tokens}, with its own marks for the beginning and the end. Every token will ask every token: how much of you do I need?` },
    { title: "Embeddings", parts: ["X"], formula: `X: ${n} × ${d_model ?? "?"}`,
      words: lesson ? `Each word becomes {X|${d_model} numbers}. Here they are drawn at random from its spelling, as at the start of training: the numbers show what the arithmetic does, not what words mean.`
        : flow.X ? `What layer ${flow.layer} is given: {X|one row of ${d_model} numbers} for each token, which the layers before have already mixed with its neighbours.`
          : "What the layer is given was not seen in this model." },
    { title: "Three matrices", parts: ["W_Q", "W_K", "W_V"], formula: flow.W_Q ? `W: ${flow.W_Q.rows} × ${flow.W_Q.columns}` : "W",
      words: `{W_Q|One matrix} makes queries, {W_K|one} makes keys, {W_V|one} makes values. They are the same for every word${lesson ? ", and here drawn so that q and k have entries of variance 1" : ", and learned"}.${flow.without ? ` ${flow.without}` : ""}` },
    { title: "Queries, keys, values", parts: ["Q", "K", "V"], formula: "Q = X W_Q   K = X W_K   V = X W_V",
      words: `Each word now has a {Q|query}, what it looks for; a {K|key}, what it offers to be found by; and a {V|value}, what it gives when it is found. Each has ${d_k} numbers.` },
    { title: "Scores", parts: ["S"], formula: "S = Q Kᵀ",
      words: `Each {Q|query} is multiplied with each {K|key}, number by number, and the ${d_k} products are added: {S|one score} for each pair of words. A sum of ${d_k} terms is wide: these scores spread with a standard deviation of ${two(raw)}.` },
    { title: skip ? "No division" : divide ? "Divide by √d_k" : "The scale", parts: ["S", "Z"], formula: skip ? "Z = S" : divide ? "Z = S / √d_k" : `Z = ${written(flow.scale)} · S`,
      words: skip ? `The {S|scores} go on as they are. Their spread of ${two(raw)} is what the softmax will see.`
        : `All {S|scores} ${by}. {Z|The same pattern}, drawn on the same colour scale, is pale: its standard deviation is ${two(scaled)}. With random vectors the sum grows like √d_k, so this divisor, and not d_k, keeps it near 1 for any width.` },
    { title: "Softmax", parts: ["Z", "P"], formula: "P = softmax(Z), row by row",
      words: `Each row of {Z|logits} becomes {P|weights} that add up to 1. The largest weight of a row is ${two(sharp(parts.P, n))} on average here. ${skip ? `With the division it would be ${two(sharp(bare, n))}.` : `Without the division it would be ${two(sharp(bare, n))}: try the switch.`}` },
    { title: "Weighted sum", parts: ["P", "V", "C"], formula: "C = P V",
      words: `Each word takes from every {V|value} as much as its {P|weights} say. What comes out is its {C|context}: its row is a mean of the values, and lies among them.` },
    { title: `All ${heads} heads`, parts: ["heads", "C", "concat", "W_O", "Y"], formula: "Y = concat(C₁ … Cₕ) W_O",
      words: `{heads|${heads} heads} do this at once, each with its own matrices and ${d_k} of the ${heads * flow.d_v} columns. Their contexts are put {concat|side by side}, and {W_O|one more matrix} mixes them into the {Y|output}, which has the shape of the input.` },
  ];
}

/** Words and the parts they name: [["text"], ["queries", "Q"], …]. */
export const spelled = (words) => words.split(/(\{[^}]+\})/).filter(Boolean).map((piece) => {
  const found = piece.match(/^\{(\w+)\|(.+)\}$/);
  return found ? [found[2], found[1]] : [piece];
});

/** Names of parts, for people. */
export const NAMES = { X: "X, embeddings", W_Q: "W_Q", W_K: "W_K", W_V: "W_V", Q: "Q, queries", K: "K, keys", V: "V, values", S: "S, scores", Z: "Z, logits",
  P: "P, weights", C: "C, context", heads: "all heads", concat: "heads side by side", W_O: "W_O", Y: "Y, output" };
export const ordinal = (i) => PLACE[i] ?? `${i + 1}th`;
