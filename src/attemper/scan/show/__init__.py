"""A scan's document for people: a table in the terminal, what changed since an older scan, files.

baseline.py   an older document, and what changed since
since.py      the lines about the changes
checks.py     how many checks passed, and what the experiments found
compared.py   the tables of --what-if, --token and --baseline
format.py     numbers, names and levels as text
terminal.py   the whole table
output.py     files: html, json, csv, parquet
"""
