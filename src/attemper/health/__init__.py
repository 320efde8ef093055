"""health: from the numbers of heads to findings in plain words, each with its threshold and the source of that.

    judging.py      findings() of all rows, check() of a record, verdict() in one line
    logits.py       findings about the size of logits
    patterns.py     findings about where a head puts its weight
    finding.py      Finding: one result about a head or a layer
    thresholds.py   the thresholds, their sources, the names and levels of findings, the faults of a scale
    faults.py       the faults of attention apart from its scale, and the checks that find them

Plain data in, plain data out; no torch. A finding need not be a fault: an attention sink or a positional head is normal, and
its level is "healthy".
"""

from .finding import Finding as Finding
from .judging import check as check
from .judging import findings as findings
from .judging import verdict as verdict
from .thresholds import LEVELS as LEVELS
from .thresholds import NAMES as NAMES
