"""A scan's document for people: a table in the terminal, what changed since an older scan, files.

baseline.py   an older document, and what changed since
terminal.py   the whole table (the dispatcher)
format.py     numbers, names, levels and checks as text
compared.py   the tables of --what-if, --token and --baseline
"""
