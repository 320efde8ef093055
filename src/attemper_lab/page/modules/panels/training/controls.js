// The controls of the training panel: where the runs come from, which of them, and the scrubber.

import { plural } from "../../../report/data/numbers.js";
import { TASKS, ratesOf } from "./model.js";

export const RATES = [0.0003, 0.001, 0.003, 0.01];
const SOURCES = { recorded: "Recorded runs", run: "Train now", record: "Your own run" };

/** A row of chips of which one is chosen; `choose(value)`. */
export function chips(page, name, control, choices, choose) {
  const { make } = page;
  const buttons = choices.map(([value, words, title]) =>
    make("button.chip", { type: "button", title: title ?? null, "data-value": value, onclick: () => choose(value) }, words),
  );
  const node = make(
    "div.field",
    { role: "group", "aria-label": name, "data-control": control },
    make("span.field-name", { "aria-hidden": "true" }, name),
    make("div.chips", {}, buttons),
  );
  return {
    node,
    buttons,
    show(value, offered = null) {
      for (const button of buttons) {
        button.setAttribute("aria-pressed", String(button.dataset.value === String(value)));
        button.hidden = offered !== null && !offered.includes(button.dataset.value);
      }
    },
  };
}

/** Recorded, now, or a record. */
export function sourceChips(page, set) {
  return chips(
    page,
    "Runs",
    "training.source",
    Object.entries(SOURCES).map(([key, words]) => [key, words]),
    (source) => set({ source }),
  );
}

/** Which recorded runs. */
export function recordedControls(page, training, set) {
  const { make } = page,
    says = make("p.dim.says");
  const task = chips(
    page,
    "Task",
    "training.task",
    Object.entries(TASKS).map(([key, about]) => [key, about.title]),
    (value) => set({ task: value }),
  );
  const all = [...new Set(Object.keys(TASKS).flatMap((key) => ratesOf(training, key)))].sort((a, b) => a - b);
  const rate = chips(
    page,
    "Learning rate",
    "training.lr",
    all.map((lr) => [String(lr), String(lr)]),
    (value) => set({ lr: Number(value) }),
  );
  return {
    node: make("div.controls", {}, task.node, rate.node, says),
    update(state) {
      task.show(state.task);
      rate.show(state.lr, ratesOf(training, state.task).map(String));
      const { from, says: words } = TASKS[state.task],
        made = training?.[from];
      says.textContent = made
        ? `${words[0].toUpperCase()}${words.slice(1)}. ${made.settings.steps} steps on a GPU; ` +
          "the line is the median of the seeds, the band the least and the most."
        : "";
    },
  };
}

/** A number that one types. */
function field(page, key, name, about, set) {
  const { make } = page,
    id = `training-${key}`;
  const input = make("input.exact", {
    type: "number",
    id,
    min: about.least,
    max: about.most,
    step: about.step ?? 1,
    onchange: () => set({ [key]: input.value }),
  });
  return {
    node: make("label.number", { for: id, "data-control": `training.${key}` }, `${name} `, input),
    show: (value) => {
      input.value = value;
    },
  };
}

/** What is trained now. */
export function runControls(page, limits, run, set) {
  const { make } = page;
  const fields = {
    d: field(page, "d", "d_k", limits.d, set),
    steps: field(page, "steps", "steps", limits.steps, set),
    seed: field(page, "seed", "seed", limits.seed, set),
  };
  const rate = chips(
    page,
    "Learning rate",
    "training.rate",
    RATES.map((lr) => [String(lr), String(lr)]),
    (value) => set({ rate: Number(value) }),
  );
  const button = make("button.start", {
    type: "button",
    onclick() {
      const { d, steps, seed, rate: lr } = page.state("training");
      if (run.going) run.cancel();
      else run.begin({ rules: ["sqrt_dk", "none"], d, lr, steps, seed });
    },
  });
  const about = make(
    "p.dim.says",
    {},
    "Recall: the model is shown 32 pairs, and must look one of them up. One layer with one head is trained twice from the same start, " +
      "with 1/√d_k and without a scale. It takes some seconds.",
  );
  const bar = make("progress", { max: 1, value: 0, "aria-label": "how far the training is" }),
    says = make("p.dim.says", { role: "status" });
  const node = make(
    "div.controls",
    {},
    make(
      "div.field",
      {},
      make("span.field-name", { "aria-hidden": "true" }, "Recall"),
      make(
        "div.row",
        {},
        Object.values(fields).map((one) => one.node),
      ),
    ),
    rate.node,
    about,
    make("div.row.going", {}, button, bar, says),
  );
  return {
    node,
    update(state) {
      for (const [key, one] of Object.entries(fields)) one.show(state[key]);
      rate.show(state.rate);
      button.textContent = run.going ? "Cancel" : run.rows.length ? "Train again" : "Train with the scale and without";
      button.disabled = !page.source;
      bar.value = run.done;
      bar.hidden = !run.going && !run.rows.length;
      about.hidden = Boolean(run.rows.length);
      says.textContent = page.source
        ? run.says
        : "This file has no server behind it. `attemper serve` opens the page with one, and trains on your machine.";
    },
  };
}

/** What a record lacks, and how to add it. */
function missing(steps) {
  const without = (key) => steps.length > 0 && !steps.some((step) => key in step);
  return (
    (without("loss") ? 'It holds no loss: watch.log({"loss": …}) adds it. ' : "") +
    (without("grad_q_median") ? "It holds no gradients: watch(gradients=True) adds them. " : "")
  );
}

/** What a record needs. */
export function recordControls(page, followed) {
  const { make } = page,
    says = make("p.says", { role: "status" }),
    how = make(
      "pre",
      { tabindex: "0", role: "region", "aria-label": "How to write a record" }, // narrow screens scroll it
      'with attemper.watch(model, every=10, gradients=True, path="run.jsonl") as watch:\n' +
        "    …                                  # your training loop, with these two lines in it:\n" +
        '    watch.log({"loss": loss.item()})\n    watch.step()\n\n' +
        "attemper serve --record run.jsonl",
    );
  const lights = make("span.light", { "aria-hidden": "true" }, "●");
  const node = make("div.controls", {}, make("div.row", {}, lights, says), how);
  return {
    node,
    update() {
      const named = page.data.about?.record;
      how.hidden = Boolean(named && page.source);
      lights.classList.toggle("on", followed.live);
      lights.hidden = !followed.live;
      if (!page.source || !named) says.textContent = "Watch your own training: write a record, and open it here while it grows.";
      else
        says.textContent = followed.record?.steps.length
          ? `Following ${followed.record.name}: ${plural(followed.record.steps.length, "step")}. ${missing(followed.record.steps)}${followed.says}`
          : followed.says || `Waiting for the first step in ${followed.record?.name ?? named}.`;
    },
  };
}

/** The scrubber: one step for all charts, with a button that plays it. */
export function scrubber(page, set, last) {
  const { make } = page,
    view = page.document.defaultView,
    shown = make("output", { for: "training-step" });
  const input = make("input", {
    type: "range",
    id: "training-step",
    "aria-label": "Step",
    min: 0,
    step: 1,
    oninput: () => {
      halt();
      set({ step: Number(input.value) });
    },
  });
  let timer = 0;
  const halt = () => {
    view.clearInterval(timer);
    timer = 0;
    button.textContent = "▶ Play";
  };
  const button = make(
    "button.plain",
    {
      type: "button",
      "data-control": "training.play",
      onclick() {
        if (timer) {
          halt();
          return;
        }
        if (!page.motion) {
          set({ step: last() });
          return;
        }
        let step = page.state("training").step >= last() ? 0 : page.state("training").step;
        button.textContent = "❚❚ Pause";
        timer = view.setInterval(() => {
          step = Math.min(last(), step + Math.max(1, last() / 120));
          set({ step: Math.round(step) });
          if (step >= last()) halt();
        }, 40);
      },
    },
    "▶ Play",
  );
  const node = make(
    "div.scrubber",
    { "data-control": "training.step" },
    button,
    make("label", { for: "training-step" }, "Step"),
    input,
    shown,
  );
  return {
    node,
    halt,
    update(step) {
      input.max = last();
      input.value = Math.min(step, last());
      shown.textContent = `${Math.min(step, last())} of ${last()}`;
      input.setAttribute("aria-valuetext", `step ${Math.min(step, last())}`);
    },
  };
}
