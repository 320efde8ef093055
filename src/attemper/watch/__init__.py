"""watch: attach to a model, measure every attention call, keep a record.

Data passes the files in this order:

    session     watch() and the Watch object: opens, follows the modules of a model, ends steps, closes
    options     checks the arguments
    source      what every source of calls is to a watch: modules that are followed, attention that is replaced, tallies
    attach/     intercepted functions and a dispatch mode; measures each call
    observer    what is measured of the step that runs: which passes count, calls, notes
    routes/     recognises attention calls and reads their arguments
    call        one attention call, as all routes give it
    bias        the largest scores of a call to which numbers are added
    trace/      what q and k were multiplied by, for examiners
    record/     what was measured, in memory and in files
    compiled/   instrument(), and the tallies of a model that runs compiled
    examine     the interface for a scan and the lab: examiners and what-if
    alter       counts the ops that make scores, and replaces their scale, for what-if
    weights     the logits and weights of chosen rows and keys of a call, for examiners
"""

from .call import CallInfo as CallInfo
from .compiled.instrument import Instruments as Instruments
from .compiled.instrument import instrument as instrument
from .record.record import Record as Record
from .session import Watch as Watch
from .session import watch as watch
