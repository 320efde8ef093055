"""record: what a watch measured, per step, layer and head.

Data passes the files in this order:

    sums      sums the calls of a step, by pass and layer
    entry     holds what a step closed into: as entries or as rows
    ranks     joins the entries of a step over the ranks of a process group
    buffer    copies entries from their devices to host memory, and keeps them there
    record    the table that the user gets: filters, merges and converts entries
    jsonl     appends the rows of a step to a JSONL file, and parses its lines
    store     writes and reads whole files, JSONL or Parquet
    html      shows a record as an HTML table in a notebook
"""
