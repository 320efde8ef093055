// Two columns of tokens with ribbons between them: queries on the left, keys on the right.

import { roving } from "../views/dom.js";

export const ROW = 26; // height of a token, as in the style sheet
const FAINT = 0.03; // with no token in focus, smaller weights draw no ribbon
const LEAST = 0.002; // with a token in focus, smaller weights draw none

/** A token as a button; its weight goes into the last child. */
export function tokenButton(make, view, side, at) {
  const name = view.names[side][at], unkept = side === "query" && !view.kept.has(at);
  const kind = `button.token.${side}${view.special[side][at] ? ".special" : ""}${unkept ? ".unkept" : ""}`;
  return make(kind, { type: "button", "data-side": side, "data-at": at, title: name, "aria-pressed": "false" },
    make("bdi", {}, name), make("i.gauge"), make("span.weight"));
}

/** All the tokens of a side, one stop for Tab. `keys` names the arrow keys that go back and forth. */
export function tokenList(make, view, side, kind, [back, forth]) {
  const buttons = view.left[side].map((at) => tokenButton(make, view, side, at));
  const title = side === "query" ? "Queries: the tokens that look" : "Keys: the tokens that are looked at";
  const box = make(`div.${kind}.${side}`, { role: "group", "aria-label": title }, buttons);
  const step = (key, i) => ({ [forth]: i + 1, [back]: i - 1, Home: 0, End: buttons.length - 1 })[key] ?? null;
  roving(box, buttons, step);
  return { box, buttons };
}

/** One ribbon from row a on the left to row b on the right. */
function ribbon(make, a, b, weight, width) {
  const [from, to] = [(a + 0.5) * ROW, (b + 0.5) * ROW];
  return make("path", { d: `M0 ${from} C50 ${from} 50 ${to} 100 ${to}`, "stroke-width": Math.max(0.75, width * weight),
    "stroke-opacity": 0.25 + 0.65 * weight });
}

export function columns(make, picture, head, view, place) {
  const arrows = ["ArrowUp", "ArrowDown"];
  const left = tokenList(make, view, "query", "tokens", arrows), right = tokenList(make, view, "key", "tokens", arrows);
  const height = ROW * Math.max(left.buttons.length, right.buttons.length);
  const drawing = make("svg.ribbons", { viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", height, "aria-hidden": "true" });
  place.replaceChildren(make("div.columns", {}, make("span.side", {}, "query"), make("span"), make("span.side", {}, "key"),
    left.box, drawing, right.box));
  const places = (side) => new Map(view.left[side].map((i, at) => [i, at])), row = { query: places("query"), key: places("key") };
  const draw = (query, key, weight, width, least) => weight >= least && row.query.has(query) && row.key.has(key)
    ? [ribbon(make, row.query.get(query), row.key.get(key), weight, width)] : [];
  const ofRow = (query) => (picture.pairs(head, query) ?? []).flatMap(([key, weight]) => draw(query, key, weight, 5, FAINT));
  const from = (focus, weights) => [...weights].flatMap(([other, w]) => (focus.side === "query"
    ? draw(focus.at, other, w, 16, LEAST) : draw(other, focus.at, w, 16, LEAST)));
  return { numbers: true, buttons: { query: left.buttons, key: right.buttons }, draw(focus, weights) {
    drawing.setAttribute("class", `ribbons ${focus ? `from-${focus.side}` : "at-rest"}`);
    drawing.replaceChildren(...(focus ? from(focus, weights) : view.left.query.flatMap(ofRow)));
  } };
}
