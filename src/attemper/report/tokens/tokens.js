// The attention of one head: point at a token to see where it looks, click to lock, hide what is special.

import { percent, plural, written } from "../data/numbers.js";
import { cut, isolated } from "../data/text.js";
import { labels, look, received, shares } from "../data/weights.js";
import { columns } from "./columns.js";
import { running } from "./running.js";
import { patches } from "./patches.js";
import { paint } from "./matrix.js";

const COLUMNS_UP_TO = 40; // more tokens than this read better as running text
const COLUMNS_MOST = 600; // more than this are always running text
const TOP = 5; // how many weights the sentence names
const AT_REST = "The mean over all rows. Point at a token to see where it looks, or use the arrow keys; a click or Enter locks it.";
const NOTHING = "No weights were kept for this layer and text, so there is nothing to draw; its signs were measured all the same.";

/** What is shown of a picture: names, which tokens are hidden, and which are left on each side. */
export function scene(picture, input, hide) {
  const names = labels(picture, input), hidden = { query: new Set(), key: new Set() };
  for (const side of ["query", "key"]) names.special[side].forEach((yes, i) => hide && yes && hidden[side].add(i));
  const left = (side, count) => Array.from({ length: count }, (_, i) => i).filter((i) => !hidden[side].has(i));
  const queries = left("query", picture.queries), rows = queries.filter((query) => picture.pairs(0, query));
  return { names: { query: names.queries, key: names.keys }, special: names.special, hidden, rows, kept: new Set(rows),
    left: { query: queries, key: left("key", picture.keys) } };
}

export const VIEWS = { image: patches, columns, text: running };

/** The views that suit a picture: the image for patches, columns for few tokens, and running text. */
function offered(picture) {
  const few = Math.max(picture.queries, picture.keys) <= COLUMNS_MOST;
  return [picture.patches ? "image" : null, few ? "columns" : null, "text"].filter(Boolean);
}

/** The view asked for, else the one that suits best. */
function chosenView(state, picture) {
  const views = offered(picture), text = Math.max(picture.queries, picture.keys) > COLUMNS_UP_TO;
  return views.includes(state.view) ? state.view : views.includes("image") ? "image" : text ? "text" : views[0];
}

/** What a token attends to, in words; also what is hidden or was not kept. */
export function sentence(make, picture, view, focus, weights, locked) {
  if (!focus) return [make("span.dim", {}, AT_REST)];
  const other = focus.side === "query" ? "key" : "query", hidden = view.hidden[other], rest = [];
  const name = make("b", {}, make("bdi", {}, view.names[focus.side][focus.at]));
  if (!weights) return [name, ": the weights of this row were not kept."];
  const seen = [...weights].filter(([i, weight]) => !hidden.has(i) && weight >= 0.5 * 10 ** -picture.digits);
  const names = view.names[other], twice = (i) => names.indexOf(names[i]) !== names.lastIndexOf(names[i]);
  const list = seen.sort((a, b) => b[1] - a[1]).slice(0, TOP).map(([i, weight]) => make("span.pair", {}, make("bdi", {}, names[i]),
    twice(i) ? make("sub.dim", { title: "its position" }, String(i)) : null, " ", make("span.num", {}, written(weight, picture.digits))));
  const share = shares(weights, hidden), query = focus.side === "query";
  if (query && hidden.size) rest.push(`${percent(share.hidden)} is on ${plural(hidden.size, "hidden special token")}.`);
  const beyond = query && picture.format === "top" && share.rest > 0.0005;
  if (beyond) rest.push(`${percent(share.rest)} is on keys beyond the ${picture.k} that were kept.`);
  if (locked) rest.push("Locked; Esc unlocks.");
  const verb = query ? " attends to " : " is attended to by ";
  return [name, verb, ...(list.length ? list : ["nothing shown. "]), make("span.dim", {}, rest.join(" "))];
}

/** Which text, which view, and whether special tokens are hidden. */
function chooser(make, scan, state, view, picture, act) {
  const shown = chosenView(state, picture), views = offered(picture), special = view.special.key.filter(Boolean).length, { inputs } = scan.document;
  const words = (input, i) => `${i + 1}: ${isolated(cut(input.text ?? input.modality, 60))}`;
  const option = (input, i) => make("option", { value: i, selected: i === state.input }, words(input, i));
  const pick = (event) => act.set({ input: Number(event.target.value), at: null });
  const tab = (name) => make("button.tab", { type: "button", "aria-pressed": String(name === shown),
    onclick: () => act.set({ view: name }) }, name);
  const box = make("input", { type: "checkbox", checked: state.hide, onchange: () => act.set({ hide: box.checked, at: null }) });
  return [
    inputs.length > 1 ? make("select", { "aria-label": "Which text", onchange: pick }, inputs.map(option)) : null,
    views.length > 1 ? make("span.tabs", { role: "group", "aria-label": "View" }, views.map(tab)) : null,
    special ? make("label.check", {}, box, ` hide ${plural(special, "special token")}`) : null,
  ].filter(Boolean);
}

/** Marks the token in focus and writes weights beside the others. */
function mark(now, state, focus, weights) {
  const other = focus?.side === "key" ? "query" : "key";
  for (const side of now.drawn.single ? ["query"] : ["query", "key"]) {
    for (const button of now.drawn.buttons[side]) {
      const at = Number(button.dataset.at), weight = side === other ? weights?.get(at) : undefined;
      button.setAttribute("aria-pressed", String(state.at?.side === side && state.at.at === at));
      button.classList.toggle("focus", focus?.side === side && focus.at === at);
      if (!now.drawn.numbers) continue; // the shading and the sentence show it
      button.lastChild.textContent = weight === undefined ? "" : written(weight, now.picture.digits);
      button.style.setProperty("--weight", weight ?? 0);
    }
  }
}

/** Tells `point` where the pointer or the focus is, and `lock` what was clicked: {side, at}, or null. */
function listen(place, canvas, rowAt, point, lock) {
  const token = (event) => {
    const found = event.target.closest?.("button.token");
    return found ? { side: found.dataset.side, at: Number(found.dataset.at) } : null;
  };
  for (const kind of ["pointerover", "focusin"]) place.addEventListener(kind, (event) => point(token(event)));
  place.addEventListener("pointerleave", () => point(null));
  place.addEventListener("focusout", (event) => place.contains(event.relatedTarget) || point(null));
  place.addEventListener("click", (event) => lock(token(event)));
  canvas.addEventListener("pointermove", (event) => point(rowAt(event)));
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("click", (event) => lock(rowAt(event)));
}

/** The section: controls, tokens, matrix and the sentence. */
export function tokensView(make, scan, act) {
  const title = make("h2"), controls = make("div.bar-of-controls"), place = make("div.place");
  const reading = make("p.reading", { "aria-live": "polite" }), canvas = make("canvas.matrix", { "aria-hidden": "true" });
  const cursor = make("i.cursor"), caption = make("figcaption");
  const figure = make("figure", {}, make("div.frame", {}, canvas, cursor), caption);
  const node = make("section.panel", { "aria-label": "Attention of the chosen head" }, controls, reading,
    make("div.attention", {}, place, figure));
  let now = null, hover = null, built = "";

  const highlight = (state) => {
    if (!now) return;
    const focus = state.at ?? hover, { picture, view } = now;
    const weights = focus ? look(picture, state.head, focus.side, focus.at) : received(picture, state.head);
    mark(now, state, focus, weights);
    now.drawn.draw(focus, weights ?? new Map());
    reading.replaceChildren(...sentence(make, picture, view, focus, weights, state.at !== null));
    const line = focus?.side === "query" ? view.rows.indexOf(focus.at) : -1;
    cursor.hidden = line < 0;
    cursor.style.setProperty("--top", (line + 0.5) / Math.max(1, view.rows.length));
  };
  const build = (state, theme) => {
    const row = scan.rows[state.layer], picture = row ? scan.album(row.layer, row.kind, state.input) : null;
    title.replaceChildren("Layer ", make("bdi", {}, row?.label ?? "–"), `, head ${state.head}`);
    figure.hidden = !picture;
    hover = now = null;
    controls.replaceChildren(title);
    place.replaceChildren();
    reading.textContent = NOTHING;
    if (!picture) return;
    const view = scene(picture, scan.document.inputs[state.input], state.hide);
    controls.append(...chooser(make, scan, state, view, picture, act));
    const draw = VIEWS[chosenView(state, picture)], image = scan.document.images.find((one) => one.input === state.input);
    now = { picture, view, drawn: draw(make, picture, state.head, view, place, { image }) };
    const largest = written(paint(canvas, picture, state.head, view.rows, view.left.key, theme), picture.digits);
    const part = view.rows.length < view.left.query.length ? `${view.rows.length} rows that were kept` : "The whole head";
    caption.textContent = `${part}: queries × keys, shaded by √weight; the largest is ${largest}.`;
  };
  const rowAt = (event) => {
    const box = canvas.getBoundingClientRect(), { rows } = now.view;
    const line = Math.floor(((event.clientY - box.top) / box.height) * rows.length);
    return { side: "query", at: rows[Math.min(rows.length - 1, Math.max(0, line))] };
  };
  const point = (next) => {
    if (next?.at === hover?.at && next?.side === hover?.side) return;
    hover = next;
    if (!act.state().at) highlight(act.state());
  };
  listen(place, canvas, rowAt, point, (at) => at && act.lock(at.side, at.at));
  return { node, show(state, theme) {
    const key = JSON.stringify([state.layer, state.head, state.input, state.hide, state.view, theme]);
    if (key !== built) build(state, theme);
    built = key;
    highlight(state);
  } };
}
