// The heads as text, as Python, and the map as a picture.

import { place, shade, value, written } from "../../../report/data/numbers.js";
import { common } from "./map.js";

/** What is shown, in words. */
export function headsText({ text, places, times, sign, signs, results }, views) {
  const lines = [`“${text.text}” in ${text.document.model.name}.`, "", `${sign.label} of every head (rows are layers)${times === 1 ? "" : `, where the page computes it at × ${written(times, 2)}`}:`,
    ...text.layers.map((layer, i) => `${layer.label}: ${signs[i].map((head) => written(value(sign, head), sign.digits)).join("  ")}`)];
  places.forEach(([layer, head], i) => {
    const found = results[i], { applied, label } = text.layers[layer];
    if (!found) return;
    lines.push("", `Layer ${label}, head ${head}: scale ${written(applied)} × ${written(times, 2)}. Effective keys ${written(found.before.effective_keys, 2)} → ${written(found.signs.effective_keys, 2)}, `
      + `top weight ${written(found.before.top_weight, 2)} → ${written(found.signs.top_weight, 2)}, logit std ${written(Math.sqrt(found.before.variance), 2)} → ${written(Math.sqrt(found.signs.variance), 2)}.`, ...views[i].words());
  });
  return lines.join("\n");
}

/** Python that prints the signs of the shown heads. */
export function headsPython({ text, places, times }) {
  const words = JSON.stringify(text.text).replace(/[\u007f-\uffff]/g, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const demo = text.document.model.source === "demo";
  return ["import attemper", "import torch", "from attemper.page.data.heads import read_heads", "from attemper.scan.input.model import load", "",
    `model = load(${demo ? "None" : JSON.stringify(text.document.model.name)})${demo ? "  # the embedded MiniLM" : "  # name its folder"}`, `heads = read_heads(model, ${words})`,
    `for layer, head in [${places.map(([layer, head]) => `(${layer}, ${head})`).join(", ")}]:`,
    "    logits = torch.from_numpy(heads.logits(layer, head)).double()", "    seen = logits.isfinite()",
    "    # the logits as queries on unit keys: the scale is the factor of the slider",
    "    unit = torch.eye(logits.shape[1], dtype=torch.float64)", "    queries = logits.masked_fill(~seen, 0.0)",
    `    vitals = attemper.measure(queries[None], unit[None], mask=seen, scale=${times})`, "    print(layer, head, vitals.by_head().to_dicts()[0])", ""].join("\n");
}

/** The map as an SVG of its own. */
export function mapSvg({ text, sign, signs }, root) {
  const view = root.ownerDocument.defaultView, theme = view.getComputedStyle(root).colorScheme === "dark" || (view.matchMedia("(prefers-color-scheme: dark)").matches && view.getComputedStyle(root).colorScheme !== "light") ? "dark" : "light";
  const size = 30, left = 40, top = 44, range = common(sign, text, signs), ink = theme === "dark" ? "#e8edf3" : "#141b24", font = "font-family='system-ui, sans-serif' font-size='11'";
  const escape = (words) => words.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
  const cells = text.layers.flatMap((layer, i) => signs[i].map((head, h) => {
    const number = value(sign, head), colour = number === null ? { css: "none", ink } : shade(theme, place(range, number));
    return `<rect x="${left + h * size}" y="${top + i * size}" width="${size - 2}" height="${size - 2}" rx="4" fill="${colour.css}"/>`
      + `<text x="${left + h * size + size / 2 - 1}" y="${top + i * size + 18}" text-anchor="middle" fill="${colour.ink}" ${font}>${written(number, sign.digits)}</text>`;
  }));
  const names = text.layers.map((layer, i) => `<text x="${left - 8}" y="${top + i * size + 18}" text-anchor="end" fill="${ink}" ${font}>${escape(layer.label)}</text>`);
  const width = left + text.columns * size + 8, height = top + text.layers.length * size + 8;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}"><text x="${left}" y="16" fill="${ink}" ${font}>${escape(sign.label)}: layers down, heads across</text>`
    + Array.from({ length: text.columns }, (_, h) => `<text x="${left + h * size + size / 2}" y="${top - 8}" text-anchor="middle" fill="${ink}" ${font}>${h}</text>`).join("") + names.join("") + cells.join("") + "</svg>";
}
