// The flow: a sentence from words to context as one picture, step by step; any cell shows the cells that made it.

import { standalone } from "../../draw/svg.js";
import { say as typeset } from "../../draw/words.js";
import { written } from "../../../report/data/numbers.js";
import { arithmetic, stepWords, told } from "./card.js";
import { controls } from "./controls.js";
import { layout } from "./layout.js";
import { beside, computed, madeOf } from "./parts.js";
import { picture } from "./picture.js";
import { lessonFlow, modelFlow, wordsOf } from "./source.js";
import { MOST, steps } from "./steps.js";
import { flowPython, flowText } from "./words.js";

const LOVE = "Love Apple phones";
const LONGEST = 1000; // characters of a sentence, as the server takes them
const SERVE = "Type `attemper serve` to run a real model on your sentence.";
const OTHER = `This file has the real model for its own sentences only, so these are random vectors. ${SERVE}`;
const TYPED_HERE = `Your words have random vectors here, the same that attemper.explain gives them: they have no meaning. ${SERVE}`;
const TYPED = new Set(["INPUT", "TEXTAREA", "SELECT"]);
const PRESSED = "button, a, summary, [role=tab], dialog";

/** "S.1.0" ↔ {id, row, column}; null where it names no cell of these parts. */
function cellOf(words, parts) {
  const [, id, row, column] = words.match(/^(\w+)\.(\d+)\.(\d+)$/) ?? [];
  const part = id && parts[id];
  return part?.data && Number(row) < part.rows && Number(column) < part.shown ? { id, row: Number(row), column: Number(column) } : null;
}

/** Finds the flow of a state: drawn here, inside the page, or asked from the server. */
function finder(page, changed) {
  const ready = new Map();
  let asking = null,
    failed = "",
    failedWords = "";
  const embedded = page.data.flow?.texts ?? [];
  return {
    embedded,
    /** The flow, and a sentence about where it comes from; null while it is on its way. */
    find(state) {
      const text = wordsOf(state.text).length ? state.text : LOVE;
      if (state.way === "model") {
        const inside = embedded.find(
          (one) => one.text === text && (!page.source || (one.layer === state.layer && one.head === state.head)),
        );
        const key = inside ? `inside ${inside.text}` : `${state.layer}.${state.head} ${text}`;
        if (inside && !ready.has(key)) ready.set(key, modelFlow(inside));
        if (ready.has(key)) return { flow: ready.get(key), says: "" };
        if (page.source && failed !== key) {
          ask(key, text, state);
          return null;
        }
        const says = page.source ? failedWords : (page.data.flow?.missing ?? OTHER);
        return { flow: lesson(text, state.head), says };
      }
      const flow = lesson(text, state.head),
        left = flow.words - flow.n;
      const says = [left ? `Of these ${flow.words} words the first ${flow.n} are taken.` : "", page.source || text === LOVE ? "" : TYPED_HERE];
      return { flow, says: says.filter(Boolean).join(" ") };
    },
  };
  function lesson(text, head) {
    const key = `lesson ${head} ${text}`;
    if (!ready.has(key)) ready.set(key, lessonFlow(text, Math.min(7, head)));
    return ready.get(key);
  }
  function ask(key, text, { layer, head }) {
    if (asking?.key === key) return;
    asking?.stop.abort();
    const stop = new AbortController();
    asking = { key, stop };
    page.source
      .json("/flow", { text, layer, head }, stop.signal)
      .then(
        (found) => ready.set(key, modelFlow(found)),
        (error) => {
          if (stop.signal.aborted) return;
          if (layer + head > 0 && error.message.includes("must be from 0 to")) page.set("flow", { layer: 0, head: 0 }); // a smaller model
          [failed, failedWords] = [key, `The model has not read this sentence. ${error.message}`];
        },
      )
      .finally(() => {
        if (asking?.key === key) asking = null;
        if (!stop.signal.aborted) changed();
      });
  }
}

function mount(root, page) {
  const make = page.make,
    pen = page.pen,
    svg = pen("svg.flow-picture", { role: "group", "aria-label": "From words to context" });
  const frame = make("div.flow-frame", {}, svg),
    card = make("section.flow-card", { "aria-label": "This step" });
  const count = make("p.flow-count"),
    title = make("h2"),
    words = make("p.flow-words"),
    formula = make("p.flow-formula");
  const cell = make("div.flow-cell", { "aria-live": "polite" }),
    says = make("p.flow-note", { role: "status" });
  const dots = Array.from({ length: MOST }, (_, i) => make("button.flow-dot", { type: "button", onclick: () => go(i + 1) }));
  const back = make("button.plain", { type: "button", onclick: () => go(at() - 1) }, "Back");
  const next = make("button.plain.flow-next", { type: "button", onclick: () => go(at() + 1) }, "Next", make("kbd", {}, "Space"));
  let now = page.state("flow"),
    shown = null,
    hover = null,
    moved = false;
  const find = finder(page, () => redraw()),
    set = (values) => page.set("flow", values);
  const bar = controls(make, page, { set, embedded: find.embedded, love: LOVE, longest: LONGEST });
  card.append(
    count,
    title,
    words,
    formula,
    make("div.row.flow-walk", {}, back, next, make("div.flow-dots", { role: "group", "aria-label": "Steps" }, dots)),
    cell,
  );
  root.append(bar.node, says, make("div.flow-work", {}, frame, card));

  /** The step that is shown: a flow without a mask has one less than an address may name. */
  const at = () => Math.min(now.step, shown?.steps.length ?? MOST);
  function go(step) {
    moved = true;
    const count = shown?.steps.length ?? MOST;
    set({ step: ((step - 1 + count) % count) + 1 });
  }
  /** Bring everything up to the state. */
  function redraw() {
    const found = find.find(now);
    frame.classList.toggle("waiting", !found);
    if (!found) return bar.show(now, shown?.flow ?? null);
    const { flow } = found,
      width = Math.max(280, Math.floor(frame.clientWidth || 760));
    const key = `${flow.way} ${flow.text} ${flow.layer}.${flow.head} ${width}`,
      fresh = shown?.key !== key;
    const bare = fresh || shown.skip !== now.skip ? computed(flow, !now.skip) : shown.bare;
    const parts = fresh || shown.skip !== now.skip ? beside(computed(flow, now.skip), bare) : shown.parts;
    const before = shown;
    if (fresh) hover = null; // the cell may be gone
    if (fresh) shown = { key, flow, drawn: picture(pen, svg, flow, parts, layout(flow, parts, width, Boolean(page.source))) };
    Object.assign(shown, { parts, bare, skip: now.skip, steps: steps(flow, parts, bare.P, now.skip) });
    // the scores shrink before one's eyes
    if (page.motion && !fresh && before.step !== now.step && now.step === 6 && !now.skip) {
      svg.classList.add("still");
      shown.drawn.before(parts);
      svg.getBoundingClientRect();
      page.document.defaultView.getComputedStyle(svg.querySelector(".cell")).fillOpacity; // drawn before it moves
      svg.classList.remove("still");
      page.document.defaultView.requestAnimationFrame(() =>
        page.document.defaultView.requestAnimationFrame(() => shown.drawn.show(parts, now.skip)),
      );
    } else shown.drawn.show(parts, now.skip);
    shown.step = now.step;
    say(found.says);
    bar.show(now, flow);
    if (moved) reveal(shown.steps[at() - 1].parts);
    moved = false;
  }
  /** Scroll until the parts of a step are seen: below the page's head and, on a phone, above the card. */
  function reveal(ids) {
    const boxes = ids.map((id) => shown.drawn.box(id)?.getBoundingClientRect()).filter(Boolean),
      view = page.document.defaultView;
    if (!boxes.length) return;
    const low = Math.min(...boxes.map((box) => box.top)),
      high = Math.max(...boxes.map((box) => box.bottom)),
      place = card.getBoundingClientRect();
    const floor = place.left < svg.getBoundingClientRect().right ? view.innerHeight - card.offsetHeight - 12 : view.innerHeight - 16,
      ceiling = 72;
    const by = low < ceiling || high - low > floor - ceiling ? low - ceiling : Math.max(0, high - floor);
    if (Math.abs(by) > 1) view.scrollBy({ top: by, behavior: page.motion ? "smooth" : "auto" });
  }
  function say(note) {
    const step = shown.steps[at() - 1];
    count.textContent = `Step ${at()} of ${shown.steps.length}`;
    typeset(page, title, step.title);
    words.replaceChildren(...stepWords(make, step, (id) => shown.drawn.name(id)));
    typeset(page, formula, step.formula);
    dots.forEach((dot, i) => {
      dot.hidden = i >= shown.steps.length;
      if (dot.hidden) return;
      dot.setAttribute("aria-label", `Step ${i + 1}: ${shown.steps[i].title}`);
      dot.setAttribute("aria-pressed", String(i + 1 === at()));
    });
    typeset(page, says, note);
    says.hidden = !note;
    shown.drawn.step(step.parts);
    point();
  }
  /** Show the cell that is locked, or the one under the pointer. */
  function point() {
    const where = hover ?? cellOf(now.at, shown.parts),
      made = where && madeOf(shown.flow, shown.parts, where.id, where.row, where.column, now.skip);
    shown.drawn.point(made);
    const hint = now.at ? "" : "Point at a cell to see what made it; click to keep it. Tab and the arrow keys do the same.";
    cell.replaceChildren(...(made ? arithmetic(make, shown.flow, made) : [make("p.dim", {}, hint)]));
    for (const word of words.querySelectorAll("[data-names]")) word.classList.toggle("named", made?.id === word.dataset.names);
  }
  const over = (event) => {
    const found = shown?.drawn.cellAt(event) ?? null;
    if (found?.id === hover?.id && found?.row === hover?.row && found?.column === hover?.column) return;
    hover = found;
    if (shown) point();
  };
  svg.addEventListener("pointermove", over);
  svg.addEventListener("pointerleave", () => {
    hover = null;
    if (shown) point();
  });
  svg.addEventListener("click", (event) => {
    const found = shown?.drawn.cellAt(event),
      small = event.target.closest?.("[data-head]");
    if (small) set({ head: Number(small.dataset.head) });
    else if (found) lock(found);
  });
  const nameOf = (where) => `${where.id}.${where.row}.${where.column}`;
  const lock = (where) => set({ at: now.at === nameOf(where) ? "" : nameOf(where) });
  svg.addEventListener("keydown", (event) => {
    const small = event.target.closest?.("[data-head]");
    if (small && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      event.stopPropagation();
      set({ head: Number(small.dataset.head) });
    }
    const id = event.target.closest?.("[data-part]")?.dataset.part;
    if (!id || !event.key.startsWith("Arrow") || !shown) return;
    event.preventDefault();
    const here = cellOf(now.at, shown.parts);
    set({ at: nameOf(shown.drawn.moved(id, here?.id === id ? here : null, event.key)) });
  });
  const home = root.closest(".attemper-page"),
    alone = home?.parentElement === page.document.body; // in a notebook, keys outside the page are not its own
  const keydown = (event) => {
    if (!home?.contains(event.target) && !(alone && event.target === page.document.body)) return;
    if (!root.offsetParent || event.ctrlKey || event.metaKey || event.altKey || TYPED.has(event.target.tagName)) return;
    if (event.key === "Escape" && now.at) set({ at: "" });
    if (event.key !== " " || event.target.closest?.(PRESSED)) return;
    event.preventDefault();
    go(at() + (event.shiftKey ? -1 : 1));
  };
  page.document.addEventListener("keydown", keydown);
  const resized = new ResizeObserver(() => redraw());
  resized.observe(frame);
  return {
    update(state) {
      now = { ...state };
      redraw();
    },
    text: () => (shown ? flowText(shown, now, madeWords()) : ""),
    figures: () => [{ name: "flow", svg: () => standalone(svg) }],
    python: () => flowPython(shown.flow, now),
    json: () => (shown ? numbers(shown) : {}),
    unmount() {
      resized.disconnect();
      page.document.removeEventListener("keydown", keydown);
    },
  };
  function madeWords() {
    const where = cellOf(now.at, shown.parts);
    return where ? told(shown.flow, madeOf(shown.flow, shown.parts, where.id, where.row, where.column, now.skip)) : "";
  }
}

/** The numbers of a flow as JSON has them. */
function numbers({ flow, parts, skip }) {
  const rows = ({ rows, shown, data }) =>
    Array.from({ length: rows }, (_, i) => [...data.slice(i * shown, (i + 1) * shown)].map((one) => (Number.isFinite(one) ? one : null)));
  const kept = Object.fromEntries(["Q", "K", "V", "S", "Z", "P", "C", "Y"].filter((id) => parts[id]).map((id) => [id, rows(parts[id])]));
  return {
    text: flow.text,
    way: flow.way,
    model: flow.model,
    tokens: flow.tokens,
    layer: flow.layer,
    head: flow.head,
    heads: flow.heads,
    d_model: flow.d_model,
    d_k: flow.d_k,
    scale: skip ? 1 : Number(written(flow.scale, 12)),
    ...kept,
  };
}

export const flowPanel = {
  id: "flow",
  tab: "The flow",
  title: "From words to context",
  space: true, // Space goes to the next step
  lead: "Press Next to walk through it. Point at any number to see what made it.",
  state: {
    text: { default: LOVE, longest: LONGEST },
    way: { default: "lesson", choices: ["lesson", "model"] },
    step: { default: 1, least: 1, most: MOST, integer: true },
    skip: { default: false },
    layer: { default: 4, least: 0, most: 999, integer: true },
    head: { default: 0, least: 0, most: 999, integer: true },
    at: { default: "", longest: 24 },
  },
  mount,
};
