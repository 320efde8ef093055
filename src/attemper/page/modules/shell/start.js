// The page: tabs, one panel at a time, its tools; the state of all of them in the address.

import { maker } from "../../report/views/dom.js";
import { draw } from "../draw/svg.js";
import { typesetting } from "../draw/words.js";
import { PANELS } from "./panels.js";
import { allowed, fromAddress, toAddress } from "./state.js";
import { tabList } from "./tabs.js";
import { hiding, tools } from "./tools.js";

const SELDOM = 150; // milliseconds between two changes of the address
const THEMES = ["system", "light", "dark"];

/** An address that lasts: that of the browser's window. */
export function windowAddress(view) {
  return {
    get hash() {
      return view.location.hash;
    },
    get href() {
      return view.location.href;
    },
    replace(hash) {
      try {
        view.history.replaceState(null, "", `#${hash}`);
      } catch {
        /* a frame without an address of its own */
      }
    },
    changed(listener) {
      view.addEventListener("hashchange", listener);
    },
  };
}

/** An address that only this page knows: in a notebook. */
export function ownAddress(hash = "") {
  return {
    hash,
    get href() {
      return `#${this.hash}`;
    },
    replace(next) {
      this.hash = next;
    },
    changed() {},
  };
}

/** The offline page: its data stand in it. */
export function open(page) {
  start(page.getElementById("page"), JSON.parse(page.getElementById("data").textContent));
}

/** What panels are given: state, data, source, motion, announce. */
function context(shared, panel, change) {
  return {
    state: (id = panel.id) => shared.now.values[id],
    set(id, values) {
      const target = shared.panels.find((one) => one.id === id);
      for (const [key, value] of Object.entries(values)) {
        const held = target.state?.[key] ? allowed(target.state[key], value) : undefined;
        if (held !== undefined) shared.now.values[id][key] = held;
      }
      change(id);
    },
    open: (id) => shared.choose(id),
    get motion() {
      return !shared.view.matchMedia("(prefers-reduced-motion: reduce)").matches;
    },
    data: shared.data,
    source: shared.source,
    announce: shared.announce,
    make: shared.make,
    pen: draw(shared.page),
    document: shared.page,
  };
}

/** Light, dark, or what the system says. */
function themeButton(shared, change) {
  const button = shared.make("button.plain.theme", {
    type: "button",
    "data-control": "theme",
    onclick() {
      shared.now.theme = THEMES[(THEMES.indexOf(shared.now.theme) + 1) % THEMES.length];
      change();
    },
  });
  return {
    button,
    show() {
      button.textContent = { system: "◐", light: "○", dark: "●" }[shared.now.theme];
      const words = `Colours: ${shared.now.theme}. Press to change.`;
      button.setAttribute("aria-label", words);
      button.title = words;
    },
  };
}

/** The frame around the panels: header, one section for each panel, footer. */
function frame(shared, { list, theme }) {
  const { make, panels } = shared;
  const sections = new Map(
    panels.map((panel) => [
      panel.id,
      make(
        "section.panel",
        {
          role: "tabpanel",
          id: `panel-${panel.id}`,
          "aria-labelledby": `tab-${panel.id}`,
          hidden: true,
        },
        make("header.panel-head", {}, make("h1", {}, panel.title), make("p.lead", {}, panel.lead)),
        make(`div.panel-body.${panel.id}`),
      ),
    ]),
  );
  const head = make("header.page-head", {}, make("span.brand", {}, "attemper"), list, theme);
  const foot = make("footer.page-foot");
  shared.root.replaceChildren(head, make("main", {}, [...sections.values()]), foot, shared.live);
  return { sections, foot };
}

/**
 * Start the page in `root`. `data` is what panels read, `source` how a served page asks for more (null offline), `address` where
 * the state is kept. Gives `{unmount}`.
 */
export function start(root, data, { source = null, address = null, panels = PANELS } = {}) {
  const page = root.ownerDocument,
    view = page.defaultView,
    make = typesetting(maker(page));
  const kept = address ?? windowAddress(view),
    live = make("div.unseen", { "aria-live": "polite" });
  const shared = {
    root,
    page,
    view,
    make,
    data,
    source,
    panels,
    live,
    now: fromAddress(kept.hash, panels),
    announce: (text) => {
      live.textContent = text;
    },
    choose,
  };
  const mounted = new Map(),
    due = new Set();
  let asked = 0,
    late = 0,
    written = -Infinity;
  root.classList.add("attemper-page");
  const tabs = tabList(make, panels, choose),
    theme = themeButton(shared, () => changed());
  const { sections, foot } = frame(shared, { list: tabs.list, theme: theme.button });
  foot.append(
    make(
      "p.dim",
      {},
      "Nothing of this page is sent anywhere. Tab moves between controls; arrow keys move a slider, a tab or a choice; Esc closes.",
    ),
    hiding(
      make,
      root,
      () => shared.now.hide,
      (hide) => {
        shared.now.hide = hide;
        changed();
      },
    ),
  );

  /** Write the address: at once, but while a slider moves only now and then, since browsers limit how often it may change. */
  function keep() {
    clearTimeout(late);
    late = 0;
    kept.replace(toAddress(shared.now, panels));
    written = view.performance.now();
  }
  for (const type of ["pointerup", "keyup", "change", "click"]) root.addEventListener(type, () => late && keep());
  /** Keep the state, and bring panels up to date once, at the next frame. */
  function changed(id = null) {
    if (view.performance.now() - written > SELDOM) keep();
    else late ||= setTimeout(keep, SELDOM);
    if (id) due.add(id);
    if (!asked) asked = view.requestAnimationFrame(frameDue);
  }
  function linked() {
    if (late) keep();
    return kept.href;
  }
  function frameDue() {
    asked = 0;
    show();
    for (const id of due) {
      due.delete(id);
      mounted.get(id)?.update?.(shared.now.values[id]);
    }
  }
  function choose(id) {
    shared.now.tab = id;
    changed();
    view.scrollTo?.({ top: 0 });
  }
  function mount(panel) {
    const section = sections.get(panel.id),
      body = section.querySelector(".panel-body");
    const made = panel.mount(body, context(shared, panel, changed)) ?? {};
    mounted.set(panel.id, made);
    section.append(tools(make, root, panel, made, { announce: shared.announce, link: linked }));
    made.update?.(shared.now.values[panel.id]);
  }
  function show() {
    const { tab, hide, theme: colours } = shared.now;
    if (colours === "system") delete root.dataset.theme;
    else root.dataset.theme = colours;
    theme.show();
    tabs.show(tab);
    for (const panel of panels) {
      const chosen = panel.id === tab;
      sections.get(panel.id).hidden = !chosen;
      if (chosen && !mounted.has(panel.id)) mount(panel);
    }
    for (const node of root.querySelectorAll("[data-control]")) node.classList.toggle("hidden-by-address", hide.has(node.dataset.control));
  }
  kept.changed(() => {
    written = -Infinity; // what cannot be read leaves the address at once
    shared.now = Object.assign(shared.now, fromAddress(kept.hash, panels));
    for (const id of mounted.keys()) due.add(id);
    changed();
  });
  show();
  return {
    shared,
    mounted,
    unmount() {
      clearTimeout(late);
      for (const made of mounted.values()) made.unmount?.();
      root.replaceChildren();
    },
  };
}
