// Real heads, re-tempered: the map of a model's heads, any of them with a slider on its true scale, two side by side.

import { written } from "../../../report/data/numbers.js";
import { cut } from "../../../report/data/text.js";
import { standalone } from "../../draw/svg.js";
import { sentenceForm } from "../../shell/field.js";
import { endsOf, headView } from "./headview.js";
import { headMap } from "./map.js";
import { placeOf, readText, signsOf } from "./read.js";
import { audited } from "./audit.js";
import { VIEWS, viewOf } from "./looks.js";
import { headsPython, headsText, mapPicture } from "./words.js";

const FIRST = "The dog chased the ball because it was fast.",
  SENTENCES = [FIRST, "Love Apple phones"],
  LONGEST = 1000, // characters, as the server takes them
  FAR = 5; // powers of two of the slider

/** Texts of the page and of the server: `find(words)` gives one, null while it is on its way, or an error. */
function texts(page, changed) {
  const ready = new Map((page.data.heads?.texts ?? []).map((one) => [one.text, readText(one)]));
  const asking = new Map(),
    failed = new Map();
  let last = FIRST; // the last text that was loaded
  const ask = (key, promise, keep) => {
    if (asking.has(key)) return;
    asking.set(key, true);
    promise()
      .then(keep, (error) => failed.set(key, error.message))
      .finally(() => {
        asking.delete(key);
        changed();
      });
  };
  return {
    inside: page.source ? SENTENCES : [...ready.keys()],
    find(words) {
      if (ready.has(words)) {
        last = words;
        return { text: ready.get(words), says: "" };
      }
      if (!page.source)
        return {
          text: ready.get(FIRST) ?? null,
          says:
            page.data.heads?.missing ??
            "This file holds the model's heads for two sentences only. Type `attemper serve` to run the model on yours.",
        };
      if (failed.has(words)) {
        const instead = ready.get(last) ?? ready.get(FIRST) ?? null;
        const below = instead ? ` Below is “${cut(instead.text, 60)}”.` : "";
        return { text: instead, says: `The model has not read this sentence. ${failed.get(words)}${below}` };
      }
      ask(
        words,
        () => page.source.json("/heads", { text: words }),
        (found) => ready.set(words, readText(found)),
      );
      return { text: null, says: "The model reads. The first time it is loaded, which takes some seconds." };
    },
    /** Fetch the logits of a head, unless they are here. */
    need(text, [layer, head]) {
      if (text.logits(layer, head) || !page.source) return;
      const key = `${layer}.${head} ${text.text}`;
      if (!failed.has(key))
        ask(
          key,
          () => page.source.floats("/heads/logits", { text: text.text, layer, head }),
          (found) => text.keep(layer, head, found),
        );
    },
  };
}

/** signsOf(), which is not asked again for the same: pointing at a head changes none of them. */
function remembered() {
  let last = "",
    of = null,
    found = null;
  return (text, times, weighed) => {
    const key = `${times} ${weighed} ${text.kept.size}`;
    if (of !== text || last !== key) [of, last, found] = [text, key, signsOf(text, times, weighed)];
    return found;
  };
}

/** The slider on the scale, with the places that have a name. */
function tempering(make, set) {
  const slider = make("input", {
    type: "range",
    min: -FAR,
    max: FAR,
    step: 0.01,
    "aria-label": "Factor on the head's scale, as a power of two",
    oninput: () => set({ times: near(2 ** Number(slider.value)) }),
  });
  const shown = make("output.temper-shown"),
    named = make("div.row.temper-named", { role: "group", "aria-label": "Scales with a name" });
  const node = make(
    "div.temper",
    { "data-control": "heads.times" },
    make("div.temper-head", {}, make("label.temper-label", {}, "multiply the scale"), shown),
    slider,
    named,
  );
  /** Snap to 1 when close to it, so that the true scale can be reached by hand. */
  function near(times) {
    return Math.abs(Math.log2(times)) < 0.04 ? 1 : Number(times.toPrecision(4));
  }
  return {
    node,
    slider,
    show(layer, times) {
      slider.value = String(Math.log2(times));
      const { applied, head_dim: width } = layer;
      const known = Number.isFinite(applied) && applied > 0;
      shown.textContent = known
        ? `${written(applied)} × ${written(times, 2)} = ${written(applied * times)}`
        : `its own × ${written(times, 2)}`;
      slider.setAttribute("aria-valuetext", `times ${written(times, 2)}${known ? `, a scale of ${written(applied * times)}` : ""}`);
      const places = [
        ["true scale", 1],
        ...(known
          ? [
              ["1/d_k", 1 / width / applied],
              ["1/√d_k", width ** -0.5 / applied],
              ["no scale", 1 / applied],
            ]
          : []),
      ];
      const apart = places.filter(([, at], i) => !places.slice(0, i).some(([, other]) => Math.abs(at / other - 1) < 1e-6));
      const title = ([name, at]) => (at === 1 && known ? `true: ${rule(layer)}` : name);
      named.replaceChildren(
        ...apart.map((one) =>
          make(
            "button.plain",
            { type: "button", "aria-pressed": String(Math.abs(times / one[1] - 1) < 1e-3), onclick: () => set({ times: one[1] }) },
            title(one),
          ),
        ),
      );
    },
  };
}
const rule = ({ rule: name, applied }) => ({ sqrt_dk: "1/√d_k", none: "no scale", dk: "1/d_k" })[name] ?? written(applied);

function mount(root, page) {
  const make = page.make,
    pen = page.pen,
    set = (values) => page.set("heads", values);
  let now = page.state("heads"),
    text = null,
    viewed = null,
    asked = 0,
    shown = null;
  const library = texts(page, () => redraw()),
    signsAt = remembered();
  const sentence = (words) => make("button.plain.sentence", { type: "button", onclick: () => set({ text: words, token: -1 }) }, words);
  const chips = library.inside.map(sentence),
    { node: form, field } = sentenceForm(make, {
      name: "heads.text",
      button: "Read",
      longest: LONGEST,
      enter: (typed) => set({ text: typed, token: -1 }),
    });
  const ways = ["numbers", "thumbnails"].map((name) => make("button.plain", { type: "button", onclick: () => set({ map: name }) }, name));
  const sign = make("select", { "data-control": "heads.sign", "aria-label": "Sign that shades the map", onchange: () => set({ sign: sign.value }) });
  const box = make("input", { type: "checkbox", onchange: () => set({ hide: box.checked, token: -1 }) });
  const kinds = VIEWS.map((name) => make("button.plain", { type: "button", onclick: () => set({ view: name, token: -1 }) }, name));
  const says = make("p.flow-note", { role: "status" }),
    model = make("p.dim.heads-model"),
    audit = make("div.heads-audit");
  const act = {
    pin,
    lockToken: (token) => set({ token: now.token === token ? -1 : token }),
    view(place) {
      const key = place ? place.join(".") : null;
      if (key === viewed) return;
      viewed = key;
      asked ||= page.document.defaultView.requestAnimationFrame(() => {
        asked = 0;
        redraw();
      });
    },
    lock: (place) => set({ head: place.join(".") }),
  };
  const map = headMap(make, act),
    temper = tempering(make, set),
    views = [headView(make, pen, act), headView(make, pen, act)];
  const pair = make(
    "div.heads-pair",
    {},
    views.map((view) => view.node),
  );
  const work = make(
    "div.heads-work",
    {},
    make(
      "div.heads-left",
      {},
      make("div.row.heads-choice", {}, make("h2", {}, "Every head"),
        make("div.row.heads-ways", { role: "group", "aria-label": "What cells show", "data-control": "heads.map" }, ways), sign),
      map.node,
    ),
    make(
      "div.heads-right",
      {},
      temper.node,
      make(
        "div.row.heads-look",
        {},
        make("div.row.heads-ways", { role: "group", "aria-label": "How a head is drawn", "data-control": "heads.view" }, kinds),
        make("label.check.heads-hide", { "data-control": "heads.hide" }, box, "hide special tokens"),
      ),
      pair,
      model,
    ),
    audit,
  );
  root.append(
    make(
      "div.flow-controls",
      {},
      make("div.row", { role: "group", "aria-label": "Sentence", "data-control": "heads.sentences" }, chips),
      page.source ? form : null,
    ),
    says,
    work,
  );

  function pin(place) {
    const key = place.join(".");
    set({ pin: now.pin === key ? "" : key });
  }
  function redraw() {
    const found = library.find(now.text);
    says.textContent = found.says;
    says.hidden = !found.says;
    root.classList.toggle("waiting", !found.text);
    work.hidden = !found.text && !text;
    if (!found.text) return;
    if (text !== found.text) {
      sign.replaceChildren(...found.text.signs.map((one) => make("option", { value: one.key }, one.label)));
      // a link's sentence stands in the field; what somebody types there is left alone
      if (page.document.activeElement !== field) field.value = library.inside.includes(found.text.text) ? "" : found.text.text;
    }
    text = found.text;
    redrawn();
  }
  function redrawn() {
    const chosen = placeOf(text, now.head) ?? [0, 0],
      pinned = placeOf(text, now.pin),
      current = (viewed && placeOf(text, viewed)) ?? chosen;
    const kind = text.signs.find((one) => one.key === now.sign) ?? text.signs[0],
      thumbs = now.map === "thumbnails",
      signs = signsAt(text, now.times, thumbs);
    ways.forEach((way) => way.setAttribute("aria-pressed", String(way.textContent === now.map)));
    sign.value = kind.key;
    sign.hidden = thumbs; // which all show the same
    box.checked = now.hide;
    chips.forEach((chip) => chip.setAttribute("aria-pressed", String(chip.textContent === text.text)));
    map.show(text, kind, signs, {
      chosen: chosen.join("."),
      pinned: pinned?.join(".") ?? "",
      viewed: current.join("."),
      times: now.times,
      theme: thumbs ? theme() : null,
    });
    const places = pinned && pinned.join(".") !== current.join(".") ? [pinned, current] : [current];
    temper.show(text.layers[current[0]], now.times);
    for (const place of places) library.need(text, place);
    const ranges = places
      .map(([layer, head]) => text.logits(layer, head))
      .filter(Boolean)
      .map((logits) => endsOf(logits, now.times));
    const shared = ranges.length ? [Math.min(...ranges.map(([low]) => low)), Math.max(...ranges.map(([, high]) => high))] : null;
    pair.classList.toggle("two", places.length === 2);
    const width = Math.max(
      260,
      Math.floor(
        (pair.clientWidth - (places.length === 2 && pair.clientWidth > 560 ? 32 : 0)) /
          (places.length === 2 && pair.clientWidth > 560 ? 2 : 1),
      ) - 2,
    );
    views.forEach((view, i) => {
      view.node.hidden = i >= places.length;
      view.results =
        i < places.length
          ? view.show({
              text,
              layer: places[i][0],
              head: places[i][1],
              times: now.times,
              hide: now.hide,
              token: now.token,
              view: now.view,
              theme: theme(),
              shared,
              width,
              pinned: places[i].join(".") === pinned?.join("."),
            })
          : null;
    });
    const drawn = viewOf(now.view, text.layers[current[0]]);
    kinds.forEach((kind, i) => {
      kind.setAttribute("aria-pressed", String(VIEWS[i] === drawn));
      kind.hidden = VIEWS[i] === "arcs" && text.layers[current[0]].kind === "cross"; // its queries are not on the line of its keys
    });
    audit.replaceChildren(...audited(make, text, current));
    const { model: about } = text.document;
    const whole = "Here the slider multiplies the whole logit: the model adds something to the scores, or caps them.";
    const plain = text.layers[current[0]].plain ? "" : ` ${whole}`;
    model.textContent = `${about.name}, ${text.layers.length} layers of ${text.columns} heads; “${cut(text.text, 90)}”.${plain}`;
    shown = { text, places, times: now.times, sign: kind, signs, thumbs, results: views.map((view) => view.results).filter(Boolean) };
  }
  const window = page.document.defaultView,
    home = root.closest(".attemper-page"),
    dark = window.matchMedia("(prefers-color-scheme: dark)");
  /** That of the page, which may differ from the reader's, as in a notebook. */
  const theme = () => {
    const { colorScheme } = window.getComputedStyle(home);
    return ["light", "dark"].includes(colorScheme) ? colorScheme : dark.matches ? "dark" : "light";
  };
  const again = () => text && redrawn(),
    resized = new ResizeObserver(again),
    recoloured = new MutationObserver(again);
  resized.observe(pair);
  recoloured.observe(home, { attributeFilter: ["data-theme"] });
  dark.addEventListener("change", again);
  const escape = (event) => {
    // in a notebook, keys outside the page are not its own
    const own = home.contains(event.target) || (home.parentElement === page.document.body && event.target === page.document.body);
    if (event.key === "Escape" && own && root.offsetParent && now.token >= 0) set({ token: -1 });
  };
  page.document.addEventListener("keydown", escape);
  return {
    update(state) {
      now = { ...state };
      redraw();
    },
    text: () => (shown ? headsText(shown, views) : says.textContent),
    figures: () =>
      shown
        ? [
            { name: "map", svg: () => new XMLSerializer().serializeToString(mapPicture(pen, shown, theme())) },
            ...shown.places.flatMap(([layer, head], i) => [
              { name: `attention-${layer}-${head}`, svg: () => views[i].drawn(standalone, theme()) },
              { name: `logits-${layer}-${head}`, svg: () => standalone(views[i].chart) },
            ]),
          ]
        : [],
    python: () => headsPython(shown),
    json: () =>
      shown
        ? {
            text: text.text,
            tokens: text.tokens,
            times: shown.times,
            heads: shown.places.map(([layer, head], i) => ({
              layer,
              head,
              applied: text.layers[layer].applied,
              signs: shown.results[i]?.signs ?? null,
              true_signs: shown.results[i]?.before ?? null,
              weights: shown.results[i] ? [...shown.results[i].weights] : null,
            })),
          }
        : {},
    unmount() {
      resized.disconnect();
      recoloured.disconnect();
      dark.removeEventListener("change", again);
      page.document.removeEventListener("keydown", escape);
    },
  };
}

export const headsPanel = {
  id: "heads",
  tab: "Real heads",
  title: "Real heads, re-tempered",
  lead: "The heads of a trained model. Multiply a head's scale and watch it sharpen or blur.",
  state: {
    text: { default: FIRST, longest: LONGEST },
    sign: { default: "effective_keys", longest: 40 },
    map: { default: "numbers", choices: ["numbers", "thumbnails"] },
    head: { default: "4.3", longest: 9 },
    pin: { default: "", longest: 9 },
    times: { default: 1, least: 2 ** -FAR, most: 2 ** FAR },
    hide: { default: false },
    view: { default: "", choices: ["", ...VIEWS] },
    token: { default: -1, least: -1, most: 4095, integer: true },
  },
  mount,
};
