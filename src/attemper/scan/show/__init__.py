"""A scan's document for people: a table in the terminal, what changed since an older scan, files.

baseline.py   an older document, and what changed since
terminal.py   the whole table (the dispatcher)
format.py     numbers, names and levels as text
checks.py     how many checks passed, and what the experiments found
compared.py   the tables of --what-if, --token and --baseline
since.py      the lines about the changes
output.py     files: html, json, csv, parquet
"""
