// A head's weights as two columns of tokens with ribbons between them, as in the report; and as a matrix, where arcs would be a thicket.

import { written } from "../../../report/data/numbers.js";
import { look } from "../../../report/data/weights.js";
import { columns } from "../../../report/tokens/columns.js";
import { paint } from "../../../report/tokens/matrix.js";

const ARCS_UP_TO = 48, // tokens
  TOP = 4; // tokens that a sentence names
export const VIEWS = ["arcs", "columns", "matrix"];
const AT_REST = {
  columns: "Ribbons lead from a query, on the left, to the keys that it looks at. Point at a token.",
  matrix: "A row for each query, a column for each key, shaded by √weight. Point at a row.",
};

/** The view that was asked for, or the one that suits: arcs need one line of tokens that is not too long. */
export function viewOf(asked, { kind, queries, keys }) {
  const line = kind !== "cross" && Math.max(queries, keys) <= ARCS_UP_TO;
  return VIEWS.includes(asked) && (asked !== "arcs" || kind !== "cross") ? asked : line ? "arcs" : "matrix";
}

/** Who looks at a key, in one sentence. */
function seenBy(names, key, weights) {
  const list = [...weights]
    .sort((a, b) => b[1] - a[1])
    .slice(0, TOP)
    .filter(([, weight], i) => !i || weight >= 0.005);
  return `${names.key[key]} is looked at by ${list.map(([query, weight]) => `${names.query[query]} ${written(weight, 2)}`).join(", ")}.`;
}

/** The two views: `point()` is called where another token is pointed at, `lock(query)` where one is pressed. */
export function looks(make, { point, lock }) {
  const place = make("div.head-columns"),
    canvas = make("canvas", { "aria-hidden": "true" }),
    cursor = make("i.cursor");
  const frame = make(
    "div.head-matrix",
    { tabindex: "0", role: "group", "aria-label": "Matrix of weights: a row for each query. Arrow keys choose a row, Enter keeps it." },
    canvas,
    cursor,
  );
  let pointed = null, // {side, at}
    drawn = null,
    built = "",
    painted = [],
    rows = [];
  const aim = (next) => {
    if (next?.side === pointed?.side && next?.at === pointed?.at) return;
    pointed = next;
    point();
  };
  const tokenAt = (event) => {
    const found = event.target.closest?.("button.token");
    return found ? { side: found.dataset.side, at: Number(found.dataset.at) } : null;
  };
  const rowAt = (event) => {
    const box = canvas.getBoundingClientRect(),
      line = Math.floor(((event.clientY - box.top) / box.height) * rows.length);
    return { side: "query", at: rows[Math.min(rows.length - 1, Math.max(0, line))] };
  };
  for (const kind of ["pointerover", "focusin"]) place.addEventListener(kind, (event) => aim(tokenAt(event)));
  place.addEventListener("click", (event) => {
    const found = tokenAt(event);
    if (found?.side === "query") lock(found.at);
  });
  canvas.addEventListener("pointermove", (event) => aim(rowAt(event)));
  canvas.addEventListener("click", (event) => lock(rowAt(event).at));
  for (const node of [place, frame]) {
    node.addEventListener("pointerleave", () => aim(null));
    node.addEventListener("focusout", (event) => node.contains(event.relatedTarget) || aim(null));
  }
  frame.addEventListener("keydown", (event) => {
    const at = rows.indexOf(pointed?.at),
      next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "Enter" && at >= 0) lock(pointed.at);
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (rows.length) aim({ side: "query", at: rows[Math.min(rows.length - 1, Math.max(0, next))] });
  });
  /** Weights beside the tokens of the other column, and which one is meant. */
  function mark(focus, weights, token) {
    for (const side of ["query", "key"]) {
      for (const button of drawn.buttons[side]) {
        const at = Number(button.dataset.at),
          weight = focus && side !== focus.side ? weights.get(at) : undefined;
        button.setAttribute("aria-pressed", String(side === "query" && at === token));
        button.classList.toggle("focus", focus?.side === side && focus.at === at);
        button.lastChild.textContent = weight === undefined ? "" : written(weight, 2);
        button.style.setProperty("--weight", weight ?? 0);
      }
    }
  }
  return {
    nodes: [place, frame],
    /** Draw `scene`, `{key, weights, names, special, left, kept}` much as the report has it. Gives `{words}`, or the `query` in focus. */
    show(view, picture, scene, token, theme) {
      place.hidden = view !== "columns";
      frame.hidden = view !== "matrix";
      if (view === "arcs") return null;
      const kept = token >= 0 && scene.left.query.includes(token) ? { side: "query", at: token } : null,
        focus = pointed && scene.left[pointed.side].includes(pointed.at) ? pointed : kept,
        weights = focus ? look(picture, 0, focus.side, focus.at) : new Map();
      rows = scene.left.query;
      if (view === "columns") {
        if (built !== scene.key) drawn = columns(make, picture, 0, scene, place);
        built = scene.key;
        drawn.draw(focus, weights);
        mark(focus, weights, token);
      } else {
        const wanted = [scene.key, scene.weights, theme];
        if (wanted.some((one, i) => one !== painted[i])) paint(canvas, picture, 0, rows, scene.left.key, theme);
        painted = wanted;
        cursor.hidden = focus?.side !== "query";
        cursor.style.setProperty("--top", (rows.indexOf(focus?.at) + 0.5) / rows.length);
      }
      if (!focus) return { words: AT_REST[view] };
      return focus.side === "query" ? { query: focus.at } : { words: seenBy(scene.names, focus.at, weights) };
    },
  };
}
