// What happens while it trains: recorded runs of a small language model, with 1/√d_k and without a scale.

import { asPower, axisBelow, axisLeft, linear, logarithmic, path, powers } from "../../draw/axes.js";
import { change, draw, picture } from "../../draw/svg.js";
import { say } from "../../draw/words.js";

const WIDE = 352,
  HIGH = 224,
  LEFT = 40,
  RIGHT = 346,
  TOP = 28,
  BOTTOM = 186;
const CHARTS = [
  { key: "grad_q_median", title: "Median gradient at q", name: "size of an entry (log)", log: true },
  { key: "effective_keys", title: "Keys that share the weight", name: "effective keys of 64.5, log", log: true },
  { key: "loss", title: "Training loss", name: "nats per character", log: false },
];
const KINDS = { sqrt_dk: "chosen", none: "none" };

const middle = (values) => [...values].sort((a, b) => a - b)[(values.length - 1) >> 1];

/** Steps, and the median, least and most over seeds of a column. */
export function series(runs, lr, rule, key) {
  const found = runs.runs.filter((run) => run.lr === lr && run.rule === rule);
  const at = (i) => found.map((run) => run[key][i]);
  return found.length
    ? found[0].step.map((step, i) => ({ step, middle: middle(at(i)), least: Math.min(...at(i)), most: Math.max(...at(i)) }))
    : [];
}

function runsChart(page, { key, name, log, title }) {
  const pen = draw(page.document),
    svg = picture(pen, { width: WIDE, height: HIGH, name: `${title} over the training steps` });
  const below = axisBelow(pen, { y: BOTTOM, name: "training step" }),
    left = axisLeft(pen, { x: LEFT, top: TOP, name, right: RIGHT, written: log ? asPower : String });
  const parts = Object.entries(KINDS).map(([rule, kind]) => ({
    rule,
    band: pen(`path.band.${kind}`),
    line: pen(`path.run.${kind}`),
    label: pen(`text.lane-name.${kind}`, { "text-anchor": "end", x: RIGHT }, rule === "none" ? "no divisor" : "÷ √d_k"),
  }));
  svg.append(left.node, below.node, ...parts.flatMap(({ band, line, label }) => [band, line, label]));
  return {
    svg,
    update(runs, lr) {
      const all = parts.map(({ rule }) => series(runs, lr, rule, key)),
        flat = all.flat();
      const low = Math.min(...flat.map((one) => one.least)),
        high = Math.max(...flat.map((one) => one.most));
      const ends = log ? [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high))] : [Math.floor(low), Math.ceil(high)];
      const x = linear([0, Math.max(...flat.map((one) => one.step))], [LEFT, RIGHT]),
        y = (log ? logarithmic : linear)(ends, [BOTTOM, TOP]);
      below.update(x, [0, 200, 400, 600, 800]);
      left.update(y, log ? powers(ends) : Array.from({ length: ends[1] - ends[0] + 1 }, (_, i) => ends[0] + i));
      const finals = all.map((points) => y(points.at(-1).middle));
      parts.forEach(({ band, line, label }, i) => {
        const points = all[i];
        change(line, { d: path(points.map((one) => [x(one.step), y(one.middle)])) });
        change(band, {
          d: `${path([...points.map((one) => [x(one.step), y(one.most)]), ...[...points].reverse().map((one) => [x(one.step), y(one.least)])])}Z`,
        });
        change(label, { y: finals[i] + (finals[i] >= finals[1 - i] ? 12.5 : -7) });
      });
    },
  };
}

/** The lane, or null where the page has no runs. */
export function trainingLane(page) {
  const { make } = page,
    runs = page.data.bench;
  if (!runs) return null;
  const charts = CHARTS.map((about) => runsChart(page, about)),
    says = make("p.seen");
  const select = make(
    "select",
    { id: "bench-lr", onchange: () => page.set("bench", { lr: select.value }) },
    runs.lrs.map((lr) => make("option", { value: String(lr) }, String(lr))),
  );
  const node = make(
    "section.trained",
    { "data-control": "bench.training" },
    make("h2", {}, "What happens while it trains"),
    make(
      "p.dim.note",
      {},
      `A language model of ${runs.layers} layers with d_k = ${runs.d_k}, trained for ${runs.steps} steps with 1/√d_k and without a scale, ` +
        "from the same start on the same text. Lines are medians of three seeds, bands their range; recorded, not computed here.",
    ),
    make("label.row", { for: "bench-lr" }, "learning rate ", select),
    make(
      "div.three",
      {},
      charts.map((chart, i) => make("figure", {}, make("h3", {}, CHARTS[i].title), chart.svg)),
    ),
    says,
  );
  return {
    node,
    charts: charts.map((chart, i) => ({ name: `training-${CHARTS[i].key.replaceAll("_", "-")}`, svg: chart.svg })),
    words: () => says.textContent,
    update(state) {
      const lr = Number(state.lr),
        of = (rule, key) => series(runs, lr, rule, key);
      select.value = String(lr);
      for (const chart of charts) chart.update(runs, lr);
      const [bare, scaled] = ["none", "sqrt_dk"].map((rule) => of(rule, "grad_q_median"));
      const root = Math.sqrt(runs.d_k),
        ratio = (i, factor = 1) => Number((bare.at(i).middle / factor / scaled.at(i).middle).toPrecision(2));
      say(
        page,
        says,
        `Before the first step the median gradient without the scale is ${ratio(0)} times that with it; after ${runs.steps} steps ` +
          `${ratio(-1)} times. The missing division alone makes every gradient at q √d_k = ${root} times larger, which Adam divides out: without that ` +
          `factor the two numbers are ${ratio(0, root)} and ${ratio(-1, root)}. Each step moves unscaled logits ${root} times as far, ` +
          "the weights become still more one-hot, and few queries send nearly all of the gradient. That this is why the loss ends higher is not shown.",
      );
    },
  };
}
