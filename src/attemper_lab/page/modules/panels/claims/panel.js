// The claims about √d_k: whether each holds, under which condition, and the numbers that decide it.

import { written } from "../../../report/data/numbers.js";
import { standalone } from "../../draw/svg.js";
import { barsFigure } from "./bars.js";

export const VERDICTS = ["holds", "holds with a condition", "false", "not decided", "not run"];
const MARKS = { holds: "✓", "holds with a condition": "◐", false: "✕", "not decided": "?", "not run": "–" };
const KINDS = { holds: "yes", "holds with a condition": "part", false: "no", "not decided": "open", "not run": "open" };
const IDS = Array.from({ length: 60 }, (_, i) => `C${i + 1}`);

const sentence = (words) => (words ? `${words[0].toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}` : "");

/** A claim in words: for a reader who does not see the picture. */
function claimWords(claim) {
  const lines = [`${claim.id}. ${claim.claim}`, `Verdict: ${claim.verdict}${claim.condition ? `: ${claim.condition}` : ""}.`];
  for (const [title, numbers] of [
    ["Measured", claim.numbers],
    ["To compare", claim.context],
  ]) {
    const entries = Object.entries(numbers);
    if (entries.length) lines.push(`${title}:`, ...entries.map(([name, value]) => `- ${name}: ${value === null ? "∞" : value}`));
  }
  for (const { note, says } of claim.said) lines.push(`Note ${note} says: ${says}`);
  if (claim.look) lines.push(`Measure more: ${claim.look}`);
  return lines.join("\n");
}

/** The two lists of numbers of a claim. */
function numbersTable(make, claim) {
  const rows = (numbers, kind) =>
    Object.entries(numbers).map(([name, value]) =>
      make(`tr${kind}`, {}, make("th", { scope: "row" }, name), make("td.num", {}, value === null ? "∞" : written(value))),
    );
  const count = Object.keys(claim.numbers).length + Object.keys(claim.context).length;
  return count
    ? make(
        "details.more",
        {},
        make("summary", {}, `All ${count} numbers`),
        make(
          "table.numbers",
          {},
          make("caption.unseen", {}, `Numbers of ${claim.id}`),
          make("tbody", {}, rows(claim.numbers, ""), rows(claim.context, ".beside")),
        ),
        Object.keys(claim.context).length ? make("p.dim", {}, "Grey numbers are for comparison: they do not decide the verdict.") : null,
      )
    : null;
}

/** What stands below a claim when it is open. */
function body(page, claim, titles) {
  const { make } = page,
    width = page.document.defaultView.innerWidth < 760 ? 340 : 500,
    svg = barsFigure(page, claim, width);
  const said = claim.said.length
    ? make(
        "details.more",
        {},
        make("summary", {}, `Who says so: ${claim.said.length} of the notes' sentences`),
        make(
          "ul",
          {},
          claim.said.map(({ note, says }) => make("li", {}, says, make("span.dim", {}, ` (note ${note}: ${titles[note] ?? ""})`))),
        ),
      )
    : null;
  const node = make(
    "div.claim-body",
    {},
    make(
      "div.words",
      {},
      claim.condition
        ? make(
            "p.condition",
            {},
            make("strong", {}, claim.verdict === "holds with a condition" ? "The condition. " : "In short. "),
            sentence(claim.condition),
          )
        : null,
      numbersTable(make, claim),
      said,
      claim.look ? make("p.look", {}, make("span.dim", {}, "Measure it: "), make("code", {}, claim.look)) : null,
    ),
    svg ? make("figure", {}, svg) : make("p.dim", {}, "Training decides this one: see the Training tab."),
  );
  return { node, svg };
}

export const claimsPanel = {
  id: "claims",
  tab: "Claims",
  title: "What is said about √d_k, measured",
  lead: "Textbook sentences on the scale, each with a verdict, its condition, and the numbers that decide it.",
  state: {
    show: { default: "all", choices: ["all", ...VERDICTS] },
    open: { default: "C6", choices: ["none", ...IDS] },
  },
  mount(root, page) {
    const { make } = page,
      found = page.data.claims ?? { claims: [] },
      claims = found.claims,
      opened = new Map();
    const counts = Object.fromEntries(VERDICTS.map((verdict) => [verdict, claims.filter((one) => one.verdict === verdict).length]));
    const chips = ["all", ...VERDICTS.filter((verdict) => counts[verdict])].map((verdict) =>
      make(
        `button.chip.${KINDS[verdict] ?? "every"}`,
        {
          type: "button",
          "data-verdict": verdict,
          onclick: () => page.set("claims", { show: verdict }),
        },
        verdict === "all" ? null : make("span.mark", { "aria-hidden": "true" }, MARKS[verdict]),
        ` ${verdict} `,
        make("span.count", {}, String(verdict === "all" ? claims.length : counts[verdict])),
      ),
    );
    const rows = claims.map((claim) => {
      const kind = KINDS[claim.verdict],
        id = `claim-${claim.id}`;
      const button = make(
        "button.claim-head",
        {
          type: "button",
          "aria-expanded": "false",
          "aria-controls": id,
          onclick: () => page.set("claims", { open: page.state("claims").open === claim.id ? "none" : claim.id }),
        },
        make(`span.mark.${kind}`, { "aria-hidden": "true" }, MARKS[claim.verdict]),
        make("span.says", {}, claim.claim),
        make(`span.verdict.${kind}`, {}, claim.verdict),
        make("span.id.dim", {}, claim.id),
      );
      const place = make("div", { id, hidden: true });
      return { claim, button, place, node: make("li.claim", {}, make("h2", {}, button), place) };
    });
    const made = found.made
      ? make(
          "p.dim.made",
          {},
          `Judged with attemper ${found.made.attemper} and torch ${found.made.torch}. `,
          "Times are those of one machine. ",
          make("code", {}, "attemper claims"),
          " judges them all on yours; models that train were measured before, and ",
          make("code", {}, "attemper claims --train"),
          " trains them there.",
        )
      : null;
    root.append(
      found.one_line ? make("blockquote.in-short", {}, found.one_line) : "",
      make("div.chips", { role: "group", "aria-label": "Show claims by verdict", "data-control": "claims.show" }, chips),
      make(
        "ol.claims",
        {},
        rows.map((row) => row.node),
      ),
      made ?? "",
    );
    const current = () => claims.find((one) => one.id === page.state("claims").open) ?? null;
    return {
      update({ show, open }) {
        for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.dataset.verdict === show));
        for (const { claim, button, place, node } of rows) {
          const chosen = claim.id === open;
          node.hidden = show !== "all" && claim.verdict !== show;
          button.setAttribute("aria-expanded", String(chosen));
          place.hidden = !chosen;
          node.classList.toggle("open", chosen);
          if (chosen && !opened.has(claim.id)) {
            opened.set(claim.id, body(page, claim, found.notes ?? {}));
            place.append(opened.get(claim.id).node);
          }
        }
      },
      text: () => (current() ? [current()] : claims).map(claimWords).join("\n\n"),
      figures: () =>
        current() && opened.get(current().id)?.svg ? [{ name: current().id, svg: () => standalone(opened.get(current().id).svg) }] : [],
      json: () => (current() ? { made: found.made, claims: [current()] } : found),
      python: () =>
        [
          "from attemper_lab.page.data.bundle import stored",
          "",
          `# as recorded; attemper claims${current() ? ` ${current().id}` : ""} measures again, which may take minutes`,
          'for one in stored("claims")["claims"]:',
          ...(current() ? [`    if one["id"] != "${current().id}":`, "        continue"] : []),
          '    print(one["id"], one["claim"])',
          '    print(" ", one["verdict"], "|", one["condition"])',
          '    for name, value in one["numbers"].items():',
          '        print(f"  {name}: {value}")',
        ].join("\n"),
      unmount() {
        root.replaceChildren();
      },
    };
  },
};
