// Findings in words: the verdict, the list worst first, and what changed since an older scan.

import { SHAPES, given, plain, plural, written } from "../data/numbers.js";

/** Findings of one name, fault and level as {first, all}, worst first. */
export function grouped(findings) {
  const groups = new Map();
  for (const finding of findings) {
    const key = JSON.stringify([finding.name, finding.fault, finding.level]);
    if (!groups.has(key)) groups.set(key, { first: finding, all: [] });
    groups.get(key).all.push(finding);
  }
  return [...groups.values()];
}

export const badge = (make, level) => make(`span.badge.${level}`, {}, `${SHAPES[level] ?? "●"} ${level}`);

/** A group in a few words: "Scaled twice in 1 layer", "Saturated in 3 heads". */
function heading({ first, all }) {
  const title = first.title ?? first.name;
  return `${title[0].toUpperCase()}${title.slice(1)} in ${plural(all.length, given(first.head) ? "head" : "layer")}`;
}

/** The verdict in one line, with the worst findings under it. */
export function verdict(make, scan, act) {
  const { verdict: said, findings: all } = scan.document;
  const worst = grouped(all.filter((finding) => finding.level !== "healthy")).slice(0, 3);
  const line = (group) => make("li", {}, make("button.link", { type: "button", onclick: () => act.find(group.first) }, heading(group)),
    said.line.includes(group.first.message) ? null : make("span.dim", {}, group.first.message));
  const title = make(said.line.length > 110 ? "h1.long" : "h1", {}, said.line);
  return make("div.verdict", {}, make("div.line", {}, badge(make, said.level), title),
    worst.length ? make("ul.worst", {}, worst.map(line)) : null);
}

const CHIPS = 60; // a group shows no more at first

/** A head, or a layer, as a button that goes there, with its number. Among many heads two numbers and a legend are enough. */
function chip(make, scan, one, act, many = false) {
  const [layer, head] = many && given(one.head) ? ["", " · "] : ["layer ", " · head "];
  const number = () => (one.name === "scale" ? `applies ${plain(one.value)}` : written(one.value, one.value < 10 ? 2 : 1));
  return make("button.chip", { type: "button", title: one.message, onclick: () => act.find(one) },
    layer, make("bdi", {}, scan.label(one)), given(one.head) ? `${head}${one.head}` : "",
    given(one.value) ? make("span.num", {}, number()) : null);
}

/** A group, with a button for each head. */
function group(make, scan, found, act) {
  const { first, all } = found;
  const facts = [given(first.threshold) ? `threshold ${plain(first.threshold)}` : null, first.source].filter(Boolean).join(" · ");
  const many = all.length > 1, button = (one) => chip(make, scan, one, act, many), chips = all.slice(0, CHIPS).map(button);
  const rest = () => more.replaceWith(...all.slice(CHIPS).map(button));
  const more = all.length > CHIPS ? make("button.link", { type: "button", onclick: rest }, `and ${all.length - CHIPS} more`) : null;
  const place = given(first.head) ? `, head ${first.head}` : "";
  const example = all.length > 1 ? make("span.dim", {}, "For one, layer ", make("bdi", {}, scan.label(first)), `${place}: `) : null;
  return make("li", {}, make("h3", {}, badge(make, first.level), heading(found)), make("p", {}, example, first.message),
    first.advice ? make("p", {}, make("b", {}, "Advice: "), first.advice) : null, make("p.dim", {}, facts),
    make("div.chips", {}, many && given(first.head) ? make("span.dim", {}, "layer · head, value") : null, chips, more));
}

/** All findings, worst first; the healthy ones are folded behind one line. */
export function findings(make, scan, act) {
  const groups = grouped(scan.document.findings), isHealthy = (one) => one.first.level === "healthy";
  const healthy = groups.filter(isHealthy), open = groups.filter((one) => !isHealthy(one));
  const list = (some) => make("ol.findings", {}, some.map((one) => group(make, scan, one, act)));
  const count = healthy.reduce((sum, one) => sum + one.all.length, 0);
  return make("section.wide", { "aria-label": "Findings" }, make("h2", {}, "Findings"),
    open.length ? list(open) : make("p", {}, "Nothing needs attention."),
    count ? make("details", {}, make("summary", {}, `Healthy findings (${count})`), list(healthy)) : null);
}

const MOST = 12; // moved heads that are shown

/** What changed since an older scan. */
export function since(make, scan, act) {
  const { baseline } = scan.document;
  if (!baseline) return null;
  const { created, file, differences = [], gone = [], scales = [], moved = [] } = baseline, fresh = baseline.worse ?? baseline.new ?? [];
  const where = (one) => [make("bdi", {}, scan.label(one)), given(one.head) ? ` · ${one.head}` : ""];
  const step = (one) => ` ${one.sign ?? "scale"} ${written(one.before)} → ${written(one.after)}`;
  const changed = (one) => make("li", {}, chip(make, scan, one, act), step(one));
  const lost = (one) => make("li", {}, "gone: ", where(one), ` ${one.name}`);
  const words = differences.map((line) => make("li", {}, line));
  const lines = [...words, ...gone.map(lost), ...scales.map(changed), ...moved.slice(0, MOST).map(changed)];
  const more = moved.length > MOST ? ` ${moved.length} heads moved; the first ${MOST} are shown.` : "";
  return make("section.wide", { "aria-label": "What changed" }, make("h2", {}, "What changed since ", make("bdi", {}, file)),
    make("p.says", {}, `The older scan was made ${created}.${more}`),
    fresh.length ? make("ol.findings", {}, grouped(fresh).map((one) => group(make, scan, one, act))) : null,
    lines.length ? make("ul.changes", {}, lines) : null, fresh.length + lines.length ? null : make("p", {}, "Nothing."));
}
