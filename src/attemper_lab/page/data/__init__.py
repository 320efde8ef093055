"""The data that the page's panels read, as one plain document.

heads.py      a text in a real model: the scan's document, and the logits of every head
flow.py       one head of a real model on a text, from embeddings to output, with its matrices
embedded.py   both of the embedded MiniLM, for the page's two sentences
training.py   a small run while it trains
bundle.py     every panel's part of the document; those of recorded runs, of the claims and of heads are stored here as JSON
"""

from .bundle import bundle as bundle
