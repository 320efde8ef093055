"""calls: look at each attention call of a model while its q, k and logits exist, and compute parts of its matrix."""

from .._torch_private import TorchDispatchMode as TorchDispatchMode
from .._torch_private import dynamo_counters as dynamo_counters
from ..kernels.contract import band as band
from ..operation.call import Signs as Signs
from ..scale import FACTS as FACTS
from ..scan.examiners.items import BatchItems as BatchItems
from ..scan.examiners.items import CurrentInput as CurrentInput
from ..scan.examiners.items import items as items
from ..scores.cosine import direction as direction
from ..vitals import NEG_INF as NEG_INF
from ..vitals import SIGNS as SIGNS
from ..watch import Watch as Watch
from ..watch.examine import AttentionCall as AttentionCall
from ..watch.examine import Examiner as Examiner
from ..watch.examine import ParsedLines as ParsedLines
from ..watch.examine import check_header as check_header
from ..watch.examine import examine as examine
from ..watch.examine import logits_of_keys as logits_of_keys
from ..watch.examine import weights_of_rows as weights_of_rows
