"""health: findings about heads in plain words, from their numbers, each with its threshold and its source.

    judging.py      findings() of all rows, check() of a record, verdict() in one line
    patterns.py     findings about one head: large logits, and where it puts its weight
    finding.py      Finding: one result about a head or a layer
    thresholds.py   the thresholds and their sources, the levels and kinds of findings
    faults.py       every fault with its level, message and advice, and the checks that find them

Plain data in, plain data out; no torch. A finding need not be a fault: an attention sink or a positional head is normal, and
its level is "healthy".
"""

from . import thresholds as thresholds
from .finding import Finding as Finding
from .judging import check as check
from .judging import findings as findings
from .judging import verdict as verdict
from .thresholds import LEVELS as LEVELS
from .thresholds import NAMES as NAMES
