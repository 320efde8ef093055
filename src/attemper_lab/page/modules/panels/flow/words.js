// The flow as text, and as Python.

import { written } from "../../../report/data/numbers.js";
import { spelled } from "./steps.js";

/** A square matrix as lines of text. */
function table(flow, part, name) {
  const wide = Math.max(...flow.tokens.map((token) => [...token].length), 7),
    cell = (word) => String(word).padStart(wide + 1);
  const lines = flow.tokens.map(
    (token, i) => cell(token) + flow.tokens.map((_, j) => cell(written(part.data[i * flow.n + j], 2))).join(""),
  );
  return [`${name}:`, cell("") + flow.tokens.map(cell).join(""), ...lines].join("\n");
}

/** Everything the picture shows, in words. */
export function flowText({ flow, parts, steps }, state, cell) {
  const from =
    flow.way === "lesson" ? "random vectors, as attemper.explain draws them" : `${flow.model}, layer ${flow.layer}, head ${flow.head}`;
  const walk = steps.map(
    (step, i) =>
      `${i + 1}. ${step.title}. ${spelled(step.words)
        .map(([word]) => word)
        .join("")}`,
  );
  return [
    `“${flow.text}”: ${from}.`,
    "",
    ...walk,
    "",
    table(flow, parts.S, "S, scores"),
    "",
    table(flow, parts.Z, state.skip ? "Z, logits (not divided)" : "Z, logits"),
    "",
    table(flow, parts.P, "P, weights"),
    cell ? `\n${cell}` : "",
  ].join("\n");
}

/** Python that prints the same numbers. */
export function flowPython(flow, state) {
  const text = JSON.stringify(flow.text).replace(
    /[\u007f-\uffff]/g,
    (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
  if (flow.way === "lesson") {
    const rule = state.skip ? ', rule="none"' : "";
    return `import attemper\n\nexplanation = attemper.explain(${text}, heads=${flow.heads}${rule})\nprint(explanation)\n`;
  }
  const model = flow.model.endsWith("(embedded)") ? "None" : JSON.stringify(flow.model); // None: the embedded MiniLM; else its folder
  return [
    "import torch",
    "from attemper_lab.page.data.heads import read_heads",
    "from attemper.extension.inputs import load",
    "",
    `heads = read_heads(load(${model}), ${text})`,
    `logits = torch.from_numpy(heads.logits(${flow.layer}, ${flow.head}))`,
    state.skip ? `logits = logits / ${flow.scale}                    # as if q·k were not scaled` : "",
    "print(logits.softmax(-1).numpy().round(3))",
    "",
  ]
    .filter((line, i) => line || i === 3)
    .join("\n");
}
