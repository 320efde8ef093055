// The patches of an image: point at one and see, on the image, where it looks.

import { shading, written } from "../data/numbers.js";
import { bytes } from "../data/weights.js";
import { roving } from "../views/dom.js";
import { tokenButton } from "./columns.js";

/** The image on a canvas; null where the document has none, or too few bytes. */
function photo(make, image) {
  const data = image ? bytes(image.data) : null;
  if (!data || data.length !== 3 * image.width * image.height || !data.length) return null;
  const canvas = make("canvas.photo", { width: image.width, height: image.height, "aria-hidden": "true" });
  const pen = canvas.getContext("2d"), drawn = pen.createImageData(image.width, image.height);
  for (let i = 0; i < image.width * image.height; i++) drawn.data.set([...data.subarray(3 * i, 3 * i + 3), 255], 4 * i);
  pen.putImageData(drawn, 0, 0);
  return canvas;
}

/** Arrow keys over the grid, and over the tokens before the patches, which are one more line. */
const steps = (front, columns, count) => (key, at) => {
  const up = at < front ? null : at - columns >= front ? at - columns : front - 1;
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at < front ? front : at + columns, ArrowUp: up,
    Home: 0, End: count - 1 }[key];
  return next === undefined || next === null || next < 0 || next >= count ? null : next;
};

/** One side: the tokens that are no patches, then the image under a grid of buttons. */
function board(make, picture, view, side, image) {
  const { rows, columns, first } = picture.patches, seen = photo(make, image);
  const front = view.left[side].filter((at) => at < first).map((at) => tokenButton(make, view, side, at));
  const unkept = (at) => (side === "query" && !view.kept.has(at) ? ".unkept" : "");
  const cell = (at) => make(`button.token.patch.${side}${unkept(at)}`, { type: "button", "data-side": side, "data-at": at, "aria-pressed": "false",
    title: view.names[side][at] });
  const cells = Array.from({ length: rows * columns }, (_, i) => cell(first + i)), buttons = [...front, ...cells];
  const shape = image ? image.width / image.height : columns / rows;
  const grid = make("div.cells", { "--columns": columns, "--shape": shape }, seen, cells);
  const title = side === "query" ? "Patches that look" : "Patches that are looked at";
  const box = make(`div.board.${side}${seen ? ".seen" : ""}`, { role: "group", "aria-label": title },
    make("span.side", {}, side), make("div.front", {}, front), grid);
  roving(box, buttons, steps(front.length, columns, buttons.length));
  return { box, buttons, front, cells };
}

export function patches(make, picture, head, view, place, { image }) {
  const sides = { query: board(make, picture, view, "query", image), key: board(make, picture, view, "key", image) };
  const range = make("p.range");
  place.replaceChildren(make("div.boards", {}, sides.query.box, sides.key.box), range);
  const { first } = picture.patches;
  const clear = ({ front, cells }) => {
    for (const token of front) token.lastChild.textContent = "";
    for (const patch of cells) patch.removeAttribute("style"), patch.classList.remove("shaded");
  };
  return { buttons: { query: sides.query.buttons, key: sides.key.buttons }, draw(focus, weights) {
    const other = sides[focus?.side === "key" ? "query" : "key"];
    Object.values(sides).forEach(clear);
    for (const token of other.front) token.lastChild.textContent = written(weights.get(Number(token.dataset.at)) ?? 0, picture.digits);
    const of = (i) => weights.get(first + i) ?? 0, most = other.cells.reduce((largest, _, i) => Math.max(largest, of(i)), 0);
    other.cells.forEach((patch, i) => {
      const share = most ? of(i) / most : 0;
      patch.classList.add("shaded");
      for (const [name, value] of Object.entries({ ...shading(share), "--veil": 1 - Math.sqrt(share) })) patch.style.setProperty(name, value);
    });
    const what = image ? "Clear where the weight is" : "Dark where the weight is";
    range.textContent = `${what}, from 0 to ${written(most, picture.digits)}${focus ? "" : ", the mean over all rows"}.`;
  } };
}
