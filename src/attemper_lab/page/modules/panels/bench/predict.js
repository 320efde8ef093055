// Predict, then reveal: three questions before anything is dragged. An answer moves the bench to the state that decides it.

import { say } from "../../draw/words.js";
import { written } from "../../../report/data/numbers.js";

/** `state` is where the answer can be seen; `answer(found)` tells it with the measured number. */
const QUESTIONS = [
  {
    asks: "A query and a key have 256 random numbers each, of variance 1. How far does q·k spread (std)?",
    choices: ["1", "16", "128", "256"],
    right: 1,
    state: { d: 256, rule: "none", n: 64, aligned: false },
    answer: ({ bare }) =>
      `Measured: ${written(bare.signs.std, 1)}. Variances add: 256 products of variance 1 make 256, and the spread is its root, 16.`,
  },
  {
    asks: "What must q·k be divided by, so that the spread is 1 again?",
    choices: ["2", "√256 = 16", "256"],
    right: 1,
    state: { d: 256, rule: "sqrt_dk", n: 64, aligned: false },
    answer: ({ second }) =>
      `Divided by 16 it measures ${written(second.signs.std, 2)}. Divided by c, a variance falls by c²; so c is the root, at every d_k: drag it.`,
  },
  {
    asks: "And if one divides by d_k = 256 itself: how many of 64 keys share the weight?",
    choices: ["about 1", "about 40", "all 64"],
    right: 2,
    state: { d: 256, rule: "dk", n: 64, aligned: false },
    answer: ({ second }) =>
      `${written(second.signs.effective_keys, 1)} of 64: the spread is ${written(second.signs.std, 3)}, so softmax sees hardly any difference, ` +
      "and the larger d_k is, the less. Too flat, where no divisor is too sharp.",
  },
];

/** A line with one question. */
export function prediction(page) {
  const { make } = page;
  let at = 0,
    answered = null;
  const asks = make("p.asks"),
    choices = make("div.row"),
    says = make("p.says", { role: "status" });
  const next = make("button.plain", {
    type: "button",
    onclick() {
      at = (at + 1) % QUESTIONS.length;
      answered = null;
      show();
      choices.querySelector("button").focus();
    },
  });
  const node = make(
    "section.predict",
    { "data-control": "bench.predict", "aria-label": "Predict, then reveal" },
    make("h2", {}, "Predict first"),
    asks,
    choices,
    says,
    next,
  );
  function show() {
    const { asks: words, choices: offered, right } = QUESTIONS[at];
    say(page, asks, words);
    choices.replaceChildren(
      ...offered.map((words_, i) => {
        const mark = answered === null ? "" : i === right ? " ✓" : i === answered ? " ✗" : "";
        return make(
          `button.plain.choice${mark === " ✓" ? ".right" : ""}`,
          { type: "button", "aria-pressed": String(i === answered), onclick: () => choose(i) },
          words_ + mark,
        );
      }),
    );
    says.hidden = next.hidden = answered === null;
    next.textContent = at + 1 < QUESTIONS.length ? "Next question" : "Start over";
  }
  function choose(i) {
    answered = i;
    page.set("bench", QUESTIONS[at].state);
    show();
    choices.querySelectorAll("button")[i].focus();
  }
  show();
  return {
    node,
    update(state, measured) {
      const wanted = Object.entries(QUESTIONS[at].state).every(([key, value]) => state[key] === value);
      if (answered !== null && wanted) say(page, says, QUESTIONS[at].answer(measured));
    },
  };
}
