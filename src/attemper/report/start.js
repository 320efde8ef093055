// Shows the page's document in the page, and keeps the chosen head and sign in the address.

import { render } from "./views/heads.js";

const address = {
  get hash() { return window.location.hash; },
  replace(hash) {
    try { window.history.replaceState(null, "", `#${hash}`); } catch { /* a frame without an address of its own */ }
  },
};
render(document.getElementById("report"), JSON.parse(document.getElementById("document").textContent), { location: address });
