// The steps of the flow in words. A word in braces names a part of the picture: {Q|queries}.

import { written } from "../../../report/data/numbers.js";
import { spread } from "./parts.js";

export const MOST = 10; // steps, where a mask is one of them

/** A number with two significant digits. */
const two = (number) => written(number, Math.abs(number) >= 10 ? 1 : 2);

/** The largest weight of a row, the mean over rows. */
function sharpness(P, n) {
  let sum = 0;
  for (let i = 0; i < n; i++) sum += Math.max(...P.data.subarray(i * n, (i + 1) * n));
  return sum / n;
}

const noun = (flow) => (flow.way === "lesson" ? "word" : "token");

/** The marks that a tokenizer puts around a sentence. */
function marks({ special }) {
  const [first, last] = [special[0], special.length > 1 && special.at(-1)];
  return first && last ? ", with marks for its beginning and end" : first || last ? `, with a mark for its ${first ? "beginning" : "end"}` : "";
}

/** Whether a token cannot see those after it. */
const hides = ({ logits, head, n }) => Boolean(logits && n > 1 && logits[head][n - 1] === -Infinity && logits[head][1] === -Infinity);

/** From words to Q, K and V. */
function given(flow) {
  const { n, d_model, d_k, model } = flow;
  const lesson = flow.way === "lesson",
    word = noun(flow);
  const asks = "how much of you do I need?";
  const mixed = flow.layer > 0 ? "The layers before have mixed it with its neighbours." : "No layer before it has mixed it with others.";
  const inside = flow.X
    ? `Layer ${flow.layer} is given {X|one row of ${d_model} numbers} for each token. ${mixed}`
    : "What the layer is given was not seen in this model.";
  return [
    {
      title: "Words",
      parts: ["tokens"],
      formula: `${n} tokens`,
      words: lesson
        ? `The sentence is split into {tokens|words}. Every word will ask every word, itself included: ${asks}`
        : `${model} splits the sentence into {tokens|tokens}${marks(flow)}. Each will ask each${hides(flow) ? " up to itself" : ""}: ${asks}`,
    },
    {
      title: "Embeddings",
      parts: ["X"],
      formula: `X: ${n} × ${d_model ?? "?"}`,
      words: lesson
        ? `Each word becomes {X|${d_model} numbers}. Here they are drawn at random from its spelling, as at the start of training: ` +
          "they show what the arithmetic does, not what words mean."
        : inside,
    },
    {
      title: "Three matrices",
      parts: ["W_Q", "W_K", "W_V"],
      formula: flow.W_Q ? `W: ${flow.W_Q.rows} × ${flow.W_Q.columns}` : "W",
      words:
        "{W_Q|One matrix} makes queries, {W_K|one} makes keys, {W_V|one} makes values. They are the same for every " +
        `${word}, ` +
        `${lesson ? "and here drawn so that q and k have entries of variance 1" : "and learned"}.${flow.without ? ` ${flow.without}` : ""}`,
    },
    {
      title: "Queries, keys, values",
      parts: ["Q", "K", "V"],
      formula: "Q = X W_Q   K = X W_K   V = X W_V",
      words:
        `Each ${word} now has ` +
        "a {Q|query}, what it looks for; a {K|key}, what it is found by; and a {V|value}, what it gives when it is " +
        `found. Each has ${d_k} numbers.`,
    },
  ];
}

/** Scores and what the scale does to them. */
function scaled(flow, parts, skip) {
  const { d_k } = flow;
  const divides = Math.abs(flow.scale * Math.sqrt(d_k) - 1) < 1e-6;
  const [raw, after] = [spread(parts.S.data), spread(parts.Z.data)];
  const by = divides ? `÷ √${d_k} = ${two(Math.sqrt(d_k))}` : `× ${written(flow.scale)}`;
  const formula = divides ? "Z = S / √d_k" : `Z = ${written(flow.scale)} · S`;
  return [
    {
      title: "Scores",
      parts: ["S"],
      formula: "S = Q Kᵀ",
      words:
        `Each {Q|query} is multiplied with each {K|key}, number by number, and the ${d_k} products are added: {S|one score} for each pair ` +
        `of ${noun(flow)}s. These scores have a standard deviation of ${two(raw)}${raw > 2 ? `: a sum of ${d_k} terms is wide` : ""}.`,
    },
    {
      title: skip ? "No division" : divides ? "Divide by √d_k" : "The scale",
      parts: ["S", "Z"],
      formula: skip ? "Z = S" : formula,
      words: skip
        ? `The {S|scores} go on as they are. Their standard deviation of ${two(raw)} is what the softmax will see in {Z|Z}.`
        : `All {S|scores} ${by}. {Z|The same pattern} on the same colour scale${after < raw / 2 ? " is pale: its" : " has a"} standard ` +
          `deviation${after < raw / 2 ? " is" : " of"} ${two(after)}. ` +
          "With random vectors a sum of d_k products grows like √d_k, so √d_k, and not d_k, keeps it near 1 for any width.",
    },
  ];
}

/** What hides the tokens to come, where it does. */
const masked = (flow) =>
  hides(flow)
    ? [
        {
          title: "Mask",
          parts: ["Z"],
          formula: "Z[i, j] = −∞ for j > i",
          words:
            "The model learns to say the next token, so no token may look at those after it. The mask makes {Z|their logits} −∞, and e^−∞ is 0: " +
            "they get no weight.",
        },
      ]
    : [];

/** From weights to the output. */
function mixed(flow, parts, other, skip) {
  const { n, heads, groups, d_v } = flow,
    own = groups > 1 ? `its own queries (${groups} heads share keys and values)` : "its own matrices";
  const [now, without] = [two(sharpness(parts.P, n)), two(sharpness(other, n))];
  return [
    {
      title: "Softmax",
      parts: ["Z", "P", "U"],
      formula: "P = softmax(Z), row by row",
      words:
        `Each row of {Z|logits} becomes {P|weights} that add up to 1. The largest weight of a row is ${now} on average here. ` +
        (skip ? `{U|With the division} it is ${without}.` : `{U|Without the division} it is ${without}: the switch sends those on.`),
    },
    {
      title: "Weighted sum",
      parts: ["P", "V", "C"],
      formula: "C = P V",
      words:
        `Each ${noun(flow)} takes ` +
        "from every {V|value} as much as its {P|weights} say. What comes out is its {C|context}: a mean of the values, " +
        "which lies among them.",
    },
    {
      title: `All ${heads} heads`,
      parts: ["heads", "C", "concat", "W_O", "Y"],
      formula: "Y = concat(C₁ … Cₕ) W_O",
      words:
        `{heads|${heads} heads} do this at once, each with ${own} and ${d_v} of the ${heads * d_v} columns. Their contexts are ` +
        "put {concat|side by side}, and {W_O|one more matrix} mixes them into the {Y|output}, which has the shape of the input.",
    },
  ];
}

/** All steps: `{title, parts, formula, words}`, with the numbers of this flow; `other` are the weights if the switch were turned. */
export const steps = (flow, parts, other, skip) => [
  ...given(flow),
  ...scaled(flow, parts, skip),
  ...masked(flow),
  ...mixed(flow, parts, other, skip),
];

/** Words and the parts they name: [["text"], ["queries", "Q"], …]. */
export const spelled = (words) =>
  words
    .split(/(\{[^}]+\})/)
    .filter(Boolean)
    .map((piece) => {
      const found = piece.match(/^\{(\w+)\|(.+)\}$/);
      return found ? [found[2], found[1]] : [piece];
    });

/** Names of parts, for people. */
export const NAMES = {
  X: "X, embeddings",
  W_Q: "W_Q",
  W_K: "W_K",
  W_V: "W_V",
  Q: "Q, queries",
  K: "K, keys",
  V: "V, values",
  S: "S, scores",
  Z: "Z, logits",
  P: "P, weights",
  U: "P′, weights of the other lane",
  C: "C, context",
  heads: "all heads",
  concat: "heads side by side",
  W_O: "W_O",
  Y: "Y, output",
};
