"""The commands of the lab, which the command `attemper` has if this package is installed."""

from .bench import bench as bench
from .explain import explain as explain
from .lab import cards as cards
from .lab import claims as claims
from .lab import run as run
from .page import page as page
from .serve import serve as serve
