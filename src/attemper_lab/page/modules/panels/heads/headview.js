// One head: which token attends to which as arcs, the histogram of its logits, and its signs, at the true scale and re-tempered.

import { written } from "../../../report/data/numbers.js";
import { arcPaths, arcRoom } from "../../draw/arcs.js";
import { fitted } from "../../draw/fitted.js";
import { matrix } from "../../draw/matrix.js";
import { criticalSpread } from "../../maths/signs.js";
import { looks, viewOf } from "./looks.js";
import { pictured } from "./read.js";
import { ends, tempered } from "./temper.js";

const BINS = 44,
  TALL = 96,
  SIGNS_SHOWN = [
    ["std", "logit std", 2],
    ["peak", "peak logit", 1],
    ["entropy", "entropy, nats", 2],
    ["effective_keys", "effective keys", 1],
    ["top_weight", "top weight", 2],
    ["saturated", "saturated rows", 2],
    ["jacobian_trace", "1 − Σp²", 2],
  ];
const TOP = 4,
  MATRIX = 640; // the largest side of a matrix that is saved

/** The logits of a head counted into bins: the true ones and those at another scale, on one axis. */
function histogram(logits, times, [low, high], bins = BINS) {
  const counts = [new Float64Array(bins), new Float64Array(bins)],
    wide = (high - low) / bins;
  let most = 1,
    count = 0;
  for (const one of logits) {
    if (one === -Infinity) continue;
    count++;
    for (let k = 0; k < 2; k++) {
      const bin = Math.floor(((k ? times * one : one) - low) / wide);
      most = Math.max(most, ++counts[k][Math.min(bins - 1, Math.max(0, bin))]);
    }
  }
  return { counts, most, count };
}

/** The outline of bars. */
function outline(counts, most, width, tall) {
  const each = width / counts.length;
  let d = `M0 ${tall}`;
  counts.forEach((count, i) => {
    d += `V${(tall - (count / most) * (tall - 8)).toFixed(1)}h${each.toFixed(2)}`;
  });
  return `${d}V${tall}`;
}

/** The most that the normal curve reaches, in heights of the tallest bar. */
const crest = (std, share, [low, high]) => (share * ((high - low) / BINS)) / (std * Math.sqrt(2 * Math.PI));

/** The normal curve, scaled to the height of the bars. */
function curve(mean, std, share, [low, high], width) {
  const bin = (high - low) / BINS,
    points = Array.from({ length: 121 }, (_, i) => {
      const x = low + (i / 120) * (high - low),
        density = (share * bin * Math.exp(-0.5 * ((x - mean) / std) ** 2)) / (std * Math.sqrt(2 * Math.PI));
      return `${((i / 120) * width).toFixed(1)} ${(TALL - density * (TALL - 8)).toFixed(1)}`;
    });
  return `M${points.join("L")}`;
}

/** Round numbers between two ends. */
function ticks(low, high) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4].find((one) => (high - low) / one <= 6) ?? (high - low) / 4;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}

/** The tokens that a token attends to, in one sentence. */
function lookWords(names, weights, keys, token, hidden, name = names[token]) {
  const row = [...weights.subarray(token * keys, (token + 1) * keys)]
    .map((weight, j) => [names[j], weight, j])
    .filter(([, , j]) => !hidden.has(j))
    .sort((a, b) => b[1] - a[1]);
  const list = row
    .slice(0, TOP)
    .filter(([, weight], i) => !i || weight >= 0.005)
    .map(([name, weight]) => `${name} ${written(weight, 2)}`)
    .join(", ");
  return `${name} looks at ${list}${
    hidden.size
      ? `; ${written(
          [...hidden].reduce((sum, j) => sum + weights[token * keys + j], 0),
          2,
        )} of its weight is on hidden tokens`
      : ""
  }.`;
}

/** A view of one head. `act` has token(place | null) for the pointer and lockToken(place). */
export function headView(make, draw, act) {
  const title = make("h2"),
    button = make("button.plain", { type: "button", "data-control": "heads.pin" }),
    said = make("p.head-said", { "aria-live": "polite" });
  const svg = draw("svg.head-arcs", { role: "group", "aria-label": "Who looks at whom" }),
    chart = draw("svg.head-logits", { role: "img" });
  const table = make("table.head-signs"),
    caption = make("p.head-caption"),
    others = looks(make, { point: () => paint(), lock: (token) => act.lockToken(token) }),
    scroll = make("div.head-scroll", {}, svg);
  const node = make(
    "section.head-view",
    {},
    make("div.row.head-title", {}, title, button),
    scroll,
    others.nodes,
    said,
    make("div.head-numbers", {}, make("figure", {}, chart, caption), table),
  );
  let state = null,
    room = null,
    shownTokens = [],
    pointed = null;
  const arcs = draw("g.arcs"),
    line = draw("g.tokens", { role: "group", "aria-label": "Tokens" });
  svg.append(arcs, line);
  const tokenAt = (event) => {
    const found = event.target.closest?.("[data-token]");
    return found ? Number(found.dataset.token) : null;
  };
  for (const kind of ["pointerover", "pointerleave", "focusin", "focusout"]) {
    svg.addEventListener(kind, (event) => {
      pointed = kind === "pointerover" || kind === "focusin" ? tokenAt(event) : null;
      paint();
    });
  }
  svg.addEventListener("click", (event) => {
    const found = tokenAt(event);
    if (found !== null) act.lockToken(found);
  });
  svg.addEventListener("keydown", (event) => {
    const here = tokenAt(event),
      at = shownTokens.indexOf(here);
    if (here === null) return;
    if (event.key === "Enter" || event.key === " ") act.lockToken(here);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shownTokens.length - 1 }[event.key];
    if (next === undefined && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    line.children[next]?.focus();
  });

  /** Draw the line of tokens, for a text, a width and the tokens that are left. */
  function tokens(names, special, width) {
    room = arcRoom(shownTokens.length, width);
    for (const [name, size] of [
      ["viewBox", `0 0 ${room.width} ${room.height}`],
      ["width", room.width],
      ["height", room.height],
    ])
      svg.setAttribute(name, size);
    line.replaceChildren(
      ...shownTokens.map((token, at) => {
        const x = (at + 0.5) * room.apart,
          y = room.above + room.words / 2,
          word = fitted(names[token], room.turned ? 58 : room.apart - 2, 11);
        const text = draw(
          "text",
          room.turned
            ? { transform: `translate(${x + 4} ${room.above + room.words - 4}) rotate(-90)`, "text-anchor": "start" }
            : { x, y: y + 4, "text-anchor": "middle" },
          word,
        );
        return draw(
          `g.token-spot${special(token) ? ".special" : ""}`,
          { "data-token": token, tabindex: at ? "-1" : "0", role: "button", "aria-pressed": "false", "aria-label": names[token] },
          draw("rect", { x: x - room.apart / 2 + 1, y: room.above + 1, width: room.apart - 2, height: room.words - 2, rx: 4 }),
          text,
          draw("circle.self", { cx: x, cy: room.above - 3, r: 0 }),
        );
      }),
    );
  }
  /** The arcs of all tokens, or of the one that is pointed at. */
  function paint() {
    if (!state) return;
    scroll.hidden = state.view !== "arcs";
    const other = others.show(state.view, state.picture, state.scene, state.token, state.theme);
    if (other) {
      const name = state.scene.names.query[other.query];
      said.textContent = other.words ?? lookWords(state.names, state.weights, state.keys, other.query, state.hidden, name);
      return;
    }
    const { weights, keys, names } = state,
      one = pointed ?? (shownTokens.includes(state.token) ? state.token : null);
    const slim = Math.min(1, room.apart / 30); // many tokens, thin arcs
    const pairs = { out: [], in: [], all: [] },
      spots = new Map(shownTokens.map((token, at) => [token, at]));
    for (const query of shownTokens) {
      for (const key of shownTokens) {
        const weight = weights[query * keys + key];
        if (one === null) pairs.all.push([spots.get(query), spots.get(key), weight]);
        else if (query === one) pairs.out.push([spots.get(query), spots.get(key), weight]);
        else if (key === one) pairs.in.push([spots.get(query), spots.get(key), weight]);
      }
    }
    arcs.replaceChildren(
      ...Object.entries(pairs).flatMap(([kind, some]) =>
        arcPaths(some, room).map(({ d, strength }) =>
          draw(`path.arc.${kind}`, {
            d,
            "stroke-width": ((0.75 + 6 * strength) * slim).toFixed(2),
            "stroke-opacity": (0.12 + 0.8 * strength).toFixed(2),
          }),
        ),
      ),
    );
    [...line.children].forEach((spot) => {
      const token = Number(spot.dataset.token),
        own = weights[token * keys + token],
        from = one === null ? 0 : weights[one * keys + token];
      spot.classList.toggle("on", token === one);
      spot.setAttribute("aria-pressed", String(token === state.token));
      spot.style.setProperty("--taken", from.toFixed(3));
      spot.querySelector(".self").setAttribute("r", (one === null || token === one ? 5 * Math.sqrt(own) : 0).toFixed(2));
    });
    said.textContent =
      one === null
        ? "Arcs above the words look back, below ahead; dots look at themselves. Point at a word."
        : lookWords(names, weights, keys, one, state.hidden);
  }
  function chartOf(logits, times, shared, keys, predicted) {
    const width = 300,
      [low, high] = shared,
      { counts, most: tallest, count } = histogram(logits, times, shared),
      most = predicted ? Math.max(tallest, tallest * crest(predicted * times, count / tallest, shared)) : tallest, // the curve is not cut
      at = (number) => ((number - low) / (high - low)) * width;
    chart.setAttribute("viewBox", `-6 0 ${width + 12} ${TALL + 34}`);
    const marks = ticks(low, high).map((tick) => [
      draw("path.tick", { d: `M${at(tick)} ${TALL}v4` }),
      draw("text", { x: at(tick), y: TALL + 16, "text-anchor": "middle" }, written(tick, 0)),
    ]);
    chart.replaceChildren(
      draw("path.now", { d: outline(counts[1], most, width, TALL) }),
      draw("path.true", { d: outline(counts[0], most, width, TALL) }),
      predicted ? draw("path.theory", { d: curve(state.signs.mean, predicted * times, count / most, shared, width) }) : "",
      draw("path.axis", { d: `M0 ${TALL}H${width}` }),
      ...marks.flat(),
      draw("text", { x: width / 2, y: TALL + 31, "text-anchor": "middle" }, "logit"),
    );
    const std = Math.sqrt(state.signs.variance);
    caption.textContent =
      `Logits: outline at the true scale, filled now${predicted ? ", dashed: this layer's q and k in random directions" : ""}. ` +
      `Their std is ${written(std, 2)}; ` +
      `above √(2 ln ${keys}) = ${written(criticalSpread(keys), 2)} a few of ${keys} random keys would have nearly all the weight.`;
  }
  function numbers(before, after, times) {
    const own = (signs) => ({ ...signs, std: Math.sqrt(signs.variance) }),
      [one, two] = [own(before), own(after)];
    const head = make(
      "tr",
      {},
      make("td", {}),
      make("th", { scope: "col" }, "true scale"),
      make("th", { scope: "col" }, `× ${written(times, 2)}`),
    );
    table.replaceChildren(
      make("caption.unseen", {}, "Signs of this head"),
      make("thead", {}, head),
      make(
        "tbody",
        {},
        SIGNS_SHOWN.map(([key, label, digits]) =>
          make(
            "tr",
            {},
            make("th", { scope: "row" }, label),
            make("td", {}, written(one[key], digits)),
            make("td.now", {}, written(two[key], digits)),
          ),
        ),
      ),
    );
  }
  /** The head as a picture that stands alone: its arcs, or its matrix. */
  function drawnAlone(standalone, theme) {
    if (!state || state.view === "arcs") return standalone(svg);
    const { query, key } = state.scene.left,
      side = Math.min(MATRIX, 12 * Math.max(query.length, key.length)),
      [width, height] = [side, Math.max(12, Math.round((side * query.length) / key.length))];
    const shares = query.flatMap((i) => key.map((j) => state.weights[i * state.keys + j])),
      most = shares.reduce((a, b) => Math.max(a, b), 1e-9);
    const cells = matrix(
      draw,
      theme,
      { rows: query.length, columns: key.length, shares: shares.map((one) => one / most) },
      { x: 0, y: 0, width, height },
    );
    const about = { viewBox: `0 0 ${width} ${height}`, width, height, "aria-label": svg.getAttribute("aria-label") },
      alone = draw("svg", { xmlns: "http://www.w3.org/2000/svg", ...about }, cells);
    return new XMLSerializer().serializeToString(alone);
  }
  return {
    node,
    svg,
    chart,
    drawn: drawnAlone,
    /** Draw a head: `{text, layer, head, times, hide, token, view, theme, pinned, shared}`; `shared` are the ends of the histogram. */
    show({ text, layer, head, times, hide, token, view, theme, pinned, shared, width }) {
      const about = text.layers[layer],
        logits = text.logits(layer, head);
      title.textContent = `Layer ${about.label}, head ${head}`;
      svg.setAttribute("aria-label", `${title.textContent}: who looks at whom`);
      chart.setAttribute("aria-label", `${title.textContent}: histogram of its logits`);
      button.textContent = pinned ? "Unpin" : "Pin";
      button.setAttribute("aria-label", `${pinned ? "Unpin" : "Pin, to compare with another,"} layer ${about.label}, head ${head}`);
      button.onclick = () => act.pin([layer, head]);
      node.classList.toggle("waiting", !logits);
      if (!logits) return null;
      const names = text.names(layer, "keys"),
        special = (i) => text.isSpecial(layer, i),
        count = about.kind === "cross" ? 0 : Math.min(about.queries, about.keys); // cross-attention has two lines of tokens
      const line = Array.from({ length: count }, (_, i) => i),
        hidden = new Set(hide ? line.filter(special) : []);
      const left = line.filter((i) => !hidden.has(i)),
        key = `${text.text} ${left.length} ${count} ${width}`;
      const now = tempered(logits, about.queries, about.keys, times),
        before = times === 1 ? now : tempered(logits, about.queries, about.keys, 1);
      if (state?.key !== key) {
        shownTokens = left;
        tokens(names, special, width);
      }
      const all = (side) => Array.from({ length: about[side] }, (_, i) => i),
        queries = about.kind === "cross" ? all("queries") : all("queries").filter((i) => !hidden.has(i)),
        marks = about.kind === "cross" ? [] : line.map(special);
      const scene = {
        key: `${key} ${about.kind} ${about.queries} ${about.keys}`,
        weights: now.weights,
        names: { query: text.names(layer, "queries"), key: names },
        special: { query: marks, key: marks },
        left: { query: queries, key: all("keys").filter((i) => !hidden.has(i)) },
        kept: new Set(all("queries")),
      };
      const picture = pictured(about, () => now.weights);
      state = { key, weights: now.weights, signs: now.signs, keys: about.keys, names, token, hidden, view: viewOf(view, about), theme, scene, picture };
      paint();
      chartOf(logits, times, shared ?? endsOf(logits, times), about.keys, about.about?.scale.predicted_std);
      numbers(before.signs, now.signs, times);
      return { ...now, before: before.signs };
    },
    words: () => (state ? shownTokens.map((token) => lookWords(state.names, state.weights, state.keys, token, state.hidden)) : []),
  };
}

/** The ends of a histogram that has the true logits and those at another scale. */
export function endsOf(logits, times) {
  const [low, high] = ends(logits),
    all = [low, high, times * low, times * high],
    least = Math.min(...all),
    most = Math.max(...all),
    pad = 0.04 * (most - least) || 1;
  return [least - pad, most + pad];
}
