"""examine: what a scan uses to look at the attention calls of a watched model more closely.

:func:`examine` opens a watch with examiners. Each examiner gets every :class:`AttentionCall` while its q, k and logits exist.
:func:`altered` replaces the scale of ops while a model runs, for what-if. Other names of ``watch`` are internal to it.

    examine             a watch with examiners
    NoAttentionCall     the error of a watch that found no attention call
    Examiner            what an examiner must have: look() and keep()
    AttentionCall       one attention call: its tensors, options and info
    CallInfo            the route, sizes and scale of a call
    Traced, FactorPath, Factor, same  what q, k and the scores of a call were multiplied by; equality up to rounding
    WeakMask, TwoValues, two_values, is_pattern  masks of two numbers, and the weight that hidden keys keep
    Cut                 the token that a row of a head comes from
    traits              what the class of a module shows: whether it is named attention
    Alteration, altered, OpPlace      ops that make scores: counted in one run, altered in the next
    running             the modules in their forward, in this thread
    weights_of_rows, chunks, logits_of_keys, logits_of_offset   parts of a call's matrix, never the whole of it
    is_in               whether a module is another one or inside it, by their names
    Replacement, is_replaced, FLOOR       attention of a Hugging Face model by attemper's kernels
    register, REPLACED  their name in transformers
    attachment, kind_of, packed_call, spans, without_autograd_and_modes    for a hook that tells of a kernel from outside torch
    named_modules       the modules of a model by name, without wrappers
    split_number        the module of a layer's name, and which of its calls it is
    exchanged_before    whether ranks exchanged tensors before a call, in its module
    slow_because        why calls run on a slow kernel here
    without_modes       run code that no watch and no other dispatch mode sees
    Entry               one layer of a record in one step
    check_path, to_path     the path of a file for a record, checked
    read                a record from a file, for the function that the user called
    are_many, Ranks, device_of    whether there are several ranks, the groups over which a watch joins them, and on which device
    DataRanks, cut_over_heads    the ranks that run the same heads; a weight that is cut over ranks with other heads
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..kernels import slow_because as slow_because
from .alter import Alteration as Alteration
from .alter import altered as altered
from .attach.attachment import attachment as attachment
from .attach.modes import without_autograd_and_modes as without_autograd_and_modes
from .attach.modes import without_modes as without_modes
from .attach.names import CallNumbers
from .attach.names import is_in as is_in
from .attach.names import named_modules as named_modules
from .attach.names import split_number as split_number
from .attach.running import OpPlace as OpPlace
from .attach.running import running as running
from .attach.running import traits as traits
from .call import AttentionCall as AttentionCall
from .call import CallInfo as CallInfo
from .call import Examiner as Examiner
from .call import NoAttentionCall as NoAttentionCall
from .record.entry import Entry as Entry
from .record.entry import RecordRow as RecordRow
from .record.jsonl import ParsedLines as ParsedLines
from .record.jsonl import check_header as check_header
from .record.ranks import DataRanks as DataRanks
from .record.ranks import Ranks as Ranks
from .record.ranks import are_many as are_many
from .record.ranks import cut_over_heads as cut_over_heads
from .record.ranks import device_of as device_of
from .record.store import check_path as check_path
from .record.store import read as read
from .record.store import to_path as to_path
from .routes.exchanged import exchanged_before as exchanged_before
from .routes.kind import kind_of as kind_of
from .routes.packed import packed_call as packed_call
from .routes.packed import spans as spans
from .routes.registered import FLOOR as FLOOR
from .routes.registered import REPLACED as REPLACED
from .routes.registered import register as register
from .routes.replace import Replacement as Replacement
from .routes.replace import is_replaced as is_replaced
from .session import Watch, watch
from .trace.cuts import Cut as Cut
from .trace.hiding import TwoValues as TwoValues
from .trace.hiding import WeakMask as WeakMask
from .trace.hiding import is_pattern as is_pattern
from .trace.hiding import two_values as two_values
from .trace.paths import Factor as Factor
from .trace.paths import FactorPath as FactorPath
from .trace.paths import Traced as Traced
from .trace.paths import same as same
from .weights import chunks as chunks
from .weights import logits_of_keys as logits_of_keys
from .weights import logits_of_offset as logits_of_offset
from .weights import weights_of_rows as weights_of_rows


def examine(model: nn.Module, examiners: Sequence[Examiner], *, caller: str = "watch", by_call: bool = False) -> Watch:
    """A watch of a model whose calls are also shown to examiners, in their order. A list may be changed between two passes.

    ``caller`` is the function that the user called, for errors. ``by_call``: a module that runs several times on one sequence,
    as a layer that is shared by all depths does, is a layer for each of its calls.
    """
    watching = watch(model, examiners=examiners)
    watching.observer.caller = caller
    watching.observer.numbers = CallNumbers() if by_call else None
    return watching
