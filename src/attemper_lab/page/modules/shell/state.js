// The state of all panels, and how it stands in the address: `tab=bench&bench.d=32&hide=scores,bench.n`. Only what differs
// from its default is written. What cannot be read is left at its default.

const LONGEST = 4000; // characters of one text

/** A value, or the text of one in an address, checked against its description; undefined if it does not fit. */
export function allowed(about, given) {
  if (about.choices) return about.choices.includes(given) ? given : undefined;
  if (typeof about.default === "boolean") return { true: true, false: false, 1: true, 0: false }[given];
  if (typeof about.default === "number") {
    const number = given === "" || given === null ? NaN : Number(given);
    if (!Number.isFinite(number)) return undefined;
    const held = Math.min(about.most ?? Infinity, Math.max(about.least ?? -Infinity, number));
    return about.integer ? Math.round(held) : held;
  }
  return typeof given === "string" ? given.slice(0, about.longest ?? LONGEST) : undefined;
}

/** All the defaults of a panel. */
export const defaults = (panel) => Object.fromEntries(Object.entries(panel.state ?? {}).map(([key, about]) => [key, about.default]));

/** What an address says: `{tab, hide, values: {panel id: {key: value}}}`. */
export function fromAddress(hash, panels) {
  const pairs = new URLSearchParams(hash.replace(/^#/, ""));
  const values = {};
  for (const panel of panels) {
    values[panel.id] = defaults(panel);
    for (const [key, about] of Object.entries(panel.state ?? {})) {
      const text = pairs.get(`${panel.id}.${key}`);
      const read = text === null ? undefined : allowed(about, text);
      if (read !== undefined) values[panel.id][key] = read;
    }
  }
  const hide = new Set((pairs.get("hide") ?? "").split(",").filter(Boolean));
  const offered = panels.filter((panel) => !hide.has(panel.id));
  const tab = (offered.find((panel) => panel.id === pairs.get("tab")) ?? offered[0] ?? panels[0]).id;
  const theme = ["light", "dark"].includes(pairs.get("theme")) ? pairs.get("theme") : "system";
  return { tab, hide, theme, values };
}

/** The address of a state. */
export function toAddress({ tab, hide, theme, values }, panels) {
  const pairs = new URLSearchParams();
  if (tab !== panels.find((panel) => !hide.has(panel.id))?.id) pairs.set("tab", tab);
  for (const panel of panels) {
    for (const [key, about] of Object.entries(panel.state ?? {})) {
      const value = values[panel.id][key];
      if (value !== about.default) pairs.set(`${panel.id}.${key}`, String(value));
    }
  }
  if (theme !== "system") pairs.set("theme", theme);
  if (hide.size) pairs.set("hide", [...hide].join(","));
  return pairs.toString().replaceAll("%2C", ",");
}
