"""watch: attach to a model, measure every attention call, keep a record."""

from .call import Facts as Facts
from .record.record import Record as Record
from .session import Watch as Watch
from .session import watch as watch
