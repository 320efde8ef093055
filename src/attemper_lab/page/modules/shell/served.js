// The served page: fetches its data, then starts; and how its panels ask the server for more.

import { maker } from "../../report/views/dom.js";
import { start } from "./start.js";

const FIRST_WAIT = 1000,
  LONGEST_WAIT = 15000; // milliseconds before a stream of events is opened again

/** Everything is asked below the page's own path, which is the only one that has the cookie. */
const below = (path) => path.replace(/^\//, "");

/** What the server answers; a refusal becomes an Error with the server's sentence. */
async function asked(path, body, signal, method = body === undefined ? "GET" : "POST") {
  const sent = body === undefined ? {} : { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(below(path), { method, signal, credentials: "same-origin", cache: "no-store", ...sent });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `attemper serve` still running?");
  }
  if (answer.ok) return answer;
  const refusal = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(refusal.error ?? `The server refused (${answer.status}).`), { status: answer.status });
}

/** Follow server-sent events. `onEvent({name, data})`; when the connection is lost it is opened again. Gives `stop()`. */
function events(path, onEvent) {
  let source = null,
    timer = 0,
    wait = FIRST_WAIT,
    stopped = false;
  const open = () => {
    source = new EventSource(below(path));
    for (const name of ["waiting", "row", "ended", "cancelled", "failed", "record"]) {
      source.addEventListener(name, (event) => {
        wait = FIRST_WAIT;
        if (["ended", "cancelled", "failed"].includes(name)) stop();
        onEvent({ name, data: JSON.parse(event.data) });
      });
    }
    source.onerror = () => {
      source.close();
      if (stopped) return;
      onEvent({ name: "lost", data: {} });
      timer = setTimeout(open, wait);
      wait = Math.min(2 * wait, LONGEST_WAIT);
    };
  };
  const stop = () => {
    stopped = true;
    clearTimeout(timer);
    source?.close();
  };
  open();
  return stop;
}

/** How panels ask this server. */
export const served = {
  json: async (path, body, signal) => (await asked(path, body, signal)).json(),
  floats: async (path, body, signal) => new Float32Array(await (await asked(path, body, signal)).arrayBuffer()),
  remove: async (path) => {
    await asked(path, undefined, undefined, "DELETE");
  },
  events,
};

async function begin(root) {
  try {
    const [data, about] = await Promise.all([served.json("/data"), served.json("/about")]);
    if (about.model) delete data.heads; // those are of the embedded model
    start(root, { ...data, about }, { source: served });
  } catch (error) {
    const make = maker(document);
    root.replaceChildren(make("main", {}, make("h1", {}, "The page could not be opened"), make("p", {}, error.message)));
  }
}
begin(document.getElementById("page"));
