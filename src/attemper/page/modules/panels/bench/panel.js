// The why-bench: drag d_k and see what the scale does to attention on random vectors.

export const benchPanel = {
  id: "bench", tab: "Why √d_k", title: "Why divide by √d_k?", lead: "Drag d_k. See what the scores do with the divisor and without it.",
  state: { d: { default: 64, least: 1, most: 1024, integer: true } },
  mount(root, page) {
    const shown = page.make("p", {}, "");
    const slider = page.make("input", { type: "range", min: 1, max: 1024, "aria-label": "d_k",
      oninput: () => page.set("bench", { d: slider.value }) });
    root.append(slider, shown);
    return {
      update(state) { slider.value = state.d; shown.textContent = `d_k = ${state.d}`; }, text: () => shown.textContent, json: () => ({ ...page.state() }),
    };
  },
};
