"""watch: attach to a model, measure every attention call, keep a record."""

from .call import Facts as Facts
from .record import Record as Record
from .watching import Watch as Watch
from .watching import watch as watch
