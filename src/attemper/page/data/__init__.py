"""What the page's panels read, as one document of plain data.

heads.py      a text in a real model: the scan's document, and the logits of every head
flow.py       one head of a real model on a text, from embeddings to output, with its matrices
embedded.py   both of the embedded MiniLM, for the page's two sentences
runs.py       recorded runs of a small language model, for the bench
training.py   recorded runs, and a small run while it trains
figures.py    which numbers of a claim are drawn
claims.py     the claims about √d_k with their verdicts, numbers and figures
bundle.py     every panel's key of the document
"""

from .bundle import bundle as bundle
