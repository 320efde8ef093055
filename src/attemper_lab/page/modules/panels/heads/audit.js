// The scan of a head and its layer: the scale that is applied, and the findings.

import { SHAPES } from "../../../report/data/numbers.js";

/** The audit of the layer, and the findings of the head, as nodes. */
export function audited(make, text, [layer, head]) {
  const { about, label } = text.layers[layer],
    found = text.findings(layer, head),
    { scale } = about;
  const finding = (one) =>
    make(
      `li.finding.${one.level}`,
      {},
      make("b", {}, `${SHAPES[one.level] ?? "●"} ${one.title ?? one.name}. `),
      one.message,
      one.level === "healthy" || !one.advice ? null : make("span.dim", {}, ` ${one.advice}`),
    );
  return [
    make("h3", {}, `Layer ${label}: the scale, audited`),
    make("p", {}, scale.message),
    scale.std_message ? make("p.dim", {}, scale.std_message) : null,
    make("h3", {}, `Head ${head}: findings`),
    found.length ? make("ul.heads-findings", {}, found.map(finding)) : make("p.dim", {}, "None: nothing about this head needs attention."),
  ].filter(Boolean);
}
