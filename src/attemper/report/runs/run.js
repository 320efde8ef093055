// renderRun(root, document): the record of a training as an interactive page. Nothing is fetched, no markup is parsed.

import { LEVELS, SIGN_OF, plural, written } from "../data/numbers.js";
import { badge, grouped } from "../views/findings.js";
import { themes } from "../views/heads.js";
import { maker } from "../views/dom.js";
import { legend } from "../views/map.js";
import { runBoard } from "./board.js";
import { curve } from "./curve.js";
import { readRun } from "./series.js";

const MOST_CHIPS = 40; // findings of a group

/** Where a reader starts: at the worst finding, else at the last step of the head with the largest peak. */
function startOf(run) {
  const sign = run.signs[0], last = run.axis.from.length - 1;
  const worst = run.document.findings.reduce((one, other) =>
    (!one || LEVELS.indexOf(other.level) > LEVELS.indexOf(one.level) ? other : one), null);
  if (worst) return { sign: run.signs.find((one) => one.key === SIGN_OF[worst.name])?.key ?? sign.key, row: Math.max(0, run.find(worst)), column: run.axis.column(worst.step) };
  const peaks = run.rows.map((_, row) => run.number(sign, row, last) ?? -Infinity);
  return { sign: sign.key, row: peaks.indexOf(Math.max(...peaks)), column: last };
}

const stepsOf = ({ axis }, column) => (axis.from[column] === axis.to[column] ? `step ${axis.from[column]}` : `steps ${axis.from[column]}–${axis.to[column]}`);

/** The verdict of the last step, and the worst of the run. */
function runHeading(make, run, act) {
  const { verdict, findings, steps } = run.document, heads = plural(run.rows.length, "head");
  const worst = findings.find((one) => one.level === run.worst);
  const calm = worst && LEVELS.indexOf(verdict.level) < LEVELS.indexOf(worst.level);
  return make("div.verdict", {}, make("div.line", {}, badge(make, verdict.level), make("h1", {}, verdict.line)),
    make("p.says", {}, `The last step of ${plural(steps.watched, "watched step")}, ${steps.first} to ${steps.last}; ${plural(run.layers.length, "layer")}, ${heads}.`,
      calm ? ` The worst of the run was ${worst.level}, ${worst.title}, at ` : "",
      calm ? make("button.link", { type: "button", onclick: () => act.find(worst) }, `step ${worst.step}`) : "", calm ? "." : ""));
}

/** The numbers of one head at one step, and its whole curve. */
function headOf(make, run) {
  const title = make("h2"), list = make("dl"), plot = make("div.plot.above"), name = make("p.name"), says = make("p.says");
  const node = make("section.panel.one-head", { "aria-label": "The chosen head", "aria-live": "polite" }, title, name, says,
    make("div.timeline.alone", { "--label": run.label }, make("div.row-name"), plot), list);
  let drawn = "";
  return { node, show(state) {
    const row = run.rows[state.row], sign = run.signs.find((one) => one.key === state.sign), ends = run.scales.get(sign.key);
    title.replaceChildren("layer ", make("bdi", {}, row.label), ` · head ${row.head}`, make("span.dim", {}, ` · ${stepsOf(run, state.column)}`));
    name.textContent = row.name + (row.kind === "cross" ? " (cross)" : "");
    list.replaceChildren(...run.signs.map((one) => make("div", {}, make("dt", {}, one.label),
      make("dd.num", {}, written(run.number(one, state.row, state.column), one.digits)))));
    const key = `${state.row} ${sign.key}`;
    if (drawn === key) return;
    drawn = key;
    const points = run.axis.from.map((_, column) => [1000 * run.axis.center(column), run.number(sign, state.row, column)]);
    const { svg, numbers, marks } = curve(make, [{ points, kind: "sign" }], ends, `${sign.label} of this head over time`, sign.marks ?? []);
    plot.replaceChildren(svg, ...numbers, ...marks);
    says.textContent = `${sign.label}${ends.log ? ", logarithmic" : ""}. ${sign.says}`;
  } };
}

/** Findings by what they say, each head with the step at which it began or rose. */
function listOf(make, run, act) {
  const { findings, notes } = run.document;
  const order = [...findings].sort((a, b) => LEVELS.indexOf(b.level) - LEVELS.indexOf(a.level) || a.step - b.step);
  const chip = (one) => make("button.chip", { type: "button", title: one.message, onclick: () => act.find(one) },
    make("bdi", {}, run.rows[run.find(one)]?.label ?? one.layer), one.head === null ? "" : ` · ${one.head}`, make("span.num", {}, `step ${one.step}`));
  const item = ({ first, all }) => make("li", {}, make("h3", {}, badge(make, first.level), `${first.title[0].toUpperCase()}${first.title.slice(1)}, from step ${first.step} on`),
    make("p", {}, first.message), first.advice ? make("p", {}, make("b", {}, "Advice: "), first.advice) : null, make("p.dim", {}, first.source),
    make("div.chips", {}, all.slice(0, MOST_CHIPS).map(chip), all.length > MOST_CHIPS ? make("span.dim", {}, `and ${all.length - MOST_CHIPS} more`) : null));
  return make("section.wide", { "aria-label": "Findings" }, make("h2", {}, "Findings"),
    order.length ? make("ol.findings", {}, grouped(order).map(item)) : make("p", {}, "Nothing from the level “warn” on."),
    notes.length ? make("details", {}, make("summary", {}, `Notes (${notes.length})`), make("ul.notes", {}, notes.map((note) => make("li", {}, note)))) : null);
}

/** Draw a run's document into an element, which it takes over. Returns a function that detaches it from the page. */
export function renderRun(root, document) {
  const page = root.ownerDocument, window = page.defaultView, make = maker(page), run = readRun(document);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => (root.dataset.theme === "dark" || (root.dataset.theme !== "light" && dark.matches) ? "dark" : "light");
  let state = startOf(run), pointed = null;
  const show = () => {
    const seen = { ...state, ...(pointed ? { column: pointed.column, ...(pointed.row === null ? {} : { row: pointed.row }) } : {}) };
    for (const view of views) view.show(seen, theme());
  };
  const set = (patch) => { state = { ...state, ...patch }; show(); };
  const act = {
    point(found) { pointed = found; show(); },
    choose: (found) => set({ column: found.column, ...(found.row === null ? {} : { row: found.row }) }),
    move: (down, right) => set({ row: Math.min(run.rows.length - 1, Math.max(0, state.row + down)),
      column: Math.min(run.axis.from.length - 1, Math.max(0, state.column + right)) }),
    find(finding) {
      const row = run.find(finding), sign = run.signs.find((one) => one.key === SIGN_OF[finding.name]);
      pointed = null;
      set({ column: run.axis.column(finding.step), ...(row < 0 ? {} : { row }), ...(sign ? { sign: sign.key } : {}) });
      map.scrollIntoView({ block: "nearest" });
    },
  };
  const choice = make("select", { id: "attemper-run-sign", onchange: (event) => set({ sign: event.target.value }) },
    run.signs.map((sign) => make("option", { value: sign.key }, sign.label)));
  const foot = make("div"), says = make("p.says"), plots = runBoard(make, run, act), chosen = headOf(make, run);
  const map = make("section.panel", { "aria-label": "Every head over time" },
    make("div.bar-of-controls", {}, make("h2", {}, "Every head over time"), make("label", { for: "attemper-run-sign" }, "shaded by "), choice),
    says, plots.node, foot);
  const captions = { show(seen) {
    const sign = run.signs.find((one) => one.key === seen.sign);
    choice.value = sign.key;
    says.textContent = `A row is a head, a column a watched step. ${sign.says}`;
    foot.replaceChildren(legend(make, sign, run.scales.get(sign.key)));
  } };
  const views = [captions, plots, chosen];
  root.classList.add("attemper", "attemper-run");
  const { name, attemper } = run.document;
  root.replaceChildren(make("header", {}, make("div.top", {}, make("span.brand", {}, "attemper report"), make("bdi.model", {}, name ?? ""),
    make("span.facts", {}, `attemper ${attemper}`), themes(make, root, show)), runHeading(make, run, act)), map, chosen.node, listOf(make, run, act));
  const listeners = [[dark, "change", show], [window, "resize", show]];
  for (const [target, kind, listener] of listeners) target.addEventListener(kind, listener);
  show();
  return () => listeners.forEach(([target, kind, listener]) => target.removeEventListener(kind, listener));
}
