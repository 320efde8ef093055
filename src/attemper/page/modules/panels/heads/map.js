// The map of all heads: layers × heads, shaded by a sign on one scale. Pointing at a cell shows its head, pressing it keeps it.

import { place, scale, shading, value, written } from "../../../report/data/numbers.js";
import { grid, roving } from "../../../report/views/dom.js";
import { LIVE } from "./read.js";

const HOW = "Point at a head to see it, press it to keep it, pin one (key P) to compare two.";
const STEPS = 24; // of the legend's bar

/** The scale of a sign for all heads, at the model's own scale and at another: one for both, so that a change is seen. */
export function common(sign, text, now) {
  const heads = [...text.document.heads, ...now.flat()];
  return scale(sign, heads, text.keys);
}

/** The table with its legend: `{node, show(…)}`. `act` has view(place | null), lock(place), pin(place). */
export function headMap(make, act) {
  const box = make("div.heads-table"),
    legend = make("div.heads-legend"),
    pointed = make("p.heads-pointed");
  const node = make("div.heads-map", {}, box, legend, pointed, make("p.heads-how", {}, HOW));
  let built = null,
    cells = [],
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
      {},
      make("caption.unseen", {}, "Layers down, heads across"),
      make("thead", {}, make("tr", {}, make("th.corner", { scope: "col" }, "layer"), names)),
      make("tbody", {}, rows),
    );
    box.replaceChildren(table);
    stop = roving(table, cells, grid(text.columns, cells.length));
    built = text;
  }
  return {
    node,
    cells: () => cells,
    show(text, sign, now, { chosen, pinned, viewed, times }) {
      if (built !== text) build(text);
      const range = common(sign, text, now),
        tall = text.layers.length > 16 || text.columns > 16;
      node.classList.toggle("dense", tall);
      cells.forEach((cell, i) => {
        if (!cell) return;
        const layer = Math.floor(i / text.columns),
          head = i % text.columns,
          number = value(sign, now[layer][head]),
          key = `${layer}.${head}`;
        if (number !== null)
          for (const [name, colour] of Object.entries(shading(place(range, number)))) cell.style.setProperty(name, colour);
        cell.classList.toggle("unknown", number === null);
        cell.textContent = tall ? "" : written(number, number >= 99.95 ? 0 : sign.digits); // a cell is narrow
        cell.setAttribute("aria-label", `layer ${text.layers[layer].label}, head ${head}: ${sign.label} ${written(number, sign.digits)}`);
        cell.setAttribute("aria-pressed", String(key === chosen));
        cell.classList.toggle("pinned", key === pinned);
        cell.classList.toggle("viewed", key === viewed);
        if (key === chosen) stop(i);
      });
      const bar = Array.from({ length: STEPS }, (_, i) => make("i", shading(i / (STEPS - 1))));
      legend.replaceChildren(
        make("span", {}, written(range.low, sign.digits)),
        make("span.bar", {}, bar),
        make("span", {}, `${written(range.high, sign.digits)}${sign.unit ? ` ${sign.unit}` : ""}${range.log ? " (log)" : ""}`),
      );
      const moved =
        times !== 1
          ? LIVE.has(sign.key)
            ? text.whole
              ? ` Every head at × ${written(times, 2)} of its scale.`
              : " Of the heads that were opened, at the slider's scale."
            : " At the model's own scale: the page does not compute this one again."
          : "";
      pointed.textContent = sign.says + moved;
    },
  };
}
