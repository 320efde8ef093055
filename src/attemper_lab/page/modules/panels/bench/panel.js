// The why-bench: drag d_k and see what the scale does to attention on random vectors, where theory is exact.

import { standalone } from "../../draw/svg.js";
import { say } from "../../draw/words.js";
import { sortedWeights } from "../../maths/rules.js";
import { criticalSpread } from "../../maths/signs.js";
import { controls } from "./controls.js";
import { gradientChart } from "./gradient.js";
import { RANKS, logitsChart, weightsChart } from "./lanes.js";
import { ALIGNED, computed, plainLanes } from "./model.js";
import { opening } from "./opening.js";
import { ROWS, gradientWords, numbersTable, verdict } from "./numbers.js";
import { prediction } from "./predict.js";
import { benchPython } from "./python.js";
import { spreadChart } from "./spread.js";
import { ALIGNED_STORY, STORIES, glossary } from "./stories.js";
import { story as derivation } from "./story.js";
import { trainingLane } from "./training.js";

const RESTS = 700; // milliseconds after which a slider is at rest

/** Everything that the pictures of a state show. */
function measured(state) {
  const found = computed(state),
    lanes = [found.bare, found.second],
    { n } = state;
  return { ...found, lanes, sorted: lanes.map((one) => sortedWeights(one, { m: one.rows.length, n }, Math.min(RANKS, n))) };
}

function mount(root, page) {
  const { make } = page;
  const bar = controls(page, (ds) => ds.forEach((d) => spread.visit(d, computed({ ...state, d }).bare.signs.std))),
    spread = spreadChart(page),
    logits = logitsChart(page),
    weights = weightsChart(page),
    gradients = gradientChart(page);
  const first = opening(page),
    line = derivation(page),
    table = numbersTable(page),
    guess = prediction(page),
    training = trainingLane(page);
  const bare = make("p.bare"),
    after = make("p.after"),
    uneven = make("p.uneven"),
    story = make("div.story", { "aria-live": "off" });
  const figure = (title, note, chart, kind = "") =>
    make(`figure${kind}`, {}, make("figcaption", {}, make("h3", {}, title), make("p.dim", {}, note)), chart.svg);
  page.front.append(first.node);
  root.append(
    line.node,
    make("h2.more", {}, "More: every divisor, measured"),
    make("p.dim", {}, "The same random queries and keys in two lanes: without a divisor, and with the one you choose."),
    glossary(page),
    guess.node,
    bar.sliders,
    bar.switches,
    make(
      "div.three.charts",
      {},
      figure("How far the scores spread", "Drag here too. Lines are theory, dots are measured.", spread),
      figure("All scores", "Curve: theory. Bar below: the spread. Mark: √(2 ln n).", logits),
      figure("Who gets the weight", "Sorted weights, mean over queries. Dashed: 1/n.", weights),
    ),
    make("div.verdict", {}, bare, after),
    make(
      "div.wide",
      {},
      make(
        "div",
        {},
        story,
        figure(
          "What reaches a query when it learns",
          "Each hill: the queries' gradients. Line: the median, the typical query. ◆: the RMS, which few queries make. Before any training.",
          gradients,
          ".gradients",
        ),
        uneven,
      ),
      make("div", {}, make("h3", {}, "The numbers"), table.node),
    ),
    ...(training ? [training.node] : []),
  );
  let state = page.state(),
    found = null,
    saying = 0,
    told = "",
    trained = "";
  const pictures = () => [
    ...first.svgs.map((svg, i) => [["without", "divided"][i], svg]),
    ["spread", spread.svg],
    ["logits", logits.svg],
    ["weights", weights.svg],
    ["gradients", gradients.svg],
    ...(training ? training.charts.map(({ name, svg }) => [name, svg]) : []),
  ];
  function tell() {
    const about = STORIES[state.rule];
    story.replaceChildren(
      make("h3", {}, about.name),
      make("p", {}, about.sees),
      make("p", {}, make("b", {}, "In real models: "), about.real),
      ...(state.aligned ? [make("p", {}, ALIGNED_STORY)] : []),
    );
  }
  return {
    update(next) {
      state = { ...next };
      found = measured(state);
      bar.show(state);
      root.dataset.second = ["sqrt_dk", "none"].includes(state.rule) ? "chosen" : "other";
      for (const part of [logits, weights, gradients, table, guess]) part.update(state, found);
      spread.update(state, found);
      const shown = plainLanes(state, found);
      first.update(state, shown);
      line.update(state, shown);
      const [one, then] = verdict(state, found);
      say(page, bare, one);
      say(page, after, then);
      say(page, uneven, gradientWords(found));
      // once a slider rests: a sentence for each of its steps would be noise
      clearTimeout(saying);
      if (told) saying = setTimeout(() => page.announce(`${bare.textContent} ${after.textContent}`), RESTS);
      const { rule, aligned, lr } = state;
      if (told !== `${rule} ${aligned}`) tell();
      if (trained !== lr) training?.update(state);
      [told, trained] = [`${rule} ${aligned}`, lr];
    },
    text() {
      const lines = ROWS.map(
        ([name, what, read]) =>
          `${name}${what ? ` (${what})` : ""}: ` + found.lanes.map((lane) => `${lane.rule.label} ${plainNumber(read(lane))}`).join(", "),
      );
      return [
        ...verdict(state, found),
        gradientWords(found),
        "",
        ...lines,
        "",
        `${STORIES[state.rule].name}. ${STORIES[state.rule].sees}`,
        `In real models: ${STORIES[state.rule].real}`,
        ...(training ? ["", training.words()] : []),
      ].join("\n");
    },
    figures: () => pictures().map(([name, svg]) => ({ name, svg: () => standalone(svg) })),
    python: () =>
      benchPython(state, found.lanes, ALIGNED),
    caption: () => {
      const { d, n, heads, rule, aligned, seed } = state;
      return `d_k = ${d}, n = ${n}, ${heads} heads, rule ${rule}${aligned ? ", aligned keys" : ""}, seed ${seed}`;
    },
    unmount() {
      bar.stop();
      first.stop();
      line.stop();
      clearTimeout(saying);
    },
    json: () => ({
      state,
      critical_spread: criticalSpread(state.n),
      lanes: found.lanes.map((lane) => ({
        rule: lane.name,
        queries: lane.rows.length,
        formula: lane.rule.formula,
        ...lane.signs,
        weights_add_up_to: lane.factor,
        top_weight: lane.signs.top_weight * lane.factor,
        gradients: lane.statistics,
        overflowing_rows: lane.overflowing,
      })),
    }),
  };
}

const plainNumber = (number) => (Number.isFinite(number) ? String(Number(number.toPrecision(4))) : "–");

export const benchPanel = {
  id: "bench",
  tab: "Why √d_k",
  title: "Why divide by √d_k?",
  lead:
    "A score sums d_k products of random sign: it spreads by √d_k. The wider the spread, the more weight one key wins by chance, " +
    "and the less others teach. Dividing by √d_k keeps it at 1.",
  front: true,
  state: {
    d: { default: 64, least: 1, most: 1024, integer: true },
    n: { default: 64, least: 2, most: 1024, integer: true },
    heads: { default: 8, least: 1, most: 96, integer: true },
    rule: { default: "sqrt_dk", choices: Object.keys(STORIES) },
    aligned: { default: false },
    seed: { default: 1, least: 0, most: 999, integer: true },
    lr: { default: "0.0003", choices: ["0.0001", "0.0003", "0.001"] },
  },
  mount,
};
