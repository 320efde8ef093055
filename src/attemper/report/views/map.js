// The map: layers × heads, shaded by any sign on one scale, with every finding marked by a shape.

import { SHAPES, SIGN_OF, place, scale, shading, value, written } from "../data/numbers.js";
import { grid, roving } from "./dom.js";
import { SHARE_OF, SMALL, paintSmall } from "./thumbnails.js";

const STEPS = 32; // of the legend's bar
const HEIGHT = 500; // pixels that the rows share, so that the whole map is seen at once
const TALL = 330; // a taller map leaves no room below it

/** The size of a cell, by how many there are; `wide` is the least width of a column. */
export function density({ rows, columns }, thumbs = false) {
  const height = Math.max(9, Math.min(34, Math.floor(HEIGHT / Math.max(1, rows.length)) - 2));
  const tight = !thumbs && (columns > 32 || height < 14), gap = tight ? 1 : 2, numbers = !thumbs && columns <= 16 && height >= 18;
  const wide = thumbs ? 28 : numbers ? 20 : tight ? 8 : 13;
  return { height, gap, wide, numbers, tight, tall: rows.length * (height + gap) > TALL, broad: columns > 32 };
}

/** A head in one sentence: for a screen reader, and for the line under the map. */
export function describe(scan, row, head, sign) {
  const found = scan.findings.get(`${row.index}.${head.head}`) ?? [];
  const unit = sign.unit === "nats" ? " nats" : "";
  const marks = found.map((finding) => `; ${finding.level}: ${finding.name}`).join("");
  return `layer ${row.label}, head ${head.head}: ${sign.label} ${written(value(sign, head))}${unit}${marks}`;
}

/** The bar of a scale with its ends and thresholds; as an axis, with the ends below it. */
export function legend(make, sign, ends, axis = false, root = false) {
  const shade = (i) => (root ? Math.sqrt(i / (STEPS - 1)) : i / (STEPS - 1));
  const bar = Array.from({ length: STEPS }, (_, i) => make("i.shaded", shading(shade(i))));
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

/** Healthy findings are shown with their own sign only. */
const worthMarking = (finding, sign) => finding.level !== "healthy" || SIGN_OF[finding.name] === sign.key;

/** The worst finding of a cell as its shape. */
function shape(make, found, sign) {
  const worst = found?.find((finding) => worthMarking(finding, sign));
  return worst ? make(`span.shape.${worst.level}`, { "aria-hidden": "true" }, SHAPES[worst.level] ?? "●") : null;
}

/** What the shapes on this map mean: one entry for each level and name that is marked. */
function shapes(make, scan, sign) {
  const marked = scan.document.findings.filter((finding) => worthMarking(finding, sign));
  const seen = [...new Map(marked.map((finding) => [`${finding.level}: ${finding.name}`, finding]))];
  return make("ul.shapes", {}, seen.slice(0, 8).map(([words, one]) => make("li", {}, shape(make, [one], sign), ` ${words}`)));
}

function cell(make, scan, row, head, sign, ends, act, small) {
  const number = value(sign, head), picture = small?.(row), kind = picture ? "small" : number === null || small ? "none" : "shaded";
  const canvas = picture ? make("canvas", { "aria-hidden": "true" }) : null;
  if (picture) paintSmall(canvas, picture, head.head, small.theme);
  return make(`button.cell.${kind}`, {
    ...(kind === "shaded" ? shading(place(ends, number)) : {}), type: "button", "data-head": `${row.index}.${head.head}`,
    "aria-label": describe(scan, row, head, sign), title: describe(scan, row, head, sign),
    onclick: () => act.choose(row.index, head.head),
  }, canvas ?? make("span.number", {}, small ? "" : written(number, sign.digits)), shape(make, scan.findings.get(`${row.index}.${head.head}`), sign));
}

/** The table of cells for one sign; with `small`, which finds the picture of a row, each cell is its head's thumbnail. */
function table(make, scan, sign, ends, act, small) {
  const buttons = [], { height, gap, wide, numbers, tight } = density(scan, Boolean(small));
  const body = scan.rows.map((row) => {
    const cells = Array.from({ length: scan.columns }, (_, column) => {
      const head = row.heads.get(column);
      const button = head ? cell(make, scan, row, head, sign, ends, act, small) : null;
      buttons.push(button);
      return make("td", {}, button);
    });
    const found = shape(make, scan.findings.get(`${row.index}`), sign);
    return make("tr", {}, make("th", { scope: "row", title: row.name }, make("bdi", {}, row.label), found), cells);
  });
  const many = wide < 20; // there is room for every fourth number only
  const name = (_, column) => make("th", { scope: "col" }, make(many && column % 4 ? "span.unseen" : "span", {}, String(column)));
  const names = Array.from({ length: scan.columns }, name);
  const widest = Math.max(...scan.rows.map((row) => row.label.length));
  const width = `${Math.min(24, Math.max(tight ? 4 : 11, widest + 1))}ch`, kinds = { dense: !numbers && !small, tight, thumbs: small };
  const classes = Object.keys(kinds).filter((name) => kinds[name]).map((name) => `.${name}`).join("");
  const node = make(`table.map${classes}`, { "--label": width, "--height": `${height}px`, "--gap": `${gap}px`, "--wide": `${wide}px`,
    "--columns": scan.columns },
    make("caption.unseen", {}, `${sign.label} of every head; rows are layers, columns are heads`),
    make("thead", {}, make("tr", {}, make("th.corner", { scope: "col" }, make(tight ? "span.unseen" : "span", {}, "layer \\ head")), names)), make("tbody", {}, body));
  return { node, buttons, stop: roving(node, buttons, grid(scan.columns, buttons.length)) };
}

/** Scroll a box, and nothing around it, until a cell is seen beside the names that stay. */
function reveal(box, cell, names) {
  const outer = box.getBoundingClientRect(), inner = cell.getBoundingClientRect(), stay = names.getBoundingClientRect();
  const by = (low, high, from, to) => (low < from ? low - from : high > to ? high - to : 0);
  box.scrollTop += by(inner.top, inner.bottom, outer.top + stay.height, outer.top + box.clientHeight - 4);
  box.scrollLeft += by(inner.left, inner.right, outer.left + stay.width, outer.left + box.clientWidth - 4);
}

/** What cells show: a sign, or a thumbnail of the head. */
function ways(make, scan, act) {
  if (!scan.document.attention.length) return null;
  return make("span.tabs", { role: "group", "aria-label": "What cells show" }, ["numbers", "thumbnails"].map((name) =>
    make("button.tab", { type: "button", "data-way": name, onclick: () => act.set({ thumbs: name === "thumbnails" }) }, name)));
}

/** The section with the choice of a sign, the table and its legend. */
export function mapView(make, scan, act) {
  const choice = make("select", { id: scan.id("sign"), onchange: (event) => act.set({ sign: event.target.value }) },
    scan.signs.map((sign) => make("option", { value: sign.key }, sign.label)));
  const title = make("h2", {}, "Every head"), says = make("p.says"), box = make("div.scroll.cells-of-heads");
  const foot = make("div"), tabs = ways(make, scan, act);
  const pointed = make("p.pointed", { "aria-hidden": "true" }); // the buttons themselves say it to a screen reader
  const node = make("section.panel", { "aria-label": "Map of all heads" },
    make("div.bar-of-controls", {}, title, tabs,
      make("label", { for: scan.id("sign") }, "shaded by "), choice),
    says, box, pointed, foot);
  let drawn = "", current = null, chosen = "", last = "";
  const point = (event) => {
    const button = event.target.closest?.("button.cell");
    pointed.textContent = button ? button.getAttribute("aria-label") : chosen;
  };
  for (const kind of ["pointerover", "focusin", "pointerout", "focusout"]) box.addEventListener(kind, point);
  return { node, show(state, theme) {
    const sign = scan.signs.find((one) => one.key === state.sign), thumbs = Boolean(tabs && state.thumbs);
    const key = JSON.stringify([sign.key, thumbs && [theme, state.input]]);
    if (drawn !== key) {
      const ends = scale(sign, scan.heads, scan.keys), small = (row) => scan.album(row.layer, row.kind, state.input);
      small.theme = theme;
      current = table(make, scan, sign, ends, act, thumbs ? small : null);
      box.replaceChildren(current.node);
      foot.replaceChildren(legend(make, thumbs ? SHARE_OF : sign, thumbs ? { low: 0, high: 1 } : ends, false, thumbs),
        shapes(make, scan, sign));
      says.textContent = thumbs ? SMALL : sign.says;
      for (const tab of tabs?.children ?? []) tab.setAttribute("aria-pressed", String((tab.dataset.way === "thumbnails") === thumbs));
      title.dataset.sign = sign.label; // paper has no menu that shows it
      choice.value = sign.key;
      [drawn, last] = [key, ""];
    }
    current.buttons.forEach((button, index) => {
      const on = button?.dataset.head === `${state.layer}.${state.head}`;
      button?.setAttribute("aria-pressed", on);
      if (on) current.stop(index);
      if (on) pointed.textContent = chosen = button.getAttribute("aria-label");
      if (on && last !== button.dataset.head && node.isConnected) reveal(box, button, current.node.querySelector(".corner"));
      if (on) last = button.dataset.head;
    });
  } };
}
