// The sections around the map: the input, one head's signs, the scale audit, the chosen token, and where the scan comes from.

import { RULES, SHAPES, SIGNS, given, measured, plural, value, written } from "../data/numbers.js";
import { visible } from "../data/text.js";
import { grid, roving } from "./dom.js";
import { badge } from "./findings.js";

const NAMES = { image: "an image", audio: "a sound", batch: "a batch of tensors" };
const shown = (make, input) => (given(input.text) ? make("q", {}, make("bdi", {}, input.text)) : `${NAMES[input.modality] ?? input.modality} `);
const entry = (make, name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
const size = (input) => (given(input.length) ? plural(input.length, "token") : "");

/** The input, in one line. */
export function reading(make, { document: { inputs } }) {
  if (!inputs.length) return null;
  const more = inputs.length > 1 ? ` and ${inputs.length - 1} more` : "";
  return make("p.input", {}, shown(make, inputs[0]), make("span.dim", {}, `${size(inputs[0])}${more}`));
}

/** Model, class, version, date and texts: what a reader needs to repeat the scan. */
export function provenance(make, { document: scan }) {
  const { model } = scan;
  const facts = [["model", model.name], ["from", model.source], ["class", [model.class, model.type].filter(Boolean).join(" · ")],
    ["parameters", model.parameters?.toLocaleString("en")], ["dtype", model.dtype], ["task", model.task], ["sha256", model.sha256],
    ["made", String(scan.created ?? "")], ["with", `attemper ${scan.attemper}, torch ${scan.torch}`]];
  const text = (input) => make("li", {}, shown(make, input),
    make("span.dim", {}, ` ${size(input)}${input.truncated ? ", cut" : ""}${input.generated ? ", a generated sample" : ""}`));
  return make("section.wide.provenance", { "aria-label": "Where this comes from" }, make("h2", {}, "Where this comes from"),
    make("dl", {}, facts.filter(([, value]) => value).map(([name, value]) => entry(make, name, make("bdi", {}, value))),
      entry(make, scan.inputs.length === 1 ? "input" : "inputs", make("ol", {}, scan.inputs.map(text)))));
}

const HOW = "Point at a sign to read what it means; press it to shade the map by it.";

/** Every sign of the chosen head, each with its meaning, and the head's findings. */
export function headView(make, scan, act) {
  const node = make("section.panel.head", { "aria-label": "Signs of the chosen head" });
  const explained = make("p.explained", { "aria-live": "polite" }, HOW);
  const term = (sign) => make("button.term", { type: "button", "data-sign": sign.key, title: sign.says,
    onclick: () => act.set({ sign: sign.key }) }, sign.label);
  const explain = (event) => {
    const key = event.target.closest?.("button.term")?.dataset.sign, sign = scan.signs.find((one) => one.key === key);
    explained.replaceChildren(...(sign ? [make("b", {}, sign.label), `: ${sign.says}`] : [HOW]));
  };
  for (const kind of ["pointerover", "focusin", "focusout"]) node.addEventListener(kind, explain);
  node.addEventListener("pointerleave", explain);
  return { node, show(state) {
    const held = node.querySelector("button.term:focus")?.dataset.sign;
    const row = scan.rows[state.layer], head = row?.heads.get(state.head);
    const signs = head ? measured([head], SIGNS) : [], found = scan.findings.get(`${state.layer}.${state.head}`) ?? [];
    const terms = signs.map(term), list = make("dl", {}, signs.map((sign, i) => entry(make, terms[i], written(value(sign, head)))),
      given(head?.sink_token) ? entry(make, "sink", make("bdi", {}, visible(head.sink_token))) : null);
    const stop = roving(list, terms, grid(1, terms.length)), at = signs.findIndex((sign) => sign.key === (held ?? state.sign));
    if (at >= 0) stop(at);
    terms.forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.sign === state.sign)));
    node.replaceChildren(make("h3", {}, "Its signs"), make("p.name", {}, make("bdi", {}, `${row?.name ?? ""}, head ${state.head}`)),
      list, explained, ...found.map((finding) => make("p.found", {}, badge(make, finding.level), " ", finding.message)));
    if (held && at >= 0) terms[at].focus({ preventScroll: true });
  } };
}

const AUDITED = ["heads", "d_k", "declared", "applied", "rule", "std predicted", "std measured"];
const MEANT = {
  heads: "Query heads / key and value heads, if they are fewer.", d_k: "The width of a head.",
  declared: "The factor on q·k that the config, the module or the argument states.",
  applied: "The factor that q·k is really multiplied by, measured while the model ran.", rule: "The rule that gives this factor.",
  "std predicted": "How far a row's logits would spread if q and k had random directions: scale · |q| · |k − k̄| / √d_k.",
  "std measured": "How far they do spread. More than predicted: queries and keys are aligned.",
};

/** What every sign and every column of the audit means. */
export function glossary(make, scan) {
  if (!scan.signs.length) return null;
  const marks = ({ marks: known }) => (known ? ` Thresholds: ${known.map(([at, name]) => `${at} ${name}`).join(", ")}.` : "");
  const audited = scan.document.layers.some((layer) => layer.scale) ? AUDITED : [];
  return make("section.wide.glossary", { "aria-label": "What the words mean" }, make("details", {},
    make("summary", {}, "What the words mean: every sign, and the columns of the audit"), make("dl", {}, scan.signs.map((sign) => entry(make, sign.label, sign.says + marks(sign))),
      audited.map((name) => entry(make, `audit: ${name}`, MEANT[name])))));
}

/** One layer's line of the audit. */
function auditRow(make, scan, layer, same) {
  const { scale } = layer, fault = scale.verdict === "fault";
  const factors = scale.factors?.map((factor) => `${factor.what}: ${written(factor.number)}`).join("\n");
  const texts = [layer.kv_heads === layer.heads ? String(layer.heads) : `${layer.heads} / ${layer.kv_heads}`, String(layer.head_dim),
    written(scale.declared), written(scale.applied), RULES[scale.rule] ?? scale.rule ?? "none by name",
    written(scale.predicted_std, 2), written(scale.logit_std, 2)];
  const titles = { declared: scale.declared_by, applied: factors, rule: scale.formula };
  const cell = (name, i) => make(name === "rule" ? "td.rule" : "td.num", { title: titles[name], "data-label": name }, texts[i]);
  return make(fault ? "tr.fault" : "tr", {},
    make("th", { scope: "row", title: layer.layer }, fault ? make("span.shape.error", {}, `${SHAPES.error} `) : null,
      make("bdi", {}, scan.label(layer))),
    AUDITED.map(cell), same ? null : make("td.text", {}, scale.message));
}

/** The scale audit: what each layer declares and what it applies. */
export function audit(make, scan) {
  const layers = scan.document.layers.filter((layer) => layer.scale);
  if (!layers.length) return null;
  const same = new Set(layers.map((layer) => layer.scale.message)).size === 1;
  const names = ["layer", ...AUDITED, same ? null : "what it means"];
  const says = same ? `${layers.length > 1 ? `All ${layers.length} layers: ` : ""}${layers[0].scale.message}`
    : "The factor on q·k that each layer declares, and the factor that it really applies.";
  const numeric = /heads|d_k|declared|applied|std/;
  const head = names.filter(Boolean).map((name) => make(numeric.test(name) ? "th.num" : "th", { scope: "col", title: MEANT[name] }, name));
  return make("section.wide", { "aria-label": "Scale audit" }, make("h2", {}, "Scale audit"), make("p.says", {}, says),
    make("div.scroll", { tabindex: "0", role: "region", "aria-label": "Scale audit, table" }, make("table.audit", {},
      make("thead", {}, make("tr", {}, head)), make("tbody", {}, layers.map((layer) => auditRow(make, scan, layer, same))))));
}

/** The answer to `--token`, with a link to the head. */
export function asked(make, scan, act) {
  const { token } = scan.document, best = token?.best;
  if (!token) return null;
  const quoted = (word) => make("b", {}, "“", make("bdi", {}, visible(word)), "”");
  if (!best) return make("p.asked", {}, quoted(token.asked), " has weight only on itself, its neighbours and special tokens.");
  const go = () => act.set({ sign: "token", ...scan.find(best), input: token.input, at: { side: "query", at: token.position } });
  const others = Number.isFinite(best.others) ? ` Other tokens give it ${written(best.others, 2)} on average.` : "";
  return make("p.asked", {}, "Special tokens and neighbours left out, ", quoted(token.asked), " has its largest weight on ", quoted(best.token),
    `: ${written(best.weight, 2)}, in `, make("button.link", { type: "button", onclick: go }, "layer ", make("bdi", {}, scan.label(best)),
      `, head ${best.head}`), `.${others}`, underRules(scan, token));
}

/** The same weight under the other scales. */
function underRules(scan, { best, heads }) {
  const at = heads.findIndex((row) => ["layer", "kind", "head"].every((key) => row[key] === best[key]));
  const weights = (scan.document.what_if ?? []).filter((lane) => lane.token)
    .map(({ rule, token }) => `${RULES[rule] ?? rule} ${written(token.heads[at].weights[best.position], 2)}`);
  return weights.length ? ` Other scales: ${weights.join(", ")}.` : "";
}

/** What was not measured, and why. */
export function notes(make, scan) {
  const lines = scan.document.notes ?? [];
  const list = make("ul", {}, lines.map((note) => make("li", {}, note)));
  return lines.length ? make("section.wide", { "aria-label": "Notes" }, make("h2", {}, "Notes"), list) : null;
}
