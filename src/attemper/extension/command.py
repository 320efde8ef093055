"""command: what every command shares: options, output that survives a full disk and a closed reader, notes on stderr."""

from ..cli.app import READER_LEFT as READER_LEFT
from ..cli.app import AsJson as AsJson
from ..cli.app import Force as Force
from ..cli.app import console as console
from ..cli.app import deliver as deliver
from ..cli.app import failed as failed
from ..cli.app import finish as finish
from ..cli.app import note as note
from ..cli.app import say as say
from ..cli.progress import busy as busy
