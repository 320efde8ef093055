// The heads as text, as Python, and the map as a picture.

import { place, shade, value, written } from "../../../report/data/numbers.js";
import { blocks } from "../../../report/views/thumbnails.js";
import { matrix } from "../../draw/matrix.js";
import { common } from "./map.js";
import { small } from "./read.js";

/** The signs of a head in words, before and after. */
function headLine({ label, applied }, head, times, { before, signs }) {
  const change = (name, digits, of = (one) => one) => `${written(of(before[name]), digits)} → ${written(of(signs[name]), digits)}`;
  return (
    `Layer ${label}, head ${head}: scale ${written(applied)} × ${written(times, 2)}. Effective keys ${change("effective_keys", 2)}, ` +
    `top weight ${change("top_weight", 2)}, logit std ${change("variance", 2, Math.sqrt)}.`
  );
}

/** What is shown, in words. */
export function headsText({ text, places, times, sign, signs, results }, views) {
  const scaled = times === 1 ? "" : `, where the page computes it at × ${written(times, 2)}`;
  const row = (layer, i) => `${layer.label}: ${signs[i].map((head) => written(value(sign, head), sign.digits)).join("  ")}`;
  const lines = [`“${text.text}” in ${text.document.model.name}.`, "", `${sign.label} of every head (rows are layers)${scaled}:`];
  lines.push(...text.layers.map(row));
  places.forEach(([layer, head], i) => {
    if (results[i]) lines.push("", headLine(text.layers[layer], head, times, results[i]), ...views[i].words());
  });
  return lines.join("\n");
}

/** Python that prints the signs of the shown heads. */
export function headsPython({ text, places, times }) {
  const words = JSON.stringify(text.text).replace(
    /[\u007f-\uffff]/g,
    (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
  const demo = text.document.model.source === "demo";
  return [
    "import attemper",
    "import torch",
    "from attemper_lab.page.data.heads import read_heads",
    "from attemper.extension.inputs import load",
    "",
    `model = load(${demo ? "None" : JSON.stringify(text.document.model.name)})${demo ? "  # the embedded MiniLM" : "  # name its folder"}`,
    `heads = read_heads(model, ${words})`,
    `for layer, head in [${places.map(([layer, head]) => `(${layer}, ${head})`).join(", ")}]:`,
    "    logits = torch.from_numpy(heads.logits(layer, head)).double()",
    "    seen = logits.isfinite()",
    "    # the logits as queries on unit keys: the scale is the factor of the slider",
    "    unit = torch.eye(logits.shape[1], dtype=torch.float64)",
    "    queries = logits.masked_fill(~seen, 0.0)",
    `    vitals = attemper.measure(queries[None], unit[None], mask=seen, scale=${times})`,
    "    print(layer, head, vitals.by_head().to_dicts()[0])",
    "",
  ].join("\n");
}

/** The map as a picture of its own, drawn with `pen` in the colours of a theme. */
export function mapPicture(pen, { text, sign, signs, thumbs }, theme) {
  const [size, left, top] = [30, 40, 44],
    ink = theme === "dark" ? "#e8edf3" : "#141b24",
    range = common(sign, text, signs);
  const word = (x, y, words, anchor, fill = ink) =>
    pen("text", { x, y, "text-anchor": anchor, fill, "font-size": 11, "font-family": "sans-serif" }, words);
  const cells = text.layers.map((layer, i) =>
    signs[i].map((head, h) => {
      const number = value(sign, head),
        colour = number === null ? { css: "none", ink } : shade(theme, place(range, number)),
        [x, y] = [left + h * size, top + i * size];
      const picture = thumbs ? small(layer, head) : null;
      if (picture) return matrix(pen, theme, blocks(picture, h), { x, y, width: size - 2, height: size - 2 });
      return [
        pen("rect", { x, y, width: size - 2, height: size - 2, rx: 4, fill: colour.css }),
        word(x + 14, y + 18, written(number, sign.digits), "middle", colour.ink),
      ];
    }),
  );
  const names = text.layers.map((layer, i) => word(left - 8, top + i * size + 18, layer.label, "end"));
  const heads = Array.from({ length: text.columns }, (_, h) => word(left + h * size + 14, top - 8, String(h), "middle"));
  const [width, height] = [left + text.columns * size + 8, top + text.layers.length * size + 8];
  return pen(
    "svg",
    { "aria-label": thumbs ? "the attention of every head" : `${sign.label} of every head`, viewBox: `0 0 ${width} ${height}`, width, height },
    word(left, 16, `${thumbs ? "attention" : sign.label}: layers down, heads across`, "start"),
    heads,
    names,
    cells,
  );
}
