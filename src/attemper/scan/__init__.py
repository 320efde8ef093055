"""scan: what scale a real model really applies, and whether its attention is healthy."""

from .api import scan as scan
from .result import Scan as Scan
