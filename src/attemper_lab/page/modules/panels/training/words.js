// The training panel in words and in Python.

import { written } from "../../../report/data/numbers.js";
import { CHARTS } from "./chart.js";
import { RULE_NAMES, TASKS, valueAt } from "./model.js";

/** What the charts show at a step, one line for each. */
export function trainingWords(title, all, step) {
  const lines = [`${title}, step ${step}:`];
  for (const { keys, title: name } of CHARTS) {
    const parts = all
      .filter((series) => keys.some((key) => series.median[key]))
      .map(
        (series) =>
          `${RULE_NAMES[series.rule] ?? "this run"} ${keys.map((key) => written(valueAt(series, key, step))).join(" (median), ")}` +
          (keys.length > 1 ? " (RMS)" : ""),
      );
    if (parts.length) lines.push(`${name}: ${parts.join("; ")}.`);
  }
  return lines.join("\n");
}

/** One sentence on what the step shows: how far the median gradient without the scale is from that with it. */
export function ratioSentence(all, step, d) {
  const bare = all.find((series) => series.rule === "none"),
    scaled = all.find((series) => series.rule === "sqrt_dk");
  const ratio = (key) => (bare && scaled ? valueAt(bare, key, step) / valueAt(scaled, key, step) : NaN);
  const median = ratio("grad_q_median"),
    rms = ratio("grad_q_rms");
  if (!(median > 0) || !(rms > 0) || !Number.isFinite(median + rms)) return "";
  const times = (value) => (value >= 0.095 ? `${written(value, value < 10 ? 1 : 0)} times` : `1/${written(1 / value, 0)} of`);
  const [low, high] = [scaled, bare].map((series) => valueAt(series, "loss", step));
  const learned =
    low < 0.2 * high ? ` With the scale the loss is down to ${written(low, 2)}: little is left to learn, and its gradients become small for that reason.` : "";
  return (
    `At step ${step} the typical (median) entry of the gradient at q is, without the scale, ${times(median)} what it is with it; ` +
    `the RMS, which a few large ones make, ${times(rms)}.` +
    ` The missing division alone makes both √${d} = ${written(Math.sqrt(d), 0)} times larger.${learned}`
  );
}

/** Code that prints the numbers of a recorded task, or trains a run like that of the page. */
export function trainingPython(state) {
  if (state.source === "run") {
    return [
      "from attemper_lab.page.data.training import training_rows",
      "",
      `for row in training_rows(["sqrt_dk", "none"], d=${state.d}, lr=${state.rate}, steps=${state.steps}, seed=${state.seed}):`,
      "    print(row[\"rule\"], row[\"step\"], f\"loss {row['loss']:.3f}  entropy {row['entropy']:.3f}  peak {row['peak']:.2f}\")",
    ].join("\n");
  }
  if (state.source === "record") {
    return [
      "import attemper",
      "",
      `record = attemper.Record.read(${JSON.stringify(state.record)})`,
      "print(record)",
      "for finding in attemper.health.check(record):",
      "    print(finding.level, finding.message)",
    ].join("\n");
  }
  const { from, where } = TASKS[state.task];
  const test = Object.entries(where)
    .map(([key, value]) => `run["${key}"] == ${JSON.stringify(value)}`)
    .join(" and ");
  return [
    "from attemper_lab.page.data.bundle import stored",
    "",
    `for run in stored("training")["${from}"]["runs"]:`,
    `    if ${test} and run["lr"] == ${state.lr} and run["rule"] in ("sqrt_dk", "none"):`,
    '        print(run["rule"], "steps", run["steps"])',
    '        for name, values in run["median"].items():',
    '            print(f"  {name}: {values}")',
  ].join("\n");
}
