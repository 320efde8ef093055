// The controls of the flow: two sentences, a typed one, which head, and the switch that leaves the division out.

import { cut, visible } from "../../../report/data/text.js";
import { sentenceForm } from "../../shell/field.js";
import { ROWS } from "./layout.js";
import { LESSON } from "./source.js";

/** The first request to a server, whose model may differ from the one inside the offline page. */
const REAL = { text: "The dog chased the ball because it was fast.", layer: 4, head: 3 };

/** The row of controls: `{node, show(state, flow)}`. */
export function controls(make, page, { set, embedded, love, longest }) {
  const served = Boolean(page.source),
    real = embedded[0] ?? (served ? REAL : null);
  const sentence = (words, values) => make("button.plain.sentence", { type: "button", onclick: () => set({ at: "", ...values }) }, words);
  const first = sentence("Love Apple phones", { text: love, way: "lesson", head: 0 });
  const second = real && sentence(real.text, { text: real.text, way: "model", layer: real.layer, head: real.head });
  const form = sentenceForm(make, {
    name: "flow.text",
    button: "Show",
    longest,
    enter: (text) => set({ text, at: "", ...(served ? { way: "model" } : { way: "lesson", head: 0 }) }),
  });
  const box = make("input", { type: "checkbox", onchange: () => set({ skip: box.checked }) });
  const skip = make("label.check", { "data-control": "flow.skip" }, box, make("span", {}, "leave out the division by √d_k"));
  const layer = make("select", { "aria-label": "Layer", onchange: () => set({ layer: Number(layer.value) }) });
  const head = make("select", { "aria-label": "Head", onchange: () => set({ head: Number(head.value) }) });
  const heads = make("span.row.head-choice", { "data-control": "flow.head" }, layer, head),
    about = make("p.flow-about");
  const node = make(
    "div.flow-controls",
    {},
    make("div.row", { role: "group", "aria-label": "Sentence", "data-control": "flow.sentences" }, first, second),
    form.node,
    make("div.row.flow-settings", {}, about, heads, skip),
  );
  const options = (select, count, name, chosen) => {
    if (select.children.length !== count)
      select.replaceChildren(...Array.from({ length: count }, (_, i) => make("option", { value: i }, `${name} ${i}`)));
    select.value = String(chosen);
  };
  return {
    node,
    show(state, flow) {
      box.checked = state.skip;
      first.setAttribute("aria-pressed", String(state.text === love && state.way === "lesson"));
      second?.setAttribute("aria-pressed", String(state.text === real.text && state.way === "model"));
      if (!flow) return;
      const fixed = flow.way === "model" && !served;
      layer.hidden = flow.way === "lesson" || fixed;
      head.hidden = fixed;
      options(layer, flow.layers, "layer", flow.layer);
      options(head, flow.heads, "head", flow.head);
      const from =
        flow.way === "lesson"
          ? `${cut(visible(flow.text), 40)}: ${LESSON.d_model} random numbers a word, ${LESSON.heads} heads of ${LESSON.d_k}, as attemper.explain draws.`
          : `${flow.model}, layer ${flow.layer}, head ${flow.head}: the numbers of the real model.`;
      about.textContent = flow.n > ROWS ? `${from} The first ${ROWS} of ${flow.n} tokens are drawn, all are computed.` : from;
    },
  };
}
