"""What the page's panels read, as one document of plain data.

runs.py       recorded runs of a small language model, for the bench
heads.py      a text in a real model: the scan's document, and the logits of every head
flow.py       one head of a real model on a text, from embeddings to output, with its matrices
embedded.py   both of the embedded MiniLM, for the page's two sentences
bundle.py     every panel's key of the document
"""

from .bundle import bundle as bundle
