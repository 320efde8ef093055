"""What the page's panels read, as one document of plain data.

runs.py     recorded runs of a small language model, for the bench
bundle.py   every panel's key of the document
"""

from .bundle import bundle as bundle
