// What if: the same heads under other scales, one lane each, on one axis and one scale of colours.

import { RULES, SIGNS, measured, place, plural, scale, shading, value, written } from "../data/numbers.js";
import { legend } from "./map.js";

const COLUMNS = ["saturated heads", "effective keys", "peak logit", "logit std"];

const SAME = "The same model on the same input, with another scale while it runs.";

/** The same heads under other rules: one lane each, on one axis and one scale. */
export function lanesView(make, scan) {
  const lanes = scan.document.what_if;
  if (!lanes?.length) return null;
  const table = make("table.lanes"), says = make("p.says");
  const title = "What if the scale were different";
  const node = make("section.wide", { "aria-label": title }, make("h2", {}, title), says, make("div.scroll", {}, table));
  const all = [{ rule: null, heads: scan.heads }, ...lanes];
  return { node, show(state) {
    // a lane has its own signs, but no token and no sinks
    const has = (key) => measured(lanes.flatMap((lane) => lane.heads), SIGNS.filter((sign) => sign.key === key))[0];
    const sign = has(state.sign) ?? has("effective_keys") ?? SIGNS[0];
    const ends = scale(sign, all.flatMap((lane) => lane.heads), scan.keys);
    says.textContent = `${SAME} Each stroke is a head; all lanes share one axis, ${sign.label}.`;
    table.replaceChildren(
      make("thead", {}, make("tr", {}, ["scale", "all heads", sign.label].map((name) => make("th", { scope: "col" }, name)),
        COLUMNS.map((name) => make("th.num", { scope: "col" }, name)))),
      make("tbody", {}, all.map((lane) => laneRow(make, scan, lane, sign, ends))),
      make("tfoot", {}, make("tr", {}, make("td"), make("td"), make("td.lane", {}, legend(make, sign, ends, true)))));
  } };
}

const mean = (numbers) => (numbers.length ? numbers.reduce((sum, one) => sum + one, 0) / numbers.length : null);

/** The numbers of a lane, from the document; for the model as it is, computed from its heads. */
function summary(lane) {
  if (lane.rule !== null) return [lane.saturated_heads, lane.effective_keys, lane.peak, lane.logit_std];
  const of = (key) => lane.heads.map((head) => head[key]).filter(Number.isFinite);
  const frozen = of("saturated").filter((share) => share > 0.5).length; // as attemper.scan counts them
  return [frozen, mean(of("effective_keys")), Math.max(...of("peak")), Math.sqrt(mean(of("variance")))];
}

const WIDTH = 300;

/** Every head of a lane as a stroke on the axis, with the thresholds behind. */
function strip(make, heads, sign, ends) {
  const numbers = heads.map((head) => value(sign, head)).filter((number) => number !== null);
  const x = (at) => 1 + place(ends, at) * (WIDTH - 2);
  const stroke = (kind, at, top) => make(`line.${kind}`, { x1: x(at), x2: x(at), y1: top, y2: 28 });
  const range = numbers.length ? `from ${written(Math.min(...numbers))} to ${written(Math.max(...numbers))}` : "not measured";
  const words = `${sign.label} of ${plural(numbers.length, "head")}: ${range}`;
  return make("svg.strip", { viewBox: `0 0 ${WIDTH} 30`, preserveAspectRatio: "none", role: "img", "aria-label": words },
    make("line.base", { x1: 0, x2: WIDTH, y1: 28, y2: 28 }),
    (sign.marks ?? []).filter(([at]) => at > ends.low && at <= ends.high).map(([at]) => stroke("threshold", at, 0)),
    numbers.map((number) => stroke("tick", number, 8)));
}

function laneRow(make, scan, lane, sign, ends) {
  const thumb = make("div.thumb", { "aria-hidden": "true", "--columns": scan.columns }, lane.heads.map((head) => {
    const number = value(sign, head);
    return make(`i${number === null ? ".none" : ".shaded"}`, number === null ? {} : shading(place(ends, number)));
  }));
  const own = lane.rule === null, [saturated, keys, peak, std] = summary(lane);
  const share = [`${saturated ?? "–"}`, make("span.dim", {}, ` / ${lane.heads.length}`)];
  const figures = [share, written(keys, 1), written(peak, 1), written(std, 2)];
  return make(own ? "tr.own" : "tr", {},
    make("th", { scope: "row" }, own ? "as it is" : RULES[lane.rule] ?? lane.rule, own ? null : make("code", {}, lane.rule)),
    make("td.heads", {}, thumb), make("td.lane", {}, strip(make, lane.heads, sign, ends)),
    figures.map((figure, i) => make("td.num", { "data-label": COLUMNS[i] }, figure)));
}
