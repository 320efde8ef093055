// Runs as the charts draw them: for each rule, steps, and for each column the median over seeds, the least and the most.

export const RULE_NAMES = { sqrt_dk: "÷ √d_k", none: "no scale", dk: "÷ d_k", qk_norm: "QK-norm", learned: "learned", softcap: "softcap" };
const LANES = { sqrt_dk: "chosen", none: "none" };
const laneOfRule = (rule) => LANES[rule] ?? "other";

/** The recorded runs that can be chosen: a task, and the settings that select its runs. */
export const TASKS = {
  language: {
    from: "charlm",
    where: { init: "unit" },
    d: 64,
    title: "Language model",
    says: "characters of Python source; q and k of variance 1 at the start",
  },
  small: {
    from: "charlm",
    where: { init: "small" },
    d: 64,
    title: "Language model, small start",
    says: "the same; projections drawn with std 0.02, as GPT-2 draws them",
  },
  recall256: {
    from: "recall",
    where: { d: 256 },
    d: 256,
    title: "Recall, d_k = 256",
    says: "look up one of 32 pairs just seen; one layer, one head",
  },
  recall64: { from: "recall", where: { d: 64 }, d: 64, title: "Recall, d_k = 64", says: "the same, with shorter vectors" },
};

const matches = (run, where) => Object.entries(where).every(([key, value]) => run[key] === value);

/** The recorded runs of a task. */
const runsOf = (training, task) => (training?.[TASKS[task].from]?.runs ?? []).filter((run) => matches(run, TASKS[task].where));

/** The learning rates at which both lanes of a task were run. */
export function ratesOf(training, task) {
  const found = runsOf(training, task),
    rates = (rule) => new Set(found.filter((run) => run.rule === rule).map((run) => run.lr));
  const bare = rates("none");
  return [...rates("sqrt_dk")].filter((lr) => bare.has(lr)).sort((a, b) => a - b);
}

/** Recorded runs as series: `{rule, lane, steps, seeds, median, least, most}`, the rule with a scale last, so that it is drawn on top. */
export function recordedSeries(training, task, lr) {
  const found = runsOf(training, task).filter((run) => run.lr === lr && (run.rule === "none" || run.rule === "sqrt_dk"));
  return found.map((run) => ({ ...run, lane: laneOfRule(run.rule) })).sort((a) => (a.rule === "none" ? -1 : 1));
}

/** Rows that come one by one, as series; each is its own median. */
export function liveSeries(rows, rules) {
  const begun = rules.filter((rule) => rows.some((row) => row.rule === rule)).sort((a) => (a === "none" ? -1 : 1));
  return begun.map((rule) => {
    const mine = rows.filter((row) => row.rule === rule),
      columns = {};
    for (const name of new Set(mine.flatMap(Object.keys))) columns[name] = mine.map((row) => row[name] ?? null);
    return { rule, lane: laneOfRule(rule), seeds: 1, steps: mine.map((row) => row.step), median: columns, least: columns, most: columns };
  });
}

/** A record's steps as one series. */
export function recordSeries(record) {
  const columns = {};
  for (const name of new Set(record.steps.flatMap(Object.keys))) columns[name] = record.steps.map((row) => row[name] ?? null);
  return record.steps.length
    ? [{ rule: "yours", lane: "chosen", seeds: 1, steps: columns.step, median: columns, least: columns, most: columns }]
    : [];
}

/** The index of the last step that is not after `step`; −1 before the first. */
export function placeOf(series, step) {
  let place = -1;
  while (place + 1 < series.steps.length && series.steps[place + 1] <= step) place++;
  return place;
}

export const lastStep = (all) => Math.max(0, ...all.flatMap((series) => series.steps));
export const valueAt = (series, key, step) => {
  const place = placeOf(series, step);
  return place < 0 ? null : (series.median[key]?.[place] ?? null);
};
