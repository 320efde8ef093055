// The controls of the bench: three sliders, the rule, aligned keys, a sweep, another draw.

import { say } from "../../draw/words.js";
import { stepped } from "../../shell/keyboard.js";
import { D_STEPS, HEAD_STEPS, N_STEPS } from "./model.js";
import { STORIES } from "./stories.js";

const nearest = (steps, value) =>
  steps.reduce((best, step, i) => (Math.abs(Math.log(step / value)) < Math.abs(Math.log(steps[best] / value)) ? i : best), 0);

/** A slider over the steps of a list; any number can be typed beside it. */
export function stepSlider(page, { key, id = `bench-${key}`, label, says, steps, unit = "", beside = null }) {
  const { make } = page;
  const slider = make("input", {
    type: "range",
    id,
    min: 0,
    max: steps.length - 1,
    step: 1,
    oninput: () => page.set("bench", { [key]: steps[Number(slider.value)] }),
  });
  const field = make("input.exact", {
    type: "number",
    min: steps[0],
    max: steps.at(-1),
    step: 1,
    "aria-label": `${label}, exact number`,
    onchange: () => {
      if (field.value !== "") page.set("bench", { [key]: field.value });
      show(page.state());
    },
  });
  const note = make("span");
  function show(state) {
    slider.value = nearest(steps, state[key]);
    slider.setAttribute("aria-valuetext", `${label} = ${state[key]}${unit}`);
    if (field.ownerDocument.activeElement !== field) field.value = state[key];
  }
  return {
    node: make(
      `div.control.${key}`,
      { "data-control": `bench.${key}` },
      make("div.control-head", {}, make("label", { for: id }, label, make("span.dim", {}, says ? ` ${says}` : " ", note)), beside, field),
      slider,
    ),
    show,
    note,
  };
}

/** The rules as one group of buttons: one stop for Tab, arrow keys choose. */
function ruleSwitch(page) {
  const { make } = page,
    names = Object.keys(STORIES);
  const buttons = names.map((name) =>
    make(
      "button.chip",
      { type: "button", role: "radio", "data-rule": name, title: STORIES[name].name, onclick: () => page.set("bench", { rule: name }) },
      STORIES[name].button,
    ),
  );
  const group = make("div.chips", { role: "radiogroup", "aria-label": "The rule of the second lane" }, buttons);
  group.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(event.target),
      next = at < 0 ? null : stepped(event.key, at, names.length);
    if (next === null) return;
    event.preventDefault();
    buttons[next].focus();
    page.set("bench", { rule: names[next] });
  });
  return {
    node: group,
    show(state) {
      buttons.forEach((button, i) => {
        button.setAttribute("aria-checked", String(names[i] === state.rule));
        button.setAttribute("tabindex", names[i] === state.rule ? "0" : "-1");
      });
    },
  };
}

const PACE = 70; // milliseconds for each d_k

/** A button that visits every d_k once, from 1 to 1024, and comes back. Without motion, `visitAll` leaves their dots at once. */
function sweepButton(page, visitAll) {
  const { make } = page;
  let running = 0;
  const words = () => {
    say(page, button, running ? "Stop" : "▶ Sweep d_k");
  };
  function stop() {
    clearTimeout(running);
    running = 0;
    words();
  }
  function visit(i, back) {
    page.set("bench", { d: i < D_STEPS.length ? D_STEPS[i] : back });
    if (i >= D_STEPS.length) return stop();
    running = setTimeout(() => visit(i + 1, back), PACE);
    return words();
  }
  const button = make("button.plain.sweep", {
    type: "button",
    "data-control": "bench.sweep",
    title: "Visit every d_k from 1 to 1024",
    onclick() {
      if (running) return stop();
      page.announce("Every d_k from 1 to 1024 was visited.");
      return page.motion ? visit(0, page.state().d) : visitAll(D_STEPS);
    },
  });
  words();
  return { node: button, stop };
}

export function controls(page, visitAll) {
  const { make } = page;
  const sweep = sweepButton(page, visitAll);
  const d = stepSlider(page, { key: "d", label: "d_k", says: "numbers in a query", steps: D_STEPS, beside: sweep.node });
  const n = stepSlider(page, { key: "n", label: "n", says: "keys", steps: N_STEPS });
  const heads = stepSlider(page, { key: "heads", label: "heads", says: "", steps: HEAD_STEPS });
  const rule = ruleSwitch(page);
  const ticked = make("input", { type: "checkbox", onchange: () => page.set("bench", { aligned: ticked.checked }) });
  const again = make(
    "button.plain",
    {
      type: "button",
      "data-control": "bench.seed",
      title: "Other random vectors",
      onclick: () => {
        page.set("bench", { seed: (page.state().seed + 1) % 1000 });
        page.announce("Other random vectors.");
      },
    },
    "Draw again",
  );
  const sliders = make("div.sliders", {}, d.node, n.node, heads.node);
  const switches = make(
    "div.switches",
    {},
    make("div.rules", { "data-control": "bench.rule" }, rule.node),
    make(
      "div.row",
      {},
      make(
        "label.check",
        { "data-control": "bench.aligned", title: "Give every query one key that is half itself, as after training" },
        ticked,
        " aligned keys",
      ),
      again,
    ),
  );
  sliders.addEventListener("input", sweep.stop);
  return {
    sliders,
    switches,
    stop: sweep.stop,
    show(state) {
      for (const one of [d, n, heads, rule]) one.show(state);
      say(page, heads.note, `d_model = ${state.heads * state.d}`);
      ticked.checked = state.aligned;
    },
  };
}
