"""machine: versions, devices and processors."""

from .. import env as env
from ..env import check_device as check_device
from ..env import cores as cores
