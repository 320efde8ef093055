// render(root, document): a scan's document as an interactive page. No globals, no markup parsed, nothing fetched.

import { LEVELS, SIGNS, SIGN_OF, measured, shortened } from "../data/numbers.js";
import { cleaned, cut, isolated, visible } from "../data/text.js";
import { album } from "../data/weights.js";
import { maker } from "./dom.js";
import { density, mapView } from "./map.js";
import { VIEWS, tokensView } from "../tokens/tokens.js";
import { findings, since, verdict } from "./findings.js";
import { lanesView } from "./lanes.js";
import { asked, audit, glossary, headView, notes, provenance, reading } from "./sections.js";

let made = 0; // several reports may be on one page, and their ids must differ

/** The document, indexed for the views: rows of heads, findings by layer and head, pictures, signs. */
export function read(given) {
  const document = cleaned(given);
  const lists = { inputs: [], layers: [], heads: [], findings: [], attention: [], images: [] };
  const scan = { ...document, verdict: document.verdict ?? { level: "ok", line: "" }, model: document.model ?? {} };
  for (const [name, empty] of Object.entries(lists)) scan[name] = document[name] ?? empty;
  const names = new Map();
  for (const one of [...scan.layers, ...scan.heads]) names.set(`${one.layer}|${one.kind}`, { layer: one.layer, kind: one.kind });
  const rows = [...names.values()], kinds = new Set(rows.map((row) => row.kind));
  const short = shortened(rows.map((row) => row.layer));
  rows.forEach((row, index) => Object.assign(row, { index, heads: new Map(), name: `${row.layer} (${row.kind})`,
    label: kinds.size > 1 && row.kind === "cross" ? `${short[index]} ×` : short[index] }));
  const at = (one) => rows.findIndex((row) => row.layer === one.layer && row.kind === one.kind);
  const find = (one) => ({ layer: at(one), head: one.head ?? rows[at(one)]?.heads.keys().next().value ?? 0 });
  for (const head of scan.heads) rows[find(head).layer].heads.set(head.head, head);
  const found = new Map();
  for (const finding of scan.findings) {
    const key = Number.isInteger(finding.head) ? `${at(finding)}.${finding.head}` : `${at(finding)}`;
    const all = [...(found.get(key) ?? []), finding];
    found.set(key, all.sort((a, b) => LEVELS.indexOf(b.level) - LEVELS.indexOf(a.level)));
  }
  const prefix = `attemper-${++made}-`;
  return { document: scan, rows, find, findings: found, heads: scan.heads, album: album(scan.attention), id: (name) => prefix + name,
    label: (one) => rows[at(one)]?.label ?? one.layer ?? "", columns: 1 + Math.max(0, ...scan.heads.map((head) => head.head)),
    keys: Math.max(2, ...scan.layers.map((layer) => layer.keys ?? 0)), signs: measured(scan.heads, [...SIGNS, ...tokenSign(scan)]) };
}

/** With `--token`, one more sign: the weight of the token on the key that gets most of it. */
function tokenSign({ token }) {
  if (!token?.best) return [];
  const key = (one) => `${one.layer}|${one.kind}|${one.head}`;
  const weights = new Map(token.heads.map((one) => [key(one), one.weights[token.best.position]]));
  const [asked, best] = [token.asked, token.best.token].map((word) => isolated(cut(visible(word), 20)));
  return [{ key: "token", label: `“${asked}” → “${best}”`, digits: 2, range: () => [0, 1],
    of: (head) => weights.get(key(head)),
    says: `The weight that “${asked}” (position ${token.position}) gives to “${best}” (position ${token.best.position}).` }];
}

/** Where a reader starts: at the token asked for, else at the worst finding. */
export function start(scan) {
  const { token, findings: all } = scan.document;
  const worst = all.find((finding) => finding.level !== "healthy") ?? all[0] ?? null; // of a head, or of a layer
  const begin = token?.best ?? worst;
  const first = { layer: 0, head: scan.rows[0]?.heads.keys().next().value ?? 0 };
  const place = begin && scan.find(begin).layer >= 0 ? scan.find(begin) : first;
  const wishes = [token?.best ? "token" : SIGN_OF[worst?.name], "effective_keys", scan.signs[0]?.key];
  const wanted = wishes.find((key) => scan.signs.some((sign) => sign.key === key));
  const at = token ? { side: "query", at: token.position } : null;
  return { sign: wanted, ...place, input: token?.input ?? 0, at, hide: false, view: null, thumbs: false };
}

/** State → "sign=peak&head=3.5&token=query.7": a link shows what its sender saw. */
export function toHash(state) {
  const token = state.at ? `${state.at.side}.${state.at.at}` : "none";
  const { sign, layer, head, input, hide, view, thumbs } = state;
  const parts = { sign, head: `${layer}.${head}`, text: input, token, hide: Number(hide), view, map: thumbs ? "thumbnails" : null };
  return new URLSearchParams(Object.entries(parts).filter(([, said]) => said !== null && said !== undefined)).toString();
}

/** The reverse; what this scan does not have keeps its initial value. */
export function fromHash(scan, hash, otherwise) {
  const said = new URLSearchParams(hash.replace(/^#/, "")), state = { ...otherwise };
  if (scan.signs.some((sign) => sign.key === said.get("sign"))) state.sign = said.get("sign");
  const [layer, head] = (said.get("head") ?? "").split(".").map(Number);
  if (scan.rows[layer]?.heads.has(head)) Object.assign(state, { layer, head });
  if (scan.document.inputs[said.get("text")]) state.input = Number(said.get("text"));
  const [side, at] = (said.get("token") ?? "").split("."), row = scan.rows[state.layer];
  const picture = row && scan.album(row.layer, row.kind, state.input), count = { query: picture?.queries, key: picture?.keys }[side];
  if (side === "none") state.at = null;
  if (/^\d+$/.test(at) && Number(at) < count) state.at = { side, at: Number(at) };
  if (Object.keys(VIEWS).includes(said.get("view"))) state.view = said.get("view");
  if (said.has("map")) state.thumbs = said.get("map") === "thumbnails";
  if (said.has("hide")) state.hide = said.get("hide") === "1";
  return state;
}

/** The choice between the reader's theme, light and dark. */
export function themes(make, root, redraw) {
  const set = (name) => {
    root.dataset.theme = name;
    for (const one of group.children) one.setAttribute("aria-pressed", String(one.textContent === name));
    redraw();
  };
  const group = make("span.tabs.themes", { role: "group", "aria-label": "Colours" },
    ["auto", "light", "dark"].map((name) => make("button.tab", { type: "button", "aria-pressed": String(name === "auto"),
      onclick: () => set(name) }, name)));
  return group;
}

/**
 * Draw a scan's document into an element, which it takes over. `options.location` (an object with `hash` and `replace(hash)`)
 * keeps what is chosen in an address. Returns a function that detaches it from the page.
 */
export function render(root, document, options = {}) {
  const page = root.ownerDocument, window = page.defaultView, make = maker(page), scan = read(document), first = start(scan);
  const media = (query) => window.matchMedia(query), dark = media("(prefers-color-scheme: dark)"), paper = media("print");
  let state = fromHash(scan, options.location?.hash ?? "", first);
  const wantsDark = () => root.dataset.theme === "dark" || (root.dataset.theme !== "light" && dark.matches);
  const theme = () => (wantsDark() && !paper.matches ? "dark" : "light");
  const show = () => views.forEach((view) => view.show(state, theme()));
  const set = (patch) => {
    state = { ...state, ...patch };
    options.location?.replace(toHash(state));
    show();
  };
  const choose = (layer, head) => {
    set({ layer, head });
    work.querySelector(".looks h2")?.scrollIntoView({ block: "nearest" }); // on a narrow page it lies below the map
  };
  const act = { set, choose, state: () => state,
    lock: (side, at) => set({ at: state.at?.side === side && state.at.at === at ? null : { side, at } }),
    find(finding) {
      const place = scan.find(finding), sign = scan.signs.find((one) => one.key === (finding.sign ?? SIGN_OF[finding.name]));
      if (scan.rows[place.layer]?.heads.has(place.head)) set({ ...place, sign: sign?.key ?? state.sign });
      work.scrollIntoView({ behavior: media("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth", block: "start" });
      root.querySelector('button.cell[aria-pressed="true"]')?.focus({ preventScroll: true });
    } };
  const shown = scan.signs.length ? { map: mapView, head: headView, tokens: tokensView, lanes: lanesView } : {};
  const views = new Map(Object.entries(shown).map(([name, view]) => [name, view(make, scan, act)]).filter(([, view]) => view));
  const node = (name) => views.get(name)?.node ?? null;
  const { tall, broad } = density(scan);
  const work = make(`div.work${tall ? ".tall" : ""}${broad ? ".broad" : ""}`, {}, node("map"), make("div.looks", {}, asked(make, scan, act), node("tokens")), node("head"));
  const { model, attemper, created } = scan.document;
  const said = [model.class, model.dtype, attemper && `attemper ${attemper}`, created?.slice(0, 10)];
  const heading = make("div.top", {}, make("span.brand", {}, "attemper scan"), make("bdi.model", {}, model.name ?? ""),
    make("span.facts", {}, said.filter(Boolean).join(" · ")), themes(make, root, show));
  root.classList.add("attemper");
  root.replaceChildren(make("header", {}, heading, verdict(make, scan, act), reading(make, scan)),
    views.size ? work : make("p", {}, "No head was measured."),
    ...[findings, since, () => node("lanes"), audit, glossary, notes, provenance].map((part) => part(make, scan, act)).filter(Boolean));
  const escape = (event) => event.key === "Escape" && state.at && set({ at: null });
  const moved = () => { state = fromHash(scan, options.location?.hash ?? "", state); show(); };
  const listeners = [[page, "keydown", escape], [dark, "change", show], [paper, "change", show], [window, "hashchange", moved]];
  for (const [target, kind, listener] of listeners) target.addEventListener(kind, listener);
  show();
  return () => listeners.forEach(([target, kind, listener]) => target.removeEventListener(kind, listener));
}
