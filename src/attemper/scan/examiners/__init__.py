"""What a scan measures of every attention call while q, k and the logits are there; nothing of the size n × n is kept.

items.py             the input that is running, and which rows and keys of a call are whose
sinks.py             weight on first and special tokens
neighbours.py        weight on the token before, itself and the token after
text_dependence.py   how much the weights change with the text
tokens.py            what one token attends to
maps.py              the weights that the report shows
patches.py           which tokens are patches of an image, and that image
"""
