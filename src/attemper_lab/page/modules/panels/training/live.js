// A run that is started from the page, and a record that is followed, from the server's events.

const LOST = "The server does not answer. Is `attemper serve` still running? Trying again.";

/** A training run of the server: `begin(settings)`, `cancel()`; `changed()` is called at every event. */
export function pageRun(page, changed) {
  const run = { id: null, rows: [], rules: [], going: false, done: 0, says: "" };
  let stop = null,
    cancelled = false; // before the server has sent the id of the run
  function take({ name, data }) {
    if (name === "waiting") {
      run.rows = [];
      run.says = "Waiting for the server: it loads torch when it is first asked.";
    }
    if (name === "row") {
      run.rows.push(data);
      run.done = data.done;
      run.says = "";
    }
    if (name === "ended") {
      run.going = false;
      run.done = 1;
      run.says = "The run has ended.";
    }
    if (name === "cancelled") {
      run.going = false;
      run.says = "Cancelled.";
    }
    if (name === "failed") {
      run.going = false;
      run.says = data.error;
    }
    if (name === "lost") run.says = LOST;
    if (["ended", "cancelled", "failed"].includes(name)) page.announce(run.says);
    changed();
  }
  return Object.assign(run, {
    async begin(settings) {
      stop?.();
      cancelled = false;
      Object.assign(run, { id: null, rows: [], rules: settings.rules, going: true, done: 0, says: "Asking the server." });
      changed();
      try {
        run.id = (await page.source.json("/runs", settings)).id;
        stop = page.source.events(`/runs/${run.id}/events`, take);
        if (cancelled) await run.cancel();
      } catch (error) {
        Object.assign(run, { going: false, says: error.message });
        changed();
      }
    },
    async cancel() {
      cancelled = run.id === null;
      if (cancelled) return;
      try {
        await page.source.remove(`/runs/${run.id}`);
      } catch (error) {
        run.says = error.message;
        changed();
      }
    },
    end() {
      stop?.();
    },
  });
}

/** The record that the server follows: `open()` begins; `changed()` is called whenever a step is added. */
export function followedRecord(page, changed) {
  const followed = { record: null, says: "", live: false };
  let stop = null;
  return Object.assign(followed, {
    open() {
      if (stop || !page.source) return;
      followed.says = "Reading the record.";
      stop = page.source.events("/record/events", ({ name, data }) => {
        if (name === "record") Object.assign(followed, { record: data, live: true, says: "" });
        if (name === "failed") Object.assign(followed, { live: false, says: data.error });
        if (name === "lost") Object.assign(followed, { live: false, says: LOST });
        changed();
      });
    },
    end() {
      stop?.();
      stop = null;
    },
  });
}

const SHAPES = { healthy: "◇", ok: "✓", note: "●", warn: "▲", error: "◆", critical: "■", diverging: "✕" };

const placeOf = ({ layer, head }) => `${layer}${head === null ? "" : `, head ${head}`}`;

/** Findings with the same level and advice together: their advice is read once. */
function byKind(findings) {
  const kinds = new Map();
  for (const one of findings) {
    const key = `${one.level} ${one.name} ${one.advice}`;
    kinds.set(key, [...(kinds.get(key) ?? []), one]);
  }
  return [...kinds.values()];
}

/** The verdict and the findings of the last step of a record. */
export function findingsList(page) {
  const { make } = page,
    verdict = make("p.record-verdict", { role: "status" }),
    list = make("ul.findings"),
    more = make("p.dim");
  const node = make("section.record-findings", {}, make("h2", {}, "Findings in the last step"), verdict, list, more);
  return {
    node,
    update(record) {
      const last = record?.steps.at(-1)?.step;
      node.hidden = last === undefined; // nothing was measured, so nothing is healthy yet
      if (node.hidden) return;
      verdict.replaceChildren(
        make(`span.level.${record.verdict.level}`, {}, `${SHAPES[record.verdict.level] ?? "●"} `),
        record.verdict.line,
      );
      list.replaceChildren(
        ...byKind(record.findings).map((same) => {
          const [one] = same;
          return make(
            "li",
            {},
            make(`span.level.${one.level}`, {}, `${SHAPES[one.level]} ${one.level} `),
            make("strong", {}, `${one.title ?? one.name}`),
            make("span.dim", {}, ` ${same.map(placeOf).join("; ")}`),
            make("p", {}, same.length > 1 ? `${placeOf(one)}: ` : "", one.message, " ", make("span.dim", {}, one.advice)),
          );
        }),
      );
      const hidden = record.more;
      more.textContent = [
        `Step ${last}, ${record.heads.length} heads.`,
        hidden ? `${hidden} more findings.` : "",
        record.damaged ? `${record.damaged} damaged lines were left out.` : "",
      ]
        .filter(Boolean)
        .join(" ");
    },
  };
}
