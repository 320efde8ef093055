// Running text, each token shaded by its weight: hundreds of tokens do not fit two columns.

import { shading, written } from "../data/numbers.js";
import { tokenList } from "./columns.js";

const UNSHADED = 0.0005; // smaller weights are not shaded

export function running(make, picture, head, view, place) {
  // self-attention shows each token once; else the queries stand above the keys
  const single = picture.kind !== "cross" && picture.queries === picture.keys;
  const arrows = ["ArrowLeft", "ArrowRight"], queries = tokenList(make, view, "query", "running", arrows);
  const keys = single ? queries : tokenList(make, view, "key", "running", arrows), range = make("p.range");
  place.replaceChildren(...new Set([queries.box, keys.box]), range);
  const named = (side, { buttons }) => new Map(view.left[side].map((i, at) => [i, buttons[at]]));
  const node = { query: named("query", queries), key: named("key", keys) };
  let shaded = [];
  return { single, buttons: { query: queries.buttons, key: keys.buttons }, draw(focus, weights) {
    const there = node[focus?.side === "key" ? "query" : "key"];
    const seen = [...weights].filter(([i, weight]) => there.has(i) && weight > UNSHADED);
    const most = Math.max(0, ...seen.map(([, weight]) => weight));
    range.textContent = `Shaded from 0 to ${written(most, picture.digits)}${focus ? "" : ", the mean over all rows"}.`;
    for (const one of shaded) one.classList.remove("shaded");
    shaded = seen.map(([i]) => there.get(i));
    for (const [i, weight] of seen) {
      for (const [name, colour] of Object.entries(shading(weight / most))) there.get(i).style.setProperty(name, colour);
      there.get(i).classList.add("shaded");
    }
  } };
}
