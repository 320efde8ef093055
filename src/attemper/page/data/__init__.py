"""What the page's panels read, as one document of plain data.

claims.py    the claims about √d_k with their verdicts, numbers and figures
training.py  recorded runs, and a small run while it trains
bundle.py    every panel's key of the document
"""

from .bundle import bundle as bundle
