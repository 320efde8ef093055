// The map of all heads: layers × heads, shaded by a sign on one scale. Pointing at a cell shows its head, pressing it keeps it.

import { place, scale, shading, value, written } from "../../../report/data/numbers.js";
import { grid, roving } from "../../../report/views/dom.js";
import { SHARE_OF, SMALL, paintSmall } from "../../../report/views/thumbnails.js";
import { LIVE, small } from "./read.js";

const HOW = ["Point at a head to see it, press it to keep it, pin one", " (key P)", " to compare two."];
const RERUN = "`attemper scan --what-if none` runs the whole model again, and so counts others.";
const STEPS = 24; // of the legend's bar

/** One colour scale of a sign for all heads, at the model's own scale and at the slider's, so that a change shows. */
export function common(sign, text, now) {
  const heads = [...text.document.heads, ...now.flat()];
  return scale(sign, heads, text.keys);
}

/** The table with its legend: `{node, show(…)}`. `act` has view(place | null), lock(place), pin(place). */
export function headMap(make, act) {
  const box = make("div.heads-table"),
    legend = make("div.heads-legend"),
    pointed = make("p.heads-pointed");
  const node = make("div.heads-map", {}, box, legend, pointed, make("p.heads-how", {}, HOW[0], make("span.by-key", {}, HOW[1]), HOW[2]));
  let built = null,
    cells = [],
    canvases = [],
    painted = null,
    stop = null;
  const placeAt = (target) => {
    const found = target.closest?.("button.head-cell");
    return found ? found.dataset.head.split(".").map(Number) : null;
  };
  box.addEventListener("pointerover", (event) => act.view(placeAt(event.target)));
  box.addEventListener("pointerleave", () => act.view(null));
  box.addEventListener("focusin", (event) => act.view(placeAt(event.target)));
  box.addEventListener("focusout", () => act.view(null));
  box.addEventListener("click", (event) => {
    const found = placeAt(event.target);
    if (found) act.lock(found);
  });
  box.addEventListener("keydown", (event) => {
    const found = event.key === "p" ? placeAt(event.target) : null;
    if (found) act.pin(found);
  });

  function build(text) {
    cells = [];
    const rows = text.layers.map((layer) =>
      make(
        "tr",
        {},
        make("th", { scope: "row", title: layer.layer }, layer.label),
        Array.from({ length: text.columns }, (_, head) => {
          const cell = head < layer.heads ? make("button.head-cell", { type: "button", "data-head": `${layer.index}.${head}` }) : null;
          cells.push(cell);
          return make("td", {}, cell);
        }),
      ),
    );
    const names = Array.from({ length: text.columns }, (_, head) => make("th", { scope: "col" }, String(head)));
    const table = make(
      "table",
      { "--columns": text.columns },
      make("caption.unseen", {}, "Layers down, heads across"),
      make("thead", {}, make("tr", {}, make("th.corner", { scope: "col" }, "layer"), names)),
      make("tbody", {}, rows),
    );
    box.replaceChildren(table);
    stop = roving(table, cells, grid(text.columns, cells.length));
    canvases = cells.map((cell) => cell && make("canvas", { "aria-hidden": "true" }));
    [built, painted] = [text, null];
  }
  return {
    node,
    cells: () => cells,
    /** `theme` is null for numbers, else that of the thumbnails. */
    show(text, sign, now, { chosen, pinned, viewed, times, theme }) {
      if (built !== text) build(text);
      const range = common(sign, text, now),
        tall = text.layers.length > 16 || text.columns > 16;
      const drawn = theme && painted?.now === now && painted.theme === theme;
      if (theme && !drawn) painted = { now, theme };
      node.classList.toggle("dense", tall);
      node.classList.toggle("thumbs", Boolean(theme));
      cells.forEach((cell, i) => {
        if (!cell) return;
        const layer = Math.floor(i / text.columns),
          head = i % text.columns,
          number = value(sign, now[layer][head]),
          key = `${layer}.${head}`,
          picture = theme ? small(text.layers[layer], now[layer][head]) : null;
        if (picture && !drawn) paintSmall(canvases[i], picture, head, theme);
        if (number !== null)
          for (const [name, colour] of Object.entries(shading(place(range, number)))) cell.style.setProperty(name, colour);
        cell.classList.toggle("unknown", theme ? !picture : number === null);
        if (picture) cell.firstChild === canvases[i] || cell.replaceChildren(canvases[i]);
        else cell.textContent = tall || theme ? "" : written(number, number >= 99.95 ? 0 : sign.digits); // a cell is narrow
        cell.setAttribute("aria-label", `layer ${text.layers[layer].label}, head ${head}: ${sign.label} ${written(number, sign.digits)}`);
        cell.setAttribute("aria-pressed", String(key === chosen));
        cell.classList.toggle("pinned", key === pinned);
        cell.classList.toggle("viewed", key === viewed);
        if (key === chosen) stop(i);
      });
      const bar = Array.from({ length: STEPS }, (_, i) => make("i", shading((i / (STEPS - 1)) ** (theme ? 0.5 : 1)))),
        [unit, ends] = theme ? [SHARE_OF, { low: 0, high: 1 }] : [sign, range];
      legend.replaceChildren(
        make("span", {}, written(ends.low, unit.digits)),
        make("span.bar", {}, bar),
        make("span", {}, `${written(ends.high, unit.digits)}${unit.unit ? ` ${unit.unit}` : ""}${ends.log ? " (log)" : ""}`),
      );
      const moved =
        times !== 1
          ? theme || LIVE.has(sign.key)
            ? text.whole
              ? ` Every head at × ${written(times, 2)} of its scale, each alone: what reaches it stays as it was. ${RERUN}`
              : " Of the heads that were opened, at the slider's scale."
            : " At the model's own scale: the page does not compute this one again."
          : "";
      pointed.textContent = (theme ? SMALL : sign.says) + moved;
    },
  };
}
