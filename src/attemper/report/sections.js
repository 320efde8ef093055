// The parts around the map: the verdict, where it comes from, findings, what if, the scale audit, one head's signs.

import { KINDS, RULES, SHAPES, SIGNS, SIGN_OF, measured, place, plural, scale, shading, value, written } from "./numbers.js";
import { legend } from "./map.js";

/** Findings that say the same of several heads, as one: {first, all}. The order, worst first, is kept. */
export function grouped(findings) {
  const groups = new Map();
  for (const finding of findings) {
    const key = JSON.stringify([finding.kind, finding.fault, finding.level]);
    if (!groups.has(key)) groups.set(key, { first: finding, all: [] });
    groups.get(key).all.push(finding);
  }
  return [...groups.values()];
}

const badge = (make, level) => make(`span.badge.${level}`, {}, `${SHAPES[level] ?? "●"} ${level}`);

/** A group in a few words: "Saturated rows in 3 heads". */
function heading({ first, all }) {
  const where = first.head === null || first.head === undefined ? plural(all.length, "layer") : plural(all.length, "head");
  return `${KINDS[first.kind] ?? first.kind}${first.fault ? ` (${first.fault})` : ""} in ${where}`;
}

/** The verdict in one line, with the worst findings under it. */
export function verdict(make, scan, act) {
  const { verdict: said, findings: all } = scan.document;
  const worst = grouped(all.filter((finding) => finding.level !== "healthy")).slice(0, 3);
  const line = (group) => make("li", {}, make("button.link", { type: "button", onclick: () => act.find(group.first) }, heading(group)),
    make("span.dim", {}, group.first.says));
  return make("div.verdict", {}, make("div.line", {}, make("h1", {}, said.line), badge(make, said.level)),
    worst.length ? make("ul.worst", {}, worst.map(line)) : null);
}

const shown = (input) => input.text ?? `${input.kind}${input.generated ? ", generated" : ""}`;

/** What was read, in one line. */
export function reading(make, { document: { inputs } }) {
  if (!inputs.length) return null;
  const more = inputs.length > 1 ? ` and ${inputs.length - 1} more` : "";
  return make("p.input", {}, make("q", {}, make("bdi", {}, shown(inputs[0]))), make("span.dim", {}, ` ${plural(inputs[0].length, "token")}${more}`));
}

/** Model, class, version, date and texts: what a reader needs to do it again. */
export function provenance(make, { document: scan }) {
  const { model } = scan;
  const facts = [["model", model.name], ["from", model.source], ["class", [model.class, model.type].filter(Boolean).join(" · ")],
    ["parameters", model.parameters?.toLocaleString("en")], ["dtype", model.dtype], ["task", model.task], ["sha256", model.sha256],
    ["made", String(scan.created ?? "")], ["with", `attemper ${scan.attemper}, torch ${scan.torch}`]];
  const text = (input) => make("li", {}, make("q", {}, make("bdi", {}, shown(input))),
    make("span.dim", {}, ` ${plural(input.length, "token")}${input.truncated ? ", cut" : ""}${input.generated ? ", a generated sample" : ""}`));
  return make("section.wide.provenance", { "aria-label": "Where this comes from" }, make("h2", {}, "Where this comes from"),
    make("dl", {}, facts.filter(([, said]) => said).map(([name, said]) => make("div", {}, make("dt", {}, name), make("dd", {}, make("bdi", {}, said)))),
      make("div", {}, make("dt", {}, scan.inputs.length === 1 ? "input" : "inputs"), make("dd", {}, make("ol", {}, scan.inputs.map(text))))));
}

/** Every sign of the chosen head, and what was found there. */
export function headView(make, scan, act) {
  const node = make("section.panel.head", { "aria-label": "Signs of the chosen head" });
  return { node, show(state) {
    const row = scan.rows[state.layer], head = row?.heads.get(state.head);
    const signs = head ? measured([head], SIGNS) : [];
    const found = scan.findings.get(`${state.layer}.${state.head}`) ?? [];
    const sink = head?.sink_token !== null && head?.sink_token !== undefined ? make("div", {}, make("dt", {}, "sink"), make("dd", {}, make("bdi", {}, head.sink_token))) : null;
    node.replaceChildren(make("h3", {}, "Its signs"), make("p.name", {}, make("bdi", {}, `${row?.name ?? ""}, head ${state.head}`)),
      make("dl", {}, signs.map((sign) => make("div", { title: sign.says }, make("dt", {}, sign.label), make("dd", {}, written(value(sign, head))))), sink),
      ...found.map((finding) => make("p.found", {}, badge(make, finding.level), " ", finding.says)));
  } };
}

/** All findings, worst first; those that several heads share stand once, with a button for each head. */
export function findings(make, scan, act) {
  const item = (group) => {
    const { first, all } = group;
    const chips = all.map((one) => make("button.chip", { type: "button", title: one.says, onclick: () => act.find(one) },
      make("bdi", {}, scan.label(one)), one.head === null || one.head === undefined ? "" : ` · ${one.head}`, one.value === null || one.value === undefined ? null : make("span.num", {}, written(one.value, one.value < 10 ? 2 : 1))));
    const facts = [first.threshold === null || first.threshold === undefined ? null : `threshold ${written(first.threshold)}`, first.source].filter(Boolean).join(" · ");
    return make("li", {}, make("h3", {}, badge(make, first.level), " ", heading(group)), make("p", {}, first.says),
      first.todo ? make("p.todo", {}, make("b", {}, "To do: "), first.todo) : null, make("p.dim", {}, facts),
      make("div.chips", {}, all.length > 1 ? make("span.dim", {}, "layer · head, value: ") : null, chips));
  };
  const groups = grouped(scan.document.findings), healthy = groups.filter((group) => group.first.level === "healthy");
  const open = groups.filter((group) => group.first.level !== "healthy");
  return make("section.wide", { "aria-label": "Findings" }, make("h2", {}, "Findings"),
    open.length ? make("ol.findings", {}, open.map(item)) : make("p", {}, "Nothing needs attention."),
    healthy.length ? make("details", {}, make("summary", {}, `Healthy, and good to know (${healthy.reduce((sum, group) => sum + group.all.length, 0)})`), make("ol.findings", {}, healthy.map(item))) : null);
}

const COLUMNS = ["saturated heads", "effective keys", "peak logit", "logit std"];

/** The same heads under other rules: one lane each, on one axis and one scale. */
export function lanesView(make, scan) {
  const lanes = scan.document.what_if;
  if (!lanes?.length) return null;
  const table = make("table.lanes"), says = make("p.says");
  const node = make("section.wide", { "aria-label": "What if the scale were another" }, make("h2", {}, "What if the scale were another"), says,
    make("div.scroll", {}, table));
  const all = [{ rule: null, heads: scan.heads }, ...lanes];
  return { node, show(state) {
    // a lane has signs of its own, but no token and no sinks
    const has = (key) => measured(lanes.flatMap((lane) => lane.heads), SIGNS.filter((sign) => sign.key === key))[0];
    const sign = has(state.sign) ?? has("effective_keys") ?? SIGNS[0];
    const ends = scale(sign, all.flatMap((lane) => lane.heads), scan.keys);
    says.textContent = `The same model and text with the scale replaced at run time. Every stroke is a head; all lanes share the axis: ${sign.label}.`;
    table.replaceChildren(
      make("thead", {}, make("tr", {}, ["scale", "all heads", sign.label].map((name) => make("th", { scope: "col" }, name)),
        COLUMNS.map((name) => make("th.num", { scope: "col" }, name)))),
      make("tbody", {}, all.map((lane) => laneRow(make, scan, lane, sign, ends))),
      make("tfoot", {}, make("tr", {}, make("td"), make("td"), make("td.lane", {}, legend(make, sign, ends, true)), make("td", { colspan: COLUMNS.length }))));
  } };
}

const mean = (numbers) => (numbers.length ? numbers.reduce((sum, one) => sum + one, 0) / numbers.length : null);

/** What the producer says of a lane; for the model as it is, the same from its heads. */
function summary(lane) {
  if (lane.rule !== null) return [lane.saturated_heads, lane.effective_keys, lane.peak, lane.logit_std];
  const of = (key) => lane.heads.map((head) => head[key]).filter(Number.isFinite);
  return [of("saturated").filter((share) => share >= 0.5).length, mean(of("effective_keys")), Math.max(...of("peak")), Math.sqrt(mean(of("variance")))];
}

const WIDTH = 300;

/** Every head of a lane as a stroke on the axis, with the thresholds behind. */
function strip(make, heads, sign, ends) {
  const numbers = heads.map((head) => value(sign, head)).filter((number) => number !== null);
  const stroke = (kind, at, top) => make(`line.${kind}`, { x1: 1 + place(ends, at) * (WIDTH - 2), x2: 1 + place(ends, at) * (WIDTH - 2), y1: top, y2: 28 });
  const words = `${sign.label} of ${plural(numbers.length, "head")}: from ${written(Math.min(...numbers))} to ${written(Math.max(...numbers))}`;
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
  const figures = [[`${saturated ?? "–"}`, make("span.dim", {}, ` / ${lane.heads.length}`)], written(keys, 1), written(peak, 1), written(std, 2)];
  return make(own ? "tr.own" : "tr", {},
    make("th", { scope: "row" }, own ? "as it is" : RULES[lane.rule] ?? lane.rule, own ? null : make("code", {}, lane.rule)),
    make("td.heads", {}, thumb), make("td.lane", {}, strip(make, lane.heads, sign, ends)),
    figures.map((figure, i) => make("td.num", { "data-label": COLUMNS[i] }, figure)));
}

/** One layer's line of the audit. */
function auditRow(make, scan, layer, same) {
  const { scale: found } = layer, fault = found.verdict === "fault";
  const factors = found.factors?.map((factor) => `${factor.what}: ${written(factor.number)}`).join("\n");
  return make(fault ? "tr.fault" : "tr", {},
    make("th", { scope: "row", title: layer.layer }, fault ? make("span.shape.act", {}, "▲ ") : null, make("bdi", {}, scan.label(layer))),
    make("td.num", {}, `${layer.heads}${layer.kv_heads === layer.heads ? "" : ` / ${layer.kv_heads}`}`), make("td.num", {}, String(layer.head_dim)),
    make("td.num", { title: found.declared_by }, written(found.declared)), make("td.num", { title: factors }, written(found.applied)),
    make("td", { title: found.formula }, RULES[found.rule] ?? found.rule ?? "none by name"),
    make("td.num", {}, written(found.predicted_std, 2)), make("td.num", {}, written(found.logit_std, 2)), same ? null : make("td.text", {}, found.says));
}

/** The scale audit: what each layer declares and what it applies. */
export function audit(make, scan) {
  const layers = scan.document.layers.filter((layer) => layer.scale);
  if (!layers.length) return null;
  const same = new Set(layers.map((layer) => layer.scale.says)).size === 1;
  const names = ["layer", "heads", "d_k", "declared", "applied", "rule", "std predicted", "std measured", ...(same ? [] : ["what it means"])];
  const says = same ? `${layers.length > 1 ? `All ${layers.length} layers: ` : ""}${layers[0].scale.says}`
    : "What every layer says it multiplies q·k by, and what it really does.";
  const head = names.map((name) => make(/heads|d_k|declared|applied|std/.test(name) ? "th.num" : "th", { scope: "col" }, name));
  return make("section.wide", { "aria-label": "Scale audit" }, make("h2", {}, "Scale audit"), make("p.says", {}, says),
    make("div.scroll", { tabindex: "0", role: "region", "aria-label": "Scale audit, table" }, make("table.audit", {},
      make("thead", {}, make("tr", {}, head)), make("tbody", {}, layers.map((layer) => auditRow(make, scan, layer, same))))));
}

/** What `--token` asked: the head that answers best, and a way to it. */
export function asked(make, scan, act) {
  const { token } = scan.document;
  if (!token) return null;
  const best = token.best;
  const quoted = (word) => make("b", {}, "“", make("bdi", {}, word), "”");
  return make("p.asked", {}, quoted(token.asked), ...(best ? [" looks most at ", quoted(best.token), `, weight ${written(best.weight, 2)}, in `,
    make("button.link", { type: "button", onclick: () => act.set({ sign: "token", ...scan.find(best), input: token.input, at: { side: "query", at: token.position } }) }, "layer ", make("bdi", {}, scan.label(best)), `, head ${best.head}`), "."] : [" was asked for."]));
}

export function notes(make, scan) {
  const said = scan.document.notes ?? [];
  return said.length ? make("section.wide", { "aria-label": "Notes" }, make("h2", {}, "Not measured"), make("ul", {}, said.map((note) => make("li", {}, note)))) : null;
}

/** Which sign a finding is about. */
export const signOf = (finding) => SIGN_OF[finding?.kind] ?? null;
