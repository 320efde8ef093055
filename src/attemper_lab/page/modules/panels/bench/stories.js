// The texts of the bench: the rules as switches, what each does to attention and where it happened for real; the formula and the words.

/** Name → what one sees, and where it happened. */
export const STORIES = {
  sqrt_dk: {
    button: "÷ √d_k",
    name: "Divide by √d_k",
    sees:
      "q·k is a sum of d_k products, so its variance is d_k and its spread √d_k. Dividing by c divides the variance by c². " +
      "To bring d_k back to 1, c² must be d_k: hence the root.",
    real: "The Transformer (Vaswani et al. 2017, footnote 4), and nearly every model since.",
  },
  none: {
    button: "no divisor",
    name: "Leave the divisor out",
    sees: "The spread grows as √d_k. Past √(2 ln n) a few keys have nearly all the weight.",
    real: "T5 and GPT-Neo divide by nothing: T5 draws W_Q smaller by √d_k instead, so the first step is the same.",
  },
  dk: {
    button: "÷ d_k",
    name: "Divide by d_k",
    sees: "The spread shrinks as 1/√d_k: the wider the head, the more alike all keys look. Even a key equal to the query hardly stands out.",
    real: "µP (Yang et al. 2022) chooses it on purpose: once training has aligned q with its keys, q·k grows like d_k. Try “aligned keys”.",
  },
  sqrt_dmodel: {
    button: "÷ √d_model",
    name: "Divide by √d_model",
    sees: "The dot product has d_k terms, not d_model: the logits are √heads too small, and attention is too flat.",
    real: "A common slip, as in aladdinpersson/Machine-Learning-Collection #65: √embed_size in place of √head_dim.",
  },
  after: {
    button: "after softmax",
    name: "Divide after the softmax",
    sees: "Softmax has already saturated. The division only makes the weights add up to 1/√d_k, and shrinks the output.",
    real: "FrancescoSaverioZuppichini/ViT #6: the scores were divided behind the softmax.",
  },
  fp16: {
    button: "float16",
    name: "No divisor, logits kept in float16",
    sees: "Large numbers have coarse steps: at 64 to 128 a float16 moves by 1/16. A softmax that does not subtract the maximum overflows above 11.09.",
    real: "torch's softmax subtracts the maximum and never overflows; textbook code does not. With 1/√d_k no row here comes near 11.09.",
  },
  qk_norm: {
    button: "cosine",
    name: "Cosine, times √d_k (QK-norm)",
    sees: "q and k are brought to length 1, so no logit can exceed √d_k, whatever training does to their lengths. The spread is 1 again.",
    real: "ViT-22B, OLMo 2, Gemma 3, Qwen 3, each with a learned factor.",
  },
  softcap: {
    button: "softcap",
    name: "1/√d_k, then a cap of 50",
    sees: "Before training nothing comes near 50, so nothing changes: a cap acts only on what training makes too large.",
    real: "Gemma 2 (50) and Grok-1 (30).",
  },
  additive: {
    button: "additive",
    name: "Additive: wᵀ tanh(q + k)",
    sees: "No dot product, so nothing grows with d_k while w is drawn small. It is bounded by Σ|w|, and needs a tanh for each number.",
    real: "Bahdanau et al. 2014. Britz et al. 2017 found it ahead of the bare dot product at large d: the reason why the Transformer divides.",
  },
};
export const ALIGNED_STORY =
  "Aligned keys: each query has one key that is half itself, as after training. Its score grows like d_k, " +
  "not like √d_k. Compare ÷ √d_k with ÷ d_k.";

const WORDS = [
  ["query q, key k", "each token asks with a query and is found by its key; both are lists of d_k numbers, here random ones"],
  ["score q·k", "multiply q and k number by number and add up: how well they match; with its divisor it is called a logit"],
  ["softmax", "makes a row of logits, one for each key, into weights: e to each logit, divided by the sum of all, so that they add up to 1"],
  ["spread", "the standard deviation (std) of the logits of one query; its square is the variance"],
  ["√(2 ln n)", "softmax over n random keys: at a smaller spread many of them share the weight, at a larger one a few have nearly all of it"],
  ["effective keys", "e to the entropy: how many keys would share the weight, if they shared it evenly"],
  ["gradient", "how much the loss L would change: at the softmax's input if a logit moved (J is the softmax's derivative), at q if the query did"],
  ["median, RMS", "the typical query's gradient; and the root of the mean square, which a few large gradients make"],
];

/** The formula, and the words behind a button that opens them. */
export function glossary(page) {
  const { make } = page;
  const formula = make("span.formula", {}, "Attention(Q, K, V) = softmax(", make("b", {}, "Q Kᵀ / √d_k"), ") V");
  const terms = WORDS.flatMap(([word, says]) => [make("dt", {}, word), make("dd", {}, says)]);
  return make(
    "details.glossary",
    { "data-control": "bench.words" },
    make("summary", {}, formula, make("span.dim", {}, "What the words mean")),
    make("dl", {}, terms),
  );
}
