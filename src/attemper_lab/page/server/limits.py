"""How large a request may be and how long it may take, for the guard, the routes and the worker."""

BODY = 64 * 1024  # bytes of a request's body
HEAD = 16 * 1024  # bytes of its first line and headers
TEXT = 1000  # characters of a sentence
LAYERS = HEADS = 1024  # no model has more

ARRIVAL = 5.0  # seconds in which headers, and then a body, must arrive
IDLE = 5.0  # seconds after which a connection without a request is closed
CONNECTIONS = 512  # open at the same time
STREAMS = 16  # streams of events open at the same time; one more closes the oldest

WAITING = 8  # computations that may wait
PATIENCE = 30.0  # seconds that a computation may wait for its turn
COMPUTING = 30.0  # seconds that it may take
SHUTDOWN = 1.0  # seconds that open requests get after Ctrl-C

RUNS = 8  # training runs that the server remembers
STEPS = 600  # of a run
HEAD_DIM = (4, 256)
RATES = (1e-5, 0.1)
SEED = 2**31 - 1
"""The bounds of a training run that is started from the page."""
