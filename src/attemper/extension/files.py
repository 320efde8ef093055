"""files: checked before the work and written whole; rows as JSON, CSV and Parquet; files of lines that survive a kill."""

from .._files import append as append
from .._files import check as check
from .._files import columns as columns
from .._files import csv_bytes as csv_bytes
from .._files import end_of_last_line as end_of_last_line
from .._files import finite as finite
from .._files import installed as installed
from .._files import json_bytes as json_bytes
from .._files import json_text as json_text
from .._files import load as load
from .._files import lock as lock
from .._files import open_lines as open_lines
from .._files import parquet_bytes as parquet_bytes
from .._files import save as save
from .._files import version_of as version_of
