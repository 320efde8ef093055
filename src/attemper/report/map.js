// The map: layers × heads, shaded by any sign on one scale, with every finding marked by a shape.

import { SHAPES, SIGN_OF, place, scale, shading, value, written } from "./numbers.js";
import { grid, roving } from "./dom.js";

const STEPS = 32; // of the legend's bar

/** Everything of a head in one sentence: for a screen reader, and for the line under the map. */
export function told(scan, row, head, sign) {
  const found = scan.findings.get(`${row.index}.${head.head}`) ?? [];
  const unit = sign.unit === "nats" ? " nats" : "";
  const marks = found.map((finding) => `; ${finding.level}: ${finding.kind}`).join("");
  return `layer ${row.label}, head ${head.head}: ${sign.label} ${written(value(sign, head))}${unit}${marks}`;
}

/** The bar of a scale with its ends, and the thresholds that lie on it. As an axis its ends stand below it. */
export function legend(make, sign, ends, axis = false) {
  const bar = Array.from({ length: STEPS }, (_, i) => make("i.shaded", shading(i / (STEPS - 1))));
  let last = -1;
  const marks = (sign.marks ?? []).filter(([at]) => at >= ends.low && at <= ends.high).map(([at, name]) => {
    const share = place(ends, at), crowded = share - last < 0.2 || (axis && (share < 0.1 || share > 0.85));
    if (!crowded) last = share;
    const late = share > 0.75 ? ".late" : "";
    return make(`span.mark${late}`, { "--at": share, title: `${at}: ${name}` }, crowded ? "" : make("span", {}, `${at} ${name}`));
  });
  const unit = sign.unit ? ` ${sign.unit}` : "";
  const words = `Scale from ${written(ends.low)} to ${written(ends.high)}${unit}`;
  return make(axis ? "div.legend.axis" : "div.legend", { role: "img", "aria-label": words },
    make("span.end", {}, written(ends.low, sign.digits)), make("div.bar", {}, bar, marks),
    make("span.end.high", {}, written(ends.high, sign.digits), unit, ends.log ? " (log)" : ""));
}

/** Healthy findings are good to know where their own sign is looked at, and noise elsewhere. */
const worthMarking = (finding, sign) => finding.level !== "healthy" || SIGN_OF[finding.kind] === sign.key;

/** The worst finding of a cell as its shape. */
function shape(make, found, sign) {
  const worst = found?.find((finding) => worthMarking(finding, sign));
  return worst ? make(`span.shape.${worst.level}`, { "aria-hidden": "true" }, SHAPES[worst.level] ?? "●") : null;
}

/** What the shapes on this map mean: one entry for each level and kind that is marked. */
function shapes(make, scan, sign) {
  const marked = scan.document.findings.filter((finding) => worthMarking(finding, sign));
  const seen = [...new Map(marked.map((finding) => [`${finding.level}: ${finding.kind}`, finding]))];
  return make("ul.shapes", {}, seen.slice(0, 8).map(([words, one]) => make("li", {}, shape(make, [one], sign), ` ${words}`)));
}

function cell(make, scan, row, head, sign, ends, act) {
  const number = value(sign, head);
  return make(`button.cell${number === null ? ".none" : ".shaded"}`, {
    ...(number === null ? {} : shading(place(ends, number))), type: "button", "data-head": `${row.index}.${head.head}`,
    "aria-label": told(scan, row, head, sign), title: told(scan, row, head, sign),
    onclick: () => act.choose(row.index, head.head),
  }, make("span.number", {}, written(number, sign.digits)), shape(make, scan.findings.get(`${row.index}.${head.head}`), sign));
}

/** The table of cells for one sign. */
function table(make, scan, sign, ends, act) {
  const buttons = [];
  const body = scan.rows.map((row) => {
    const cells = Array.from({ length: scan.columns }, (_, column) => {
      const head = row.heads.get(column);
      const button = head ? cell(make, scan, row, head, sign, ends, act) : null;
      buttons.push(button);
      return make("td", {}, button);
    });
    const found = shape(make, scan.findings.get(`${row.index}`), sign);
    return make("tr", {}, make("th", { scope: "row", title: row.name }, make("bdi", {}, row.label), found), cells);
  });
  const many = scan.columns > 16; // then there is room for every fourth number
  const name = (_, column) => make("th", { scope: "col" }, make(many && column % 4 ? "span.unseen" : "span", {}, String(column)));
  const names = Array.from({ length: scan.columns }, name);
  const widest = Math.max(...scan.rows.map((row) => row.label.length));
  const width = `${Math.min(24, Math.max(11, widest + 1))}ch`;
  const node = make(many ? "table.map.dense" : "table.map", { "--label": width },
    make("caption.unseen", {}, `${sign.label} of every head; rows are layers, columns are heads`),
    make("thead", {}, make("tr", {}, make("th.corner", { scope: "col" }, "layer \\ head"), names)), make("tbody", {}, body));
  return { node, buttons, stop: roving(node, buttons, grid(scan.columns, buttons.length)) };
}

/** The section with the choice of a sign, the table and its legend. */
export function mapView(make, scan, act) {
  const choice = make("select", { id: scan.id("sign"), onchange: (event) => act.set({ sign: event.target.value }) },
    scan.signs.map((sign) => make("option", { value: sign.key }, sign.label)));
  const title = make("h2", {}, "Every head"), says = make("p.says"), box = make("div.scroll"), foot = make("div");
  const pointed = make("p.pointed", { "aria-hidden": "true" }); // the buttons themselves say it to a screen reader
  const node = make("section.panel", { "aria-label": "Map of all heads" },
    make("div.bar-of-controls", {}, title,
      make("label", { for: scan.id("sign") }, "shaded by "), choice),
    says, box, pointed, foot);
  let drawn = null, current = null, chosen = "";
  const point = (event) => {
    const button = event.target.closest?.("button.cell");
    pointed.textContent = button ? button.getAttribute("aria-label") : chosen;
  };
  for (const kind of ["pointerover", "focusin", "pointerout", "focusout"]) box.addEventListener(kind, point);
  return { node, show(state) {
    const sign = scan.signs.find((one) => one.key === state.sign);
    if (drawn !== sign) {
      const ends = scale(sign, scan.heads, scan.keys);
      current = table(make, scan, sign, ends, act);
      box.replaceChildren(current.node);
      foot.replaceChildren(legend(make, sign, ends), shapes(make, scan, sign));
      says.textContent = sign.says;
      title.dataset.sign = sign.label; // paper has no menu that shows it
      choice.value = sign.key;
      drawn = sign;
    }
    current.buttons.forEach((button, index) => {
      const on = button?.dataset.head === `${state.layer}.${state.head}`;
      button?.setAttribute("aria-pressed", on);
      if (on) current.stop(index);
      if (on) pointed.textContent = chosen = button.getAttribute("aria-label");
    });
  } };
}
