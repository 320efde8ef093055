// The numbers of both lanes as a table, and what they say in a sentence.

import { written } from "../../../report/data/numbers.js";
import { say } from "../../draw/words.js";
import { criticalSpread } from "../../maths/signs.js";

/** Four significant digits; whole numbers as they are. */
function tiny(number) {
  if (Number.isInteger(number)) return String(number);
  const size = Math.abs(number);
  return size > 0 && size < 1e-3 ? number.toExponential(1).replaceAll("-", "−") : written(number);
}
/** [name, explanation, function that reads it from a lane, function that formats it] */
export const ROWS = [
  ["spread of logits", "std", (lane) => lane.signs.std],
  ["largest logit", "", (lane) => lane.signs.peak],
  ["mean logit", "", (lane) => lane.signs.mean],
  ["top weight", "mean", (lane) => lane.signs.top_weight * lane.factor],
  ["effective keys", "exp H", (lane) => lane.signs.effective_keys],
  ["entropy", "nats", (lane) => lane.signs.entropy],
  ["Σp²", "1 is one-hot", (lane) => lane.signs.sum_p2],
  ["weights add up to", "", (lane) => lane.factor],
  ["grad. at softmax", "median", (lane) => lane.statistics.logits.median],
  ["grad. at softmax", "RMS", (lane) => lane.statistics.logits.rms],
  ["grad. at q", "median", (lane) => lane.statistics.query.median],
  ["grad. at q", "RMS", (lane) => lane.statistics.query.rms],
  ["logit > 11.09", "rows; float16 exp overflows", (lane) => lane.overflowing],
];

export function numbersTable(page) {
  const { make } = page,
    heads = [make("th.num.none", { scope: "col" }), make("th.num.chosen", { scope: "col" })];
  const cells = ROWS.map(() => [make("td.num"), make("td.num")]);
  const body = make(
    "tbody",
    {},
    ROWS.map(([name, what], i) =>
      make("tr", {}, make("th", { scope: "row" }, name, what ? make("span.dim", {}, ` ${what}`) : ""), cells[i]),
    ),
  );
  const node = make(
    "table.numbers",
    {},
    make("caption.unseen", {}, "Signs and gradients under both rules"),
    make("thead", {}, make("tr", {}, make("td", {}), heads)),
    body,
  );
  return {
    node,
    update(state, found) {
      found.lanes.forEach((lane, i) => {
        say(page, heads[i], lane.rule.label);
        ROWS.forEach(([, , read], j) => {
          cells[j][i].textContent = tiny(read(lane));
        });
      });
    },
  };
}

const share = (number) => (number >= 0.995 ? "all" : `${number < 0.1 ? (100 * number).toFixed(1) : Math.round(100 * number)} %`);

/** What the second lane shows, by its rule. Every word of it must hold at the ends of all sliders: a test reads them there. */
const AFTER = {
  sqrt_dk: ({ d, spread, shared, top, aligned, std }) =>
    d === 1
      ? `Divided by √1 nothing changes: the spread is ${spread}.`
      : `Divided by √${d}, the spread is ${spread}${!aligned && Math.abs(std - 1) < 0.1 ? ", near 1 as at every d_k" : ""}: ` +
        `the top key gets ${top} of the weight, ${shared}.`,
  dk: ({ d, n, spread, shared, effective }) =>
    d === 1
      ? `Divided by 1 nothing changes: the spread is ${spread}.`
      : `Divided by ${d}, the spread is ${spread}: the weight is spread ${shared}${effective > 0.95 * n ? ": q hardly matters" : ""}.`,
  sqrt_dmodel: ({ d, heads, spread, shared }) =>
    heads === 1
      ? `With one head d_model is d_k, so this is ÷ √d_k: the spread is ${spread}.`
      : `Divided by √(${heads} × ${d}), the spread is ${spread}, √${heads} times smaller than by √d_k: ` +
        `the weight is spread ${shared}.`,
  after: ({ d, sum }) =>
    d === 1
      ? "Divided by √1 nothing changes: the weights add up to 1."
      : `Dividing the weights afterwards leaves each key its share of the row; the weights only add up to ${sum}.`,
  fp16: ({ overflowing, rows }) =>
    `${overflowing} of ${rows} rows ${overflowing === 1 ? "has" : "have"} a logit above 11.09, where exp overflows in float16 ` +
    "unless the maximum is subtracted.",
  qk_norm: ({ spread }) => `√d_k times the cosine spreads by ${spread}: the division is inside the lengths.`,
  softcap: ({ d, spread, capped }) =>
    `Divided by √${d} and capped at 50, the spread is ${spread}` +
    `${capped < 0.01 ? ": the cap has nothing to do yet." : `; the cap lowers the largest logit by ${written(capped, 2)}.`}`,
  additive: ({ spread, rows }) => `The additive score spreads by ${spread}, measured on ${rows} queries: it has no sum of d_k products.`,
};

const sharedBy = ({ signs }, n) => `as if ${written(signs.effective_keys, 1)} of ${n} keys shared it equally`;

/** What is seen, in two sentences: first without the divisor, then with the chosen rule. */
export function verdict(state, { bare: plain, second: scaled }) {
  const { d, n, heads, aligned } = state,
    limit = criticalSpread(n);
  const bare =
    `With d_k = ${d} the scores q·k spread by ${written(plain.signs.std, 1)} (√${d} = ${written(Math.sqrt(d), 1)}), ` +
    `${plain.signs.std > limit ? "above" : "below"} √(2 ln ${n}) = ${written(limit, 1)}: the top key gets ${share(plain.signs.top_weight)} of the weight, ` +
    `${sharedBy(plain, n)}.`;
  const { std, effective_keys: effective, peak } = scaled.signs,
    after = AFTER[scaled.name]({
      d,
      n,
      heads,
      aligned,
      std,
      effective,
      spread: written(std, 2),
      shared: sharedBy(scaled, n),
      top: share(scaled.signs.top_weight),
      sum: written(scaled.factor, 3),
      rows: scaled.rows.length,
      overflowing: scaled.overflowing,
      capped: plain.signs.peak / Math.sqrt(d) - peak,
    });
  const factor = scaled.rule.scale({ d, heads });
  const own = aligned
    ? ` Each query's own key is aligned with it and scores about ${written(0.5 * d, 1)}${factor === 1 ? "" : `, divided ${written(0.5 * d * factor, 1)}`}.`
    : "";
  return [bare, after + own];
}

const times = (a, b) => (b > 0 ? `${Number((a / b).toPrecision(2))}` : "–");

/** What the gradients say: the typical query beside the mean square, in both units. */
export function gradientWords({ bare, second }) {
  const [one, other] = [bare, second].map((lane) => lane.statistics),
    ratio = (unit, name) => times(one[unit][name], other[unit][name]);
  const idle = bare.gradients.query.filter((length) => length < 0.01 * one.query.rms).length;
  if (bare.logits.every((logit, i) => logit === second.logits[i]) && !second.rule.after)
    return "Both lanes have the same logits here, and the same gradients.";
  return (
    `Without a divisor the median query's gradient is ${ratio("logits", "median")} times that under ${second.rule.formula} at the softmax's input, and ` +
    `${ratio("query", "median")} times at q; the RMS is ${ratio("logits", "rms")} and ${ratio("query", "rms")} times. ` +
    (one.query.rms < 0.01 * other.query.rms
      ? "Here nearly every row is one-hot, and nearly every gradient vanishes without a divisor. "
      : idle > 0.05 * bare.rows.length
        ? `${idle} of ${bare.rows.length} queries get less than a hundredth of the RMS at q without a divisor: not all gradients vanish; they become uneven. `
        : "") +
    "What training makes of that is shown below."
  );
}
