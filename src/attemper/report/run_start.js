// The last lines of a run's page: its document into its page.

import { renderRun } from "./runs/run.js";

renderRun(document.getElementById("report"), JSON.parse(document.getElementById("document").textContent));
