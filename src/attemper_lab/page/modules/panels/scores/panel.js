// Scores compared: dot product, scaled dot product, cosine and additive, on the same vectors.

import { written } from "../../../report/data/numbers.js";
import { standalone } from "../../draw/svg.js";
import { pairsChart, spreadsChart } from "./charts.js";
import { KEYS, QUERIES, QUERY, SCORES, compared, planeKey, planeScores } from "./model.js";
import { planeBars, planeChart } from "./plane.js";
import { scoresPython } from "./python.js";
import { planeWords, widthWords } from "./words.js";

const COLUMNS = [
  ["spread", (lane) => lane.signs.std],
  ["largest", (lane) => lane.signs.peak],
  ["top weight", (lane) => lane.signs.top_weight],
  ["effective keys", (lane) => lane.signs.effective_keys],
];

/** A slider with its number. */
function slider(page, key, label, { least, most, step, unit = "" }) {
  const { make } = page,
    id = `scores-${key}`,
    shown = make("output", { for: id });
  const input = make("input", {
    type: "range",
    id,
    min: least,
    max: most,
    step,
    oninput: () => page.set("scores", { [key]: input.value }),
  });
  return {
    node: make(
      "div.control",
      { "data-control": `scores.${key}` },
      make("div.control-head", {}, make("label", { for: id }, label), shown),
      input,
    ),
    show(state) {
      input.value = state[key];
      shown.textContent = `${state[key]}${unit}`.replace("-", "−");
      input.setAttribute("aria-valuetext", `${state[key]}${unit}`);
    },
  };
}

/** d in powers of two, so that one slider reaches from 1 to 1024. */
function widthSlider(page) {
  const { make } = page,
    shown = make("output", { for: "scores-d" });
  const input = make("input", {
    type: "range",
    id: "scores-d",
    min: 0,
    max: 10,
    step: 1,
    oninput: () => page.set("scores", { d: 2 ** input.value }),
  });
  return {
    node: make(
      "div.control",
      { "data-control": "scores.d" },
      make("div.control-head", {}, make("label", { for: "scores-d" }, "d", make("span.dim", {}, " numbers in a vector")), shown),
      input,
    ),
    show(state) {
      input.value = Math.round(Math.log2(state.d));
      shown.textContent = state.d;
      input.setAttribute("aria-valuetext", `d = ${state.d}`);
    },
  };
}

function table(page) {
  const { make } = page,
    names = Object.keys(SCORES),
    cells = names.map(() => COLUMNS.map(() => make("td.num")));
  const node = make(
    "table.numbers",
    {},
    make("caption.unseen", {}, "The four scores on the same vectors"),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        make("td", {}),
        COLUMNS.map(([name]) => make("th.num", { scope: "col" }, name)),
        make("th", { scope: "col" }, "bound"),
        make("th", { scope: "col" }, "cost of a pair"),
      ),
    ),
    make(
      "tbody",
      {},
      names.map((name, i) =>
        make(
          "tr",
          {},
          make("th", { scope: "row" }, make(`span.swatch.${name}`), ` ${SCORES[name].label} `, make("span.dim", {}, SCORES[name].formula)),
          cells[i],
          make("td", {}, SCORES[name].bound),
          make("td", {}, SCORES[name].cost),
        ),
      ),
    ),
  );
  return {
    node,
    update(state, found) {
      names.forEach((name, i) =>
        COLUMNS.forEach(([, read], j) => {
          cells[i][j].textContent = written(read(found[name]), 2);
        }),
      );
    },
  };
}

function mount(root, page) {
  const { make } = page,
    plane = planeChart(page),
    bars = planeBars(page),
    spread = spreadsChart(page);
  const cosine = pairsChart(page, "cosine", "cosine, brought to spread 1"),
    additive = pairsChart(page, "additive", "additive, brought to spread 1"),
    numbers = table(page);
  const turn = slider(page, "turn", "angle between q and k", { least: -180, most: 180, step: 1, unit: "°" }),
    length = slider(page, "length", "length of k", { least: 0, most: 4, step: 0.1 }),
    d = widthSlider(page);
  const again = make(
    "button.plain",
    { type: "button", "data-control": "scores.seed", onclick: () => page.set("scores", { seed: (page.state("scores").seed + 1) % 1000 }) },
    "Draw again",
  );
  const planeSays = make("p.says"),
    widthSays = make("p.says");
  const figure = (title, note, svg) => make("figure", {}, make("figcaption", {}, make("h3", {}, title), make("p.dim", {}, note)), svg);
  root.append(
    make("h2", {}, "One query, one key"),
    make(
      "div.plane",
      {},
      make("figure", {}, plane.svg),
      make("div", {}, make("div.pair", {}, turn.node, length.node), make("figure", {}, bars.svg), planeSays),
    ),
    make("h2", {}, "Random vectors"),
    make("div.width", {}, d.node, again),
    make(
      "div.three",
      {},
      figure("How far each score spreads", `${QUERIES} queries, ${KEYS} keys; w drawn with variance 1/d.`, spread.svg),
      figure("Cosine, pair by pair", "Each dot is a query with a key. Dashed: the same score.", cosine.svg),
      figure("Additive, pair by pair", "The same queries and keys.", additive.svg),
    ),
    widthSays,
    make("div.scroll", { tabindex: "0", role: "region", "aria-label": "Numbers of the four scores" }, numbers.node),
  );
  let state = page.state("scores"),
    found = null;
  return {
    update(next) {
      state = { ...next };
      found = compared(state);
      for (const one of [turn, length, d]) one.show(state);
      for (const one of [plane, bars, spread, cosine, additive, numbers]) one.update(state, found);
      planeSays.textContent = planeWords(state);
      widthSays.textContent = widthWords(state, found);
    },
    text: () =>
      [
        planeWords(state),
        "",
        widthWords(state, found),
        "",
        ...Object.entries(found).map(
          ([name, lane]) => `${SCORES[name].label}: ${COLUMNS.map(([label, read]) => `${label} ${written(read(lane))}`).join(", ")}`,
        ),
      ].join("\n"),
    figures: () =>
      [
        ["plane", plane.svg],
        ["scores", bars.svg],
        ["spread", spread.svg],
        ["cosine", cosine.svg],
        ["additive", additive.svg],
      ].map(([name, svg]) => ({ name, svg: () => standalone(svg) })),
    python: () => scoresPython(state, QUERIES, KEYS),
    json: () => ({
      state,
      plane: { query: QUERY, key: planeKey(state), scores: planeScores(state) },
      queries: QUERIES,
      keys: KEYS,
      scores: Object.fromEntries(Object.entries(found).map(([name, lane]) => [name, lane.signs])),
    }),
  };
}

export const scoresPanel = {
  id: "scores",
  tab: "Scores",
  title: "Four ways to compare a query with a key",
  lead: "Dot product, scaled dot product, cosine, additive: what each sees in the same vectors, and what happens as they get longer.",
  state: {
    turn: { default: 50, least: -180, most: 180, integer: true },
    length: { default: 2, least: 0, most: 4 },
    d: { default: 64, least: 1, most: 1024, integer: true },
    seed: { default: 1, least: 0, most: 999, integer: true },
  },
  mount,
};
