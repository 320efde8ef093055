"""health: from the numbers of heads to findings in plain words, each with its threshold and where that comes from.

Plain data in, plain data out; no torch. A finding is not a fault: a head that rests on the first token, or looks at the token
before, is sharp on purpose and is called healthy.
"""

from .finding import Finding as Finding
from .judging import check as check
from .judging import findings as findings
from .judging import verdict as verdict
from .thresholds import LEVELS as LEVELS
from .thresholds import NAMES as NAMES
