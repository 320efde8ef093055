// The panels, in the order of their tabs.

import { benchPanel } from "../panels/bench/panel.js";
import { scoresPanel } from "../panels/scores/panel.js";

export const PANELS = [benchPanel, scoresPanel];
