"""tools: errors that name the next step, and text that fits a terminal."""

from .. import report as report
from .._display import hanging as hanging
from .._display import plural as plural
from .._display import print_table as print_table
from .._display import safe as safe
from ..errors import checked_options as checked_options
from ..errors import nearest as nearest
from ..errors import nearest_divisors as nearest_divisors
from ..errors import out_of_memory as out_of_memory
