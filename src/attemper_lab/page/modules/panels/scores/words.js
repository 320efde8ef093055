// What the comparison of the scores shows, in words.

import { written } from "../../../report/data/numbers.js";
import { correlation } from "./charts.js";
import { KEYS, QUERY, planeKey, planeScores } from "./model.js";

const short = (number) => written(number, 2);

/** What the plane shows. */
export function planeWords(state) {
  const { dot, cosine } = planeScores(state);
  const [a, b] = planeKey(state).map(short);
  const product = `${short(Math.hypot(...QUERY))} × ${short(state.length)} × ${short(cosine)} = ${short(dot)}`;
  return [
    `q·k = |q| |k| cos θ = ${product}, with k = (${a}, ${b}).`,
    "Make k longer: the dot product grows with it, and the cosine does not.",
    "Each tanh only comes nearer to 1, so the additive score stays within Σ|w|, here 2.",
  ].join(" ");
}

/** What the random vectors show. */
export function widthWords({ d }, { dot, scaled, cosine, additive }) {
  const alike = (one) => short(correlation(scaled.logits, one.logits));
  return [
    `At d = ${d} the dot product spreads by ${short(dot.signs.std)}: in effect ${short(dot.signs.effective_keys)} of ${KEYS} keys share the weight.`,
    `The cosine spreads by ${short(cosine.signs.std)}, about 1/√d: ${short(cosine.signs.effective_keys)} keys share it.`,
    "A bare cosine can hardly attend; it needs a factor in front.",
    `The scaled dot product is that: √d times the cosine, where all lengths are √d. The two correlate by ${alike(cosine)}.`,
    `The additive score compares in another way (correlation ${alike(additive)}). It spreads by ${short(additive.signs.std)},`,
    "does not grow with d while w is drawn small, and takes a tanh for every number.",
  ].join(" ");
}
