"""The page's server, on this machine alone: `attemper serve`.

The files, in the order in which a request passes them:

    serve.py     address, token, signals: from the options of `attemper serve` to a running server
    protocol.py  HTTP/1.1 as uvicorn reads it, for clients that send their headers in time
    guard.py     the outermost layer: denies what it does not know, and puts the security headers on every answer
    limits.py    the largest body, text and numbers, the longest times
    app.py       the application: the guard around the routes, and errors as sentences
    routes.py    the addresses, and what each takes and answers
    files.py     the page and its modules, by name
    worker.py    one heavy computation at a time, with a time limit, in a process of its own: the model, its heads, training runs
    events.py    server-sent events; runs that were started from the page
    record.py    a run.jsonl, followed while it grows
"""
