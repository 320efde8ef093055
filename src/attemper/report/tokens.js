// The attention of one head: point at a token to see where it looks, click to lock, hide what is special.

import { percent, plural, shade, shading, written } from "./numbers.js";
import { labels, look, received, shares } from "./weights.js";
import { roving } from "./dom.js";

export const ROW = 26; // height of a token in the columns, as in the style sheet
export const COLUMNS_UP_TO = 40; // more tokens than this read better as running text
const PIXELS = 512; // the matrix is drawn no larger
const FAINT = 0.03; // weights below this draw no ribbon while nothing is pointed at

/** One ribbon from the middle of row a on the left to that of row b on the right. */
const ribbon = (make, a, b, weight, width) => make("path", { d: `M0 ${(a + 0.5) * ROW} C50 ${(a + 0.5) * ROW} 50 ${(b + 0.5) * ROW} 100 ${(b + 0.5) * ROW}`,
  "stroke-width": Math.max(0.75, width * weight), "stroke-opacity": 0.25 + 0.65 * weight });

function button(make, side, index, name, special) {
  return make(`button.token.${side}${special ? ".special" : ""}`, { type: "button", "data-side": side, "data-at": index, title: name,
    "aria-pressed": "false" }, make("bdi", {}, name), make("i.gauge"), make("span.weight"));
}

/** What is shown of a picture: names, which tokens are hidden, and which are left on each side. */
function scene(picture, input, hide) {
  const names = labels(picture, input);
  const kept = (side, count) => Array.from({ length: count }, (_, i) => i).filter((i) => !(hide && names.special[side][i]));
  const hidden = { query: new Set(), key: new Set() };
  for (const side of ["query", "key"]) names.special[side].forEach((yes, i) => hide && yes && hidden[side].add(i));
  return { names: { query: names.queries, key: names.keys }, special: names.special, hidden,
    left: { query: kept("query", picture.queries), key: kept("key", picture.keys) } };
}

/** Two columns of tokens with ribbons between them: queries on the left, keys on the right. */
function columns(make, picture, head, view, place) {
  const list = (side, title) => {
    const buttons = view.left[side].map((i) => button(make, side, i, view.names[side][i], view.special[side][i]));
    const box = make(`div.tokens.${side}`, { role: "group", "aria-label": title }, buttons);
    roving(box, buttons, (key, i) => ({ ArrowDown: i + 1, ArrowUp: i - 1, Home: 0, End: buttons.length - 1 }[key] ?? null));
    return { box, buttons };
  };
  const left = list("query", "Queries: the tokens that look"), right = list("key", "Keys: the tokens that are looked at");
  const height = ROW * Math.max(left.buttons.length, right.buttons.length);
  const drawing = make("svg.ribbons", { viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", height, "aria-hidden": "true" });
  const row = { query: new Map(view.left.query.map((i, at) => [i, at])), key: new Map(view.left.key.map((i, at) => [i, at])) };
  const lines = (side, at, weights, width, least) => [...weights].filter(([other, w]) => w >= least && row[side === "query" ? "key" : "query"].has(other))
    .map(([other, w]) => (side === "query" ? ribbon(make, row.query.get(at), row.key.get(other), w, width) : ribbon(make, row.query.get(other), row.key.get(at), w, width)));
  place.replaceChildren(make("div.columns", {}, make("span.side", {}, "query"), make("span"), make("span.side", {}, "key"), left.box, drawing, right.box));
  const rest = () => view.left.query.flatMap((at) => lines("query", at, picture.pairs(head, at) ?? [], 5, FAINT));
  return { buttons: { query: left.buttons, key: right.buttons }, draw(focus, weights) {
    drawing.setAttribute("class", `ribbons ${focus ? `from-${focus.side}` : "at-rest"}`);
    drawing.replaceChildren(...(focus ? lines(focus.side, focus.at, weights, 16, 0.002) : rest()));
  } };
}

/** Running text, shaded by the weight a token gets. Self-attention shows each token once; else queries stand above keys. */
function text(make, picture, head, view, place) {
  const single = picture.kind !== "cross" && picture.queries === picture.keys;
  const list = (side, title) => {
    const buttons = view.left[side].map((i) => button(make, side, i, view.names[side][i], view.special[side][i]));
    const box = make(`div.running.${side}`, { role: "group", "aria-label": title }, buttons);
    roving(box, buttons, (key, i) => ({ ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: buttons.length - 1 }[key] ?? null));
    return { box, buttons };
  };
  const queries = list("query", "Queries: the tokens that look"), keys = single ? queries : list("key", "Keys: the tokens that are looked at");
  const range = make("p.range");
  place.replaceChildren(...new Set([queries.box, keys.box]), range);
  const by = (side) => new Map(view.left[side].map((i, at) => [i, (side === "query" ? queries : keys).buttons[at]]));
  const nodes = { query: by("query"), key: by("key") };
  let shaded = [];
  return { single, buttons: { query: queries.buttons, key: keys.buttons }, draw(focus, weights) {
    const there = nodes[focus?.side === "key" ? "query" : "key"], shown = [...weights].filter(([i, w]) => there.has(i) && w > 0.001);
    const most = Math.max(0, ...shown.map(([, w]) => w));
    range.textContent = `Shaded from 0 to ${written(most, picture.digits)}${focus ? "" : ", the mean over all rows"}.`;
    for (const one of shaded) one.classList.remove("shaded");
    shaded = shown.map(([i, w]) => {
      for (const [name, colour] of Object.entries(shading(w / most))) there.get(i).style.setProperty(name, colour);
      there.get(i).classList.add("shaded");
      return there.get(i);
    });
  } };
}

/** The whole matrix of the head as a small picture; long inputs are pooled by their largest weight. */
function paint(canvas, picture, head, view, theme) {
  const size = { query: Math.min(PIXELS, view.left.query.length), key: Math.min(PIXELS, view.left.key.length) };
  canvas.width = Math.max(1, size.key);
  canvas.height = Math.max(1, size.query);
  const image = canvas.getContext("2d").createImageData(canvas.width, canvas.height), most = new Float32Array(canvas.width * canvas.height);
  const column = new Map(view.left.key.map((i, at) => [i, Math.floor((at * size.key) / view.left.key.length)]));
  view.left.query.forEach((query, at) => {
    const line = Math.floor((at * size.query) / view.left.query.length) * canvas.width;
    for (const [key, weight] of picture.pairs(head, query) ?? []) {
      if (column.has(key)) most[line + column.get(key)] = Math.max(most[line + column.get(key)], weight);
    }
  });
  const largest = most.reduce((a, b) => Math.max(a, b), 1e-9);
  const colours = Array.from({ length: 256 }, (_, i) => shade(theme, i / 255).rgb);
  most.forEach((weight, i) => image.data.set([...colours[Math.round(255 * Math.sqrt(weight / largest))], 255], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return largest;
}

/** What a token looks at, in words and numbers; what is hidden or was not kept is said. */
export function sentence(make, picture, view, focus, weights, locked) {
  if (!focus) return [make("span.dim", {}, "Mean over all rows. Point at a token to see where it looks, or use the arrow keys; a click or Enter locks it.")];
  const other = focus.side === "query" ? "key" : "query", hidden = view.hidden[other];
  const name = make("b", {}, make("bdi", {}, view.names[focus.side][focus.at]));
  if (!weights) return [name, ": the weights of this row were not kept."];
  const top = [...weights].filter(([i, w]) => !hidden.has(i) && w >= 0.5 * 10 ** -picture.digits).sort((a, b) => b[1] - a[1]).slice(0, 5);
  const list = top.map(([i, w]) => make("span.pair", {}, make("bdi", {}, view.names[other][i]), " ", make("span.num", {}, written(w, picture.digits))));
  const share = shares(weights, hidden), rest = [];
  if (focus.side === "query" && hidden.size) rest.push(`${percent(share.hidden)} is on ${plural(hidden.size, "hidden special token")}.`);
  if (focus.side === "query" && picture.format === "top" && share.rest > 0.0005) rest.push(`${percent(share.rest)} is on keys beyond the ${picture.k} that were kept.`);
  return [name, focus.side === "query" ? " looks at " : " is looked at by ", list, rest.length ? make("span.dim", {}, rest.join(" ")) : null,
    locked ? make("span.dim", {}, " Locked; Esc lets go.") : null];
}

/** The section: controls, tokens, matrix and the sentence. */
export function tokensView(make, scan, act) {
  const title = make("h2"), controls = make("div.bar-of-controls"), place = make("div.place"), reading = make("p.reading", { "aria-live": "polite" });
  const canvas = make("canvas.matrix", { "aria-hidden": "true" }), cursor = make("i.cursor");
  const figure = make("figure", {}, make("div.frame", {}, canvas, cursor), make("figcaption", {}, ""));
  const node = make("section.panel", { "aria-label": "Attention of the chosen head" }, controls, reading, make("div.attention", {}, place, figure));
  let now = null, hover = null, built = "";

  const highlight = (state) => {
    if (!now) return;
    const focus = state.at ?? hover, weights = focus ? look(now.picture, state.head, focus.side, focus.at) : received(now.picture, state.head);
    const other = focus?.side === "key" ? "query" : "key";
    for (const side of ["query", "key"]) {
      if (now.drawn.single && side === "key") continue; // each token is there once
      now.drawn.buttons[side].forEach((one) => {
        const at = Number(one.dataset.at), weight = side === other ? weights?.get(at) : undefined;
        one.setAttribute("aria-pressed", String(state.at?.side === side && state.at.at === at));
        one.classList.toggle("focus", focus?.side === side && focus.at === at);
        if (now.plain) return; // shading says it, and the sentence
        one.lastChild.textContent = weight === undefined ? "" : written(weight, now.picture.digits);
        one.style.setProperty("--weight", weight ?? 0);
      });
    }
    now.drawn.draw(focus, weights ?? new Map());
    reading.replaceChildren(...sentence(make, now.picture, now.view, focus, weights, state.at !== null).flat().filter(Boolean));
    const line = focus?.side === "query" ? now.view.left.query.indexOf(focus.at) : -1;
    cursor.hidden = line < 0;
    cursor.style.setProperty("--top", (line + 0.5) / Math.max(1, now.view.left.query.length));
  };

  const over = (event) => {
    const found = event.target.closest?.("button.token");
    const next = found ? { side: found.dataset.side, at: Number(found.dataset.at) } : null;
    if (next?.at === hover?.at && next?.side === hover?.side) return;
    hover = next;
    if (!act.state().at) highlight(act.state());
  };
  const inMatrix = (event) => {
    const box = canvas.getBoundingClientRect(), left = now.view.left.query;
    return { side: "query", at: left[Math.min(left.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * left.length)))] };
  };
  for (const kind of ["pointerover", "focusin"]) place.addEventListener(kind, over);
  place.addEventListener("pointerleave", () => over({ target: {} }));
  place.addEventListener("focusout", (event) => place.contains(event.relatedTarget) || over({ target: {} }));
  place.addEventListener("click", (event) => {
    const found = event.target.closest("button.token");
    if (found) act.lock(found.dataset.side, Number(found.dataset.at));
  });
  canvas.addEventListener("pointermove", (event) => { hover = inMatrix(event); if (!act.state().at) highlight(act.state()); });
  canvas.addEventListener("pointerleave", () => { hover = null; highlight(act.state()); });
  canvas.addEventListener("click", (event) => { const at = inMatrix(event); act.lock(at.side, at.at); });

  return { node, show(state, theme) {
    const row = scan.rows[state.layer], key = JSON.stringify([state.layer, state.head, state.input, state.hide, state.view, theme]);
    if (key !== built) {
      built = key;
      const picture = row ? scan.album(row.layer, row.kind, state.input) : null, input = scan.document.inputs[state.input];
      title.replaceChildren("Layer ", make("bdi", {}, row?.label ?? "–"), `, head ${state.head}`);
      const view = picture && scene(picture, input, state.hide);
      controls.replaceChildren(title, ...(picture ? chooser(make, scan, state, view, picture, act) : []));
      figure.hidden = !picture;
      now = null;
      if (!picture) {
        place.replaceChildren();
        reading.textContent = "No weights were kept for this layer and text, so there is nothing to draw; its signs were measured all the same.";
        return;
      }
      const plain = asText(state, picture);
      now = { picture, view, plain, drawn: (plain ? text : columns)(make, picture, state.head, view, place) };
      const largest = paint(canvas, picture, state.head, view, theme);
      figure.lastChild.textContent = `The whole head: queries × keys, shaded by √weight; the largest is ${written(largest, picture.digits)}.`;
    }
    highlight(state);
  } };
}

const asText = (state, picture) => (state.view ?? (Math.max(picture.queries, picture.keys) > COLUMNS_UP_TO ? "text" : "columns")) === "text";

/** Which text, which view, and whether special tokens are hidden. */
function chooser(make, scan, state, view, picture, act) {
  const plain = asText(state, picture), special = view.special.key.filter(Boolean).length, inputs = scan.document.inputs;
  const pick = make("select", { "aria-label": "Which text", onchange: (event) => act.set({ input: Number(event.target.value), at: null }) },
    inputs.map((input, i) => make("option", { value: i, selected: i === state.input }, `${i + 1}: ${(input.text ?? input.kind).slice(0, 60)}`)));
  const tab = (name, words) => make("button.tab", { type: "button", "aria-pressed": String((name === "text") === plain), onclick: () => act.set({ view: name }) }, words);
  return [inputs.length > 1 ? pick : null, make("span.tabs", { role: "group", "aria-label": "View" }, tab("columns", "columns"), tab("text", "text")),
    special ? make("label.check", {}, make("input", { type: "checkbox", checked: state.hide, onchange: (event) => act.set({ hide: event.target.checked, at: null }) }),
      ` hide ${plural(special, "special token")}`) : null].filter(Boolean);
}
