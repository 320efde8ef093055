"""A worker without torch: it answers as the real one does, says what it was asked, and can be slow, dead or endless."""

import json
import sys
import time

from attemper_lab.page.server.worker import Computing


class Stub(Computing):
    """`text` decides.

    "slow" takes a while ("slow 2" two seconds), "endless" does not come back, "dies" ends the process, "fails" raises.
    A run of seed 1 has long steps: of 600 it takes two minutes.
    """

    def load(self):
        return b""

    def first(self):
        return b""

    def heads(self, text):
        if text.startswith("slow"):
            time.sleep(float(text[4:] or 0.3))
        elif text == "endless":
            time.sleep(3600)
        elif text == "dies":
            sys.exit(1)
        elif text == "fails":
            raise RuntimeError("a secret: /etc/passwd")
        return json.dumps({"text": text}).encode()

    def logits(self, text, layer, head):
        return bytes(4)

    def flow(self, text, layer, head):
        return b"{}"

    def begin_run(self, **settings):
        self._rows = self.rows(**settings)
        return b""

    def rows(self, rules, d, lr, steps, seed):
        for step in range(steps + 1):
            time.sleep(0.01 if seed == 0 else 0.2)
            yield {"rule": rules[0], "step": step, "loss": 1.0, "done": step / steps}
