// The numbers of both lanes as a table, and what they say in a sentence.

import { written } from "../../../report/data/numbers.js";
import { say } from "../../draw/words.js";
import { criticalSpread } from "../../maths/signs.js";

/** Four digits that count; whole numbers as they are. */
function tiny(number) {
  if (Number.isInteger(number)) return String(number);
  const size = Math.abs(number);
  return size > 0 && size < 1e-3 ? number.toExponential(1).replaceAll("-", "−") : written(number);
}
/** [name, what it is, how it is read from a lane, how it is written] */
export const ROWS = [
  ["spread of logits", "std", (lane) => lane.signs.std],
  ["largest logit", "", (lane) => lane.signs.peak],
  ["mean logit", "", (lane) => lane.signs.mean],
  ["top weight", "mean", (lane) => lane.signs.top_weight * lane.factor],
  ["effective keys", "exp H", (lane) => lane.signs.effective_keys],
  ["entropy", "nats", (lane) => lane.signs.entropy],
  ["Σp²", "1 is one-hot", (lane) => lane.signs.p2],
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

/** What is seen, in two sentences: first without the divisor, then with the chosen rule. */
export function verdict(state, { bare: plain, second: scaled }) {
  const { d, n, rule, aligned } = state,
    limit = criticalSpread(n);
  const bare =
    `With d_k = ${d} the scores q·k spread by ${written(plain.signs.std, 1)} (√${d} = ${written(Math.sqrt(d), 1)}), ` +
    `${plain.signs.std > limit ? "above" : "below"} √(2 ln ${n}) = ${written(limit, 1)}: the top key gets ${share(plain.signs.top_weight)} of the weight, ` +
    `and in effect ${written(plain.signs.effective_keys, 1)} of ${n} keys share it.`;
  const std = scaled.signs.std,
    keys = written(scaled.signs.effective_keys, 1);
  const divided =
    `Divided by √${d}, the spread is ${written(std, 2)}${aligned ? "" : ", near 1 as at every d_k"}: ` +
    `the top key gets ${share(scaled.signs.top_weight)} of the weight, and ${keys} of ${n} keys share it.`;
  const after = {
    sqrt_dk: divided,
    none: divided,
    dk: `Divided by ${d}, the spread is only ${written(std, 3)}: ${keys} of ${n} keys share the weight, as if q did not matter.`,
    sqrt_dmodel: `Divided by √(${state.heads} × ${d}), the spread is only ${written(std, 2)}: ${keys} of ${n} keys share the weight.`,
    after: `Dividing the weights afterwards leaves them as one-hot as before; they only add up to ${written(scaled.factor, 3)}.`,
    fp16: `${scaled.overflowing} of ${scaled.rows.length} rows have a logit above 11.09, where exp overflows in float16 unless the maximum is subtracted.`,
    qk_norm: `√d_k times the cosine spreads by ${written(std, 2)}: the division is inside the lengths.`,
    softcap: `Divided by √${d} and capped at 50, the spread is ${written(std, 2)}: the cap has nothing to do yet.`,
    additive: `The additive score spreads by ${written(std, 2)}, whatever d_k is.`,
  }[rule];
  const factor = scaled.rule.scale({ d, heads: state.heads });
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
