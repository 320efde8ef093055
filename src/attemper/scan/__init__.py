"""scan: which scale a model applies, and whether its attention is healthy.

api.py, command.py   scan() in Python, and the parts of `attemper scan` between parsing and printing
input/               a model, and the batches it is run on
run.py               calls the model under a watch with examiners, and builds the document (the dispatcher)
audit/               the scale that each layer declares and applies, and its fault
checks/              whether attention is computed right, as far as its ops show that
examiners/           what is measured of each attention call: sinks, neighbours, texts, one token, the weights
experiments/         what moves when a token, padding or an item changes: passes of their own, if asked for
document.py          the parts of the document, as dataclasses, and the JSON Schema made from them
what_if.py           the same model with another scale
result.py            Scan: the document, its table, its files
show/                the table for a terminal, the comparison with an older scan, files
"""

from .api import scan as scan
from .result import Scan as Scan
