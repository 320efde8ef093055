"""What a scan measures of every attention call while q, k and the logits are in memory; nothing of size n × n is stored.

items.py             the current input, and the rows and keys of each of its items
sinks.py             weight on first and special tokens
neighbours.py        weight on the token itself and its neighbours
text_dependence.py   how much the weights change with the text
tokens.py            what one token attends to
maps.py              the weights that the report shows
patches.py           which tokens are patches of an image, and that image
"""
