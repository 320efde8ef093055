// The row of tabs: one for each panel that the address does not hide.

import { stepped } from "./keyboard.js";

/** A tab list; `choose(id)` is called when a tab is chosen. `show(id, hide)` brings it up to date. */
export function tabList(make, panels, choose) {
  const tabs = panels.map((panel) =>
    make(
      "button.tab",
      {
        type: "button",
        role: "tab",
        id: `tab-${panel.id}`,
        "aria-controls": `panel-${panel.id}`,
        "data-control": panel.id,
        onclick: () => choose(panel.id),
      },
      panel.tab ?? panel.title,
    ),
  );
  let shown = null;
  const list = make("div.tabs", { role: "tablist", "aria-label": "Parts of this page", "data-control": "tabs" }, tabs);
  list.addEventListener("keydown", (event) => {
    const there = tabs.filter((tab) => !tab.hidden),
      at = there.indexOf(event.target);
    const next = at < 0 ? null : stepped(event.key, at, there.length);
    if (next === null) return;
    event.preventDefault();
    there[next].focus();
    choose(panels[tabs.indexOf(there[next])].id);
  });
  return {
    list,
    show(id) {
      tabs.forEach((tab, i) => {
        const chosen = panels[i].id === id;
        tab.setAttribute("aria-selected", String(chosen));
        tab.setAttribute("tabindex", chosen ? "0" : "-1");
        // where not all tabs fit, the chosen one is brought into sight; the page itself does not move
        if (chosen && id !== shown && list.scrollWidth > list.clientWidth)
          list.scrollLeft = tab.offsetLeft - list.offsetLeft - (list.clientWidth - tab.offsetWidth) / 2;
      });
      shown = id;
    },
  };
}
