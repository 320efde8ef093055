// The panels, in the order of their tabs.

import { benchPanel } from "../panels/bench/panel.js";
import { claimsPanel } from "../panels/claims/panel.js";
import { flowPanel } from "../panels/flow/panel.js";
import { headsPanel } from "../panels/heads/panel.js";
import { scoresPanel } from "../panels/scores/panel.js";
import { trainingPanel } from "../panels/training/panel.js";

export const PANELS = [benchPanel, flowPanel, headsPanel, scoresPanel, trainingPanel, claimsPanel];
