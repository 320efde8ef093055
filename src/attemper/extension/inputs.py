"""inputs: a model of a folder, the hub or a package, and the texts, images and sounds that it is run on."""

from ..demo import SENTENCE as SENTENCE
from ..demo import embedded as embedded
from ..scan.input.batch import Input as Input
from ..scan.input.batch import call as call
from ..scan.input.batch import make as make
from ..scan.input.model import Loaded as Loaded
from ..scan.input.model import load as load
from ..scan.run import run as run
from ..scan.unchanged import evaluating as evaluating
from ..scan.what_if import what_if as what_if
