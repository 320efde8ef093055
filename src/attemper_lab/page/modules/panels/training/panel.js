// Training: the same runs with the scale and without, under one scrubber; recorded, trained now, or a record of one's own.

import { standalone } from "../../draw/svg.js";
import { say } from "../../draw/words.js";
import { CHARTS, runChart } from "./chart.js";
import { RATES, recordControls, recordedControls, runControls, scrubber, sourceChips } from "./controls.js";
import { findingsList, followedRecord, pageRun } from "./live.js";
import { TASKS, lastStep, liveSeries, ratesOf, recordSeries, recordedSeries } from "./model.js";
import { ratioSentence, trainingPython, trainingWords } from "./words.js";

const END = 1e9; // the last step, whichever it is
const LIMITS = {
  d: { default: 64, least: 4, most: 256, integer: true },
  steps: { default: 150, least: 15, most: 600, integer: true },
  seed: { default: 0, least: 0, most: 2147483647, integer: true },
};

export const trainingPanel = {
  id: "training",
  tab: "Training",
  title: "What happens while it trains",
  lead: "The same model from the same start, with the scale and without; or a run of your own. Drag the step, and watch which gradients survive.",
  state: {
    source: { default: "recorded", choices: ["recorded", "run", "record"] },
    task: { default: "language", choices: Object.keys(TASKS) },
    lr: { default: 0.0003, least: 1e-5, most: 1 },
    rate: { default: RATES[2], least: 1e-5, most: 0.1 },
    step: { default: END, least: 0, most: END, integer: true },
    ...LIMITS,
  },
  mount(root, page) {
    const { make } = page,
      training = page.data.training,
      set = (values) => page.set("training", values),
      again = () => set({});
    const run = pageRun(page, again),
      followed = followedRecord(page, again),
      findings = findingsList(page);
    const state = () => page.state("training");
    const rate = () => {
      const offered = ratesOf(training, state().task);
      return offered.includes(state().lr) ? state().lr : offered.at(offered.length >> 1);
    };
    const series = () =>
      ({
        recorded: () => recordedSeries(training, state().task, rate()),
        run: () => liveSeries(run.rows, run.rules),
        record: () => (followed.record ? recordSeries(followed.record) : []),
      })[state().source]();
    const last = () => lastStep(series());
    const step = () => Math.min(state().step, last());
    const sources = sourceChips(page, set),
      scrub = scrubber(page, set, last);
    const controls = {
      recorded: recordedControls(page, training, set),
      run: runControls(page, LIMITS, run, set),
      record: recordControls(page, followed),
    };
    const charts = CHARTS.map((about) =>
      runChart(page, about, (to) => {
        scrub.halt();
        set({ step: Math.round(Math.max(0, Math.min(last(), to))) });
      }),
    );
    const legend = make("p.legend", {}, make("span.chosen", {}, "━ ÷ √d_k"), make("span.none", {}, "━ no scale"));
    const sentence = make("p.sentence", {});
    root.append(
      make("div.top", {}, sources.node, ...Object.values(controls).map((one) => one.node)),
      scrub.node,
      sentence,
      legend,
      make(
        "div.charts",
        {},
        charts.map((chart) => chart.node),
      ),
      findings.node,
    );
    if (page.data.about?.record) followed.open();
    return {
      update(now) {
        const all = series(),
          end = last();
        sources.show(now.source);
        for (const [name, one] of Object.entries(controls)) {
          one.node.hidden = name !== now.source;
          if (name === now.source) one.update({ ...now, lr: rate() });
        }
        const empty = !all.some((one) => one.steps.length);
        scrub.node.hidden = empty;
        legend.hidden = empty || now.source === "record";
        scrub.update(step());
        for (const chart of charts) chart.update(all, step(), now.source === "run" && run.going ? Math.max(now.steps, end) : end);
        say(page, sentence, now.source === "record" ? "" : ratioSentence(all, step(), now.source === "run" ? now.d : TASKS[now.task].d));
        findings.update(now.source === "record" ? followed.record : null);
      },
      text: () =>
        trainingWords(
          state().source === "recorded" ? `${TASKS[state().task].title}, learning rate ${rate()}` : "This run",
          series(),
          step(),
        ),
      figures: () =>
        charts
          .filter((chart) => !chart.node.hidden)
          .map((chart) => ({ name: chart.title.toLowerCase().replaceAll(" ", "-"), svg: () => standalone(chart.svg) })),
      json: () => ({ source: state().source, step: step(), runs: series() }),
      python: () => trainingPython({ ...state(), lr: rate(), record: followed.record?.name ?? "run.jsonl" }),
      unmount() {
        scrub.halt();
        run.end();
        followed.end();
        root.replaceChildren();
      },
    };
  },
};
