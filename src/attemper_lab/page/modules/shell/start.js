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
function windowAddress(view) {
  const write = (how, hash) => {
    try {
      view.history[how](null, "", `#${hash}`);
    } catch {
      /* a frame without an address of its own */
    }
  };
  return {
    get hash() {
      return view.location.hash;
    },
    get href() {
      const published = view.document.querySelector("link[rel=canonical]")?.href; // where the file is on the web
      return published ? `${published}${view.location.hash}` : view.location.href;
    },
    replace(hash) {
      write("replaceState", hash);
    },
    /** A new entry of the history, so that Back returns to the tab before. */
    enter(hash) {
      write("pushState", hash);
    },
    name(title) {
      view.document.title = title;
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
    href: null, // there is no link to a notebook's cell
    replace(next) {
      this.hash = next;
    },
    enter(next) {
      this.hash = next;
    },
    name() {}, // the notebook has its own title
    changed() {},
  };
}

/** What becomes of what somebody types. */
function sent(view, source) {
  const own = ["localhost", "127.0.0.1", "[::1]", ""].includes(view.location?.hostname ?? "");
  if (!source || own) return "Nothing of this page is sent anywhere.";
  return `What you type is sent to ${view.location.hostname}, which runs the model, and nowhere else.`;
}

/** The offline page, which contains its data. */
export function open(page) {
  start(page.getElementById("page"), JSON.parse(page.getElementById("data").textContent));
}

/** The argument of every panel: state, data, source, motion, announce. */
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
    front: shared.fronts.get(panel.id) ?? null, // the first screen, above the tabs
    head: shared.head,
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

/** The frame around the panels: the first screen of the panel that has one, header, one section for each panel, footer. */
function frame(shared, { list, theme }) {
  const { make, panels } = shared;
  const titled = ({ title, lead }) => make("header.panel-head", {}, make("h1", {}, title), make("p.lead", {}, lead));
  const fronts = new Map(
    panels
      .filter((panel) => panel.front)
      .map((panel) => [panel.id, make(`section.front.${panel.id}`, { "aria-label": panel.title, hidden: true }, titled(panel))]),
  );
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
        panel.front ? null : titled(panel),
        make(`div.panel-body.${panel.id}`),
      ),
    ]),
  );
  const head = make("div.page-head", {}, make("span.brand", {}, "attemper"), list, theme);
  const foot = make("footer.page-foot");
  shared.root.replaceChildren(make("main", {}, [...fronts.values()], head, [...sections.values()]), foot, shared.live);
  return { fronts, sections, head, foot };
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
  // else JupyterLab takes single letters for commands: x cuts the cell. It asks the element that has the focus, before those around it
  root.addEventListener("focusin", (event) => event.target.setAttribute("data-lm-suppress-shortcuts", "true"));
  const tabs = tabList(make, panels, choose),
    theme = themeButton(shared, () => changed());
  const { fronts, sections, head, foot } = frame(shared, { list: tabs.list, theme: theme.button });
  Object.assign(shared, { fronts, head });
  foot.append(
    make(
      "p.dim",
      {},
      sent(view, source),
      make("span.by-key", {}, " Tab moves between controls; arrow keys move a slider, a tab or a choice; Esc closes."),
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
  const alone = root.parentElement === page.body; // in a notebook, keys outside the page are not its own
  // where Space goes on to the next step, it must not press again what a mouse has just pressed
  root.addEventListener("click", (event) => {
    const pressed = alone && event.detail > 0 && panels.find(({ id }) => id === shared.now.tab)?.space && page.activeElement;
    if (pressed && pressed.matches("button, input[type=checkbox]") && root.contains(pressed) && !pressed.closest("dialog")) pressed.blur();
  });
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
    if (late) keep();
    if (id !== shared.now.tab) {
      shared.now.tab = id;
      kept.enter(toAddress(shared.now, panels));
    }
    changed();
    if (page.activeElement?.matches(".tab:focus-visible")) head.scrollIntoView({ block: "nearest" }); // the keyboard stays in sight
    else view.scrollTo?.({ top: 0 });
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
      for (const place of [fronts, sections]) if (place.has(panel.id)) place.get(panel.id).hidden = !chosen;
      if (chosen && !mounted.has(panel.id)) mount(panel);
      if (chosen) kept.name(`${panel.title} · attemper`);
    }
    for (const node of root.querySelectorAll("[data-control]")) node.classList.toggle("hidden-by-address", hide.has(node.dataset.control));
  }
  kept.changed(() => {
    written = -Infinity; // so that unreadable parts leave the address at once
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
