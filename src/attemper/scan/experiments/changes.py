"""Experiments that change the batch and see which rows of outputs move: later tokens, padding, items, order, length."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...watch.examine import examine
from ..checks.declared import AHEAD, BACKWARD, has_experts, is_published, matching_setting
from ..checks.examiner import AttentionChecks
from .runner import FEW, POOLED, LayerRows, chosen, woken
from .subject import CannotRun, NamedBatch
from .trial import ERRORS, OUTPUT, STEADY, Answer, Moved, Trial, check_comparable, distance, first_moved, named, share


def future(trial: Trial) -> Answer:
    """Whether outputs depend on tokens that come later."""
    subject, checks = trial.subject, trial.checks
    subject.needs_tokens()
    length = subject.length
    start = max(length // 2, checks.prefix + 1 if checks.prefix else 0)
    if length < 3:
        raise CannotRun(f"a text of {length} tokens is too short", "3 tokens or more")
    if start >= length:
        known = matching_setting(subject.model.modules(), AHEAD)
        why = f"rows see later tokens, up to token {checks.prefix - 1} of {length}" + (
            f", as {known} says" if known else ""
        )
        raise CannotRun(why, None if known else f"more tokens, or {DIRECTION}")
    moved = _after_changing(trial, subject, start)
    if moved is not None and any(checks.is_causal.values()):
        for rival in subject.rivals:  # the first of two sequences may be a memory, which has no order
            if _after_changing(trial, replace(subject, tokens=rival), start) is None:
                return Answer(
                    f"no row before a changed token of {rival} moved; assumed that {subject.tokens} is a memory"
                )
    prefix = f"; the first {checks.prefix} tokens see one another: assumed a prefix LM" if checks.prefix else ""
    if moved is None:
        return Answer(f"no row before a changed token moved{prefix}")
    if not trial.strict and checks.reads_both_ways:
        return Answer("assumed bidirectional: some layers read from the left, and some from the right", skipped=True)
    by = None if trial.strict else _declared_otherwise(trial, moved, start)
    if by is not None:
        trial.ahead = True
        return Answer(f"rows see later tokens: assumed intended, because of {by}", skipped=True)
    expected = "it should be causal" if trial.strict else why_causal(trial)
    if expected is None:
        settled = checks.declare_bidirectional or checks.reads_backward or is_published(subject.model)
        return Answer(
            "assumed bidirectional: no layer has a causal mask, and nothing declares one",
            skipped=True,
            needs=None if settled else DIRECTION,
        )
    return trial.fault("future_leak", moved, start=start, row=moved.row, why=expected)


def _declared_otherwise(trial: Trial, moved: Moved, start: int) -> str | None:
    """The setting that says that rows read from the right, or a few tokens ahead; None: nothing does."""
    modules = list(trial.subject.model.modules())
    backward = matching_setting(modules, BACKWARD) if trial.checks.reads_backward else None
    return backward or (matching_setting(modules, AHEAD) if moved.row >= start // 2 else None)


def _after_changing(trial: Trial, subject: NamedBatch, start: int) -> Moved | None:
    """The first layer of which a row before ``start`` moved when the tokens from there on were changed."""
    length = subject.length
    tokens = subject.value.clone()
    tokens[:, start:] = subject.other_tokens(tokens[:, start:])
    rows = trial.lengths[length]
    earlier = rows[rows < start - trial.prepended]  # the tokens of the model itself may be at either end
    after = trial.run(subject.with_tokens(tokens), {**trial.lengths, length: earlier})
    before = {
        name: part[:, : len(earlier)] if part.shape[1] == len(rows) else part for name, part in trial.base.items()
    }
    if trial.order and length not in trial.sizes and not subject.sequence_first and "" not in before:
        raise CannotRun("no layer attends along the tokens")
    check_comparable(after, before)
    real = subject.real[:, earlier.to(subject.value.device)]
    moved = first_moved(after, before, trial.order, trial.floor, real if real.shape[0] == subject.items else None)
    if moved is None or (moved.layer == "" and _is_pooled(trial)):
        return None
    return replace(moved, row=int(rows[moved.row]))


DIRECTION = "--declare causal, or causal=no if rows may see later tokens; in Python declared={'causal': False}"


def why_causal(trial: Trial) -> str | None:
    """Why a model should not see the future, in words; None: nothing says so."""
    checks, decoder = trial.checks, trial.checks.decoder
    if decoder is not None:
        return f"{decoder} declares a decoder"
    if checks.declare_bidirectional:
        return None
    if checks.declare_causal:
        return "its attention modules declare that they are causal"
    causal = [name for name, is_causal in checks.is_causal.items() if is_causal]
    if causal:
        count = len(checks.is_causal)
        return f"the mask of {'every layer' if len(causal) == count else f'{len(causal)} of {count} layers'} is causal"
    prefixed = checks.prefix and not is_published(trial.subject.model)
    return f"the mask shows the later tokens of the first {checks.prefix} alone" if prefixed else None


def _is_pooled(trial: Trial) -> bool:
    """Whether an output (B, L) has one row per item that happens to be as long as the text: a shorter text leaves it so."""
    subject = trial.subject
    if trial.base[""].dim() > 2 or subject.sequence_first:
        return False
    try:
        after = trial.run(subject.first(subject.length - 1).batch, trial.lengths)
    except ERRORS:
        return False
    return "" in after  # it still has the length of the whole batch


MORE = 3  # padded tokens
UNKNOWN = (
    " Nothing says whether a row may see later tokens, and no causal mask was seen: if it may not, this is a leak of the "
    "future."
)
POOL = "Pool over real tokens alone: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for a mean."


def padding(trial: Trial) -> Answer:
    """Whether padding changes real tokens."""
    subject = trial.subject
    subject.needs_tokens()
    if subject.tokens.startswith("decoder_") and "input_ids" in subject.arguments:
        subject = replace(subject, tokens="input_ids")
    moved, done, pooled = None, ["right"], 0.0
    if not trial.is_causal or not bool(subject.real.all()):  # in a causal model padding on the right cannot matter
        after = _padded(trial, subject, subject.lengthened(MORE), 0)
        moved, pooled = _moved(trial, subject, after), _pooled(trial, subject, after)
    if moved is None and bool(subject.real.all()):
        done.append("left")
        for placed in (True, False) if subject.takes("position_ids") else (False,):  # some count positions by the mask
            batch = subject.lengthened(MORE, left=True, placed=placed)
            moved = _moved(trial, subject, _padded(trial, subject, batch, MORE))
            if moved is None:
                break
        else:
            if not subject.takes("position_ids"):  # positions of left padding cannot be given
                moved, done = None, done[:1]
    if moved is None and pooled:
        message = (
            f"Padding changes the output: with {MORE} more tokens on the right that the mask hides, no real token of a layer "
            f"moved, but the model's output did, by {share(pooled)}: what pools the tokens counts padding."
        )
        return trial.fault("padding_leak", Moved("", pooled, 0), message=message, advice=POOL)
    if moved is None:
        return Answer(f"{MORE} padded tokens on the {' or the '.join(done)} changed no real token")
    if is_published(subject.model) and _hides(trial, subject):
        name = type(subject.model).__name__
        return Answer(
            f"padding moved {named(moved.layer)}, though masks hide it: assumed intended, as {name} is published",
            skipped=True,
        )
    row = int(trial.lengths[subject.length][moved.row])
    unknown = why_causal(trial) is None and not trial.checks.declare_bidirectional and done[-1] == "right"
    return trial.fault("padding_leak", moved, more=MORE, side=done[-1], row=row, why=UNKNOWN if unknown else "")


def _hides(trial: Trial, subject: NamedBatch) -> bool:
    """Whether no attention of the model sees padding on the right: then a convolution or a mean does."""
    batch = subject.lengthened(MORE)
    reading = AttentionChecks(trial.runner.judge)
    reading.begin(batch)
    with examine(trial.runner.judge, [reading], caller="scan"):
        trial.runner(batch, {})
    patterns = [call.pattern for some in reading.layers.values() for call in some if call.pattern is not None]
    return not any(call.padding_seen for call in patterns)


def _padded(trial: Trial, subject: NamedBatch, batch: Any, before: int) -> LayerRows:
    """The rows of the original tokens in a pass with padding, of which ``before`` tokens are on the left."""
    rows = trial.lengths[subject.length]
    after = trial.run(batch, {**trial.lengths, subject.length + MORE: rows + before})
    check_comparable(after, trial.base)
    return after


def _moved(trial: Trial, subject: NamedBatch, after: LayerRows) -> Moved | None:
    return first_moved(after, trial.base, trial.order, trial.floor, trial.real(subject))


def _pooled(trial: Trial, subject: NamedBatch, after: LayerRows) -> float:
    """How far padding on the right moved the pooled output; 0: not at all, or padding is not on the right in this model."""
    if is_published(subject.model) or not bool(subject.real[:, 0].all()):
        return (
            0.0  # classifiers of a library look for the padding id; a batch padded on the left may read the last token
        )
    moved = first_moved(after, trial.base, [POOLED], trial.floor)
    return 0.0 if moved is None else moved.by


def items(trial: Trial) -> Answer:
    """Whether items of a batch change one another."""
    trial.after("repeat")
    subject = trial.subject
    last = subject.items - 1
    if last and not bool((subject.value[0] == subject.value[last]).all()):
        how = f"without the others, item {last}"  # the last one, as a mask or a source may be that of the first for all
        after = trial.run(subject.alone(last).batch, trial.lengths)
        trial.others = _item(trial.base, 0, subject.items), _item(trial.base, last, subject.items)
        before = trial.others[1]
    else:
        how, items_before = "with one more, the others", subject.items
        subject, lengths, before = _halved(trial)
        after = trial.run(subject.with_item(), lengths)
        trial.others = _item(after, 0, items_before + 1), _item(after, items_before, items_before + 1)
        after = {name: rows[:items_before] for name, rows in after.items()}
    if POOLED not in after:
        check_comparable(after, before)
    moved = first_moved(after, before, [*trial.order, POOLED], trial.floor)
    if moved is None and trial.copied is not None:  # one more item, which `repeat` has run without the others
        item, moved = trial.copied
        how = how if moved is None else f"with copies of itself in place of the others, item {item}"
    assumed = (
        "; assumed (length, batch, …), as attention runs along the first dimension" if subject.sequence_first else ""
    )
    if moved is None:
        return Answer(f"another item in the batch changed nothing{assumed}")
    experts = has_experts(subject.model)
    if experts is not None:
        return Answer(
            f"another item moved {named(moved.layer)}: assumed intended, as {experts} shares experts among tokens"
        )
    return trial.fault("batch_leak", moved, how=how)


HALVED = 256  # tokens from which an item is added to the first half of a text, so that a pass is no larger than the model's own


def _halved(trial: Trial) -> tuple[NamedBatch, dict[int, Tensor], LayerRows]:
    """The batch, or the first half of a long text, with its lengths and its rows."""
    subject = trial.subject
    if subject.ordered and subject.length >= HALVED and not subject.sequence_first and not subject.other_lengths():
        half = subject.first(subject.length // 2)
        lengths = {half.length: chosen(half.length)}
        if bool(half.real.any(1).all()):  # not all of it is padding
            with suppress(*ERRORS):  # a model may take one length alone
                rows = trial.run(half.batch, lengths)
                if rows.keys() == trial.base.keys():
                    return half, lengths, rows
    return subject, trial.lengths, trial.base


def _item(rows: LayerRows, number: int, items: int) -> LayerRows:
    return {name: part[number : number + 1] for name, part in rows.items() if part.shape[0] == items}


def inputs(trial: Trial) -> Answer:
    """Whether the output depends on the input: two items with other tokens, which `batch` has run."""
    if trial.others is None:
        raise CannotRun("the model could not be run with one more item", "a model that takes a batch of any size")
    one, other = trial.others
    for name in ("", POOLED):
        if name in one and name in other:
            if first_moved(other, one, [POOLED], trial.floor) is not None:
                return Answer("other tokens gave other outputs")
            if _wakes(trial, name):
                return Answer(
                    "other tokens gave the same output, as weights on the way to it are still 0", skipped=True
                )
            tokens = "tokens" if trial.subject.ordered else "numbers"
            return trial.fault("input_ignored", OUTPUT, tokens=tokens)
    raise CannotRun("the model returns no rows for each item", "a model that returns a tensor (batch, …)")


def _wakes(trial: Trial, name: str) -> bool:
    """Whether weights that are all 0 hide what the output depends on: the last layer of many models begins so."""
    weights = [one for one in trial.runner.judge.parameters() if one.dim() > 1]
    with woken(trial.runner.judge) as asleep:
        if not asleep or 2 * sum(one.dim() > 1 for one in asleep) >= len(
            weights
        ):  # without most of them it is no model
            return False
        rows = trial.run(trial.subject.with_item(), trial.lengths).get(name)
    return rows is not None and distance(rows[:1], rows[-1:])[0] > STEADY


def permutation(trial: Trial) -> Answer:
    """Whether the order of the tokens matters."""
    subject = trial.subject
    subject.needs_tokens()
    if any(trial.checks.is_causal.values()):
        return Answer("a causal mask orders the tokens", skipped=True)
    trial.after("batch")
    if subject.value.is_floating_point():
        return Answer("assumed to be ordered before: the model takes vectors, not tokens", skipped=True)
    rows = trial.lengths[subject.length]
    if len(rows) != subject.length:
        raise CannotRun("the text is long", f"{3 * FEW} tokens or fewer")
    alone, before = trial.whole()
    if len(alone.value.unique()) < 2:
        raise CannotRun("the text has one word only", "a text of several words")
    apart = torch.arange(len(rows), device="cpu")
    order = torch.cat([apart[1::2], apart[::2]])  # no distance is as before
    after = trial.run(alone.with_tokens(alone.value[:, order]), trial.lengths)
    before = {name: part[:, order] if part.shape[1] == len(rows) else part for name, part in before.items()}
    check_comparable(after, before)
    after = {"": after[""]} if "" in after else after  # a pooled output has no rows: its layers show it too
    moved = first_moved(after, before, [*trial.order, POOLED], trial.floor)
    if moved is not None:
        return Answer("the order of the tokens changes the output")
    return trial.fault("order_ignored", OUTPUT)


LONGEST = 256  # tokens that are tried
LONGER = ("attention_mask", "decoder_attention_mask", "token_type_ids")
NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_length", "block_size", "n_ctx")


def long(trial: Trial) -> Answer:
    """Whether longer inputs run, and keep what came before."""
    subject = trial.subject
    subject.needs_tokens()
    limit, by = _limit(subject.model)
    window = _window(subject.model)
    length = subject.length
    most = max(LONGEST, length + length // 8)  # attention over twice a long text would take four times the memory
    wanted = min(limit or LONGEST, 2 * length + (window or 0), most)
    if wanted <= length:
        raise CannotRun(f"the text is as long as {by or 'the model'} allows")
    alone, before = trial.whole()
    others = {
        name: _repeated(value, wanted)
        for name, value in alone.arguments.items()
        if name != alone.tokens and isinstance(value, torch.Tensor) and value.shape[:2] == alone.value.shape[:2]
    }
    if set(others) - {*LONGER, subject.mask} or (subject.sequence_first and len(subject.arguments) > 1):
        raise CannotRun("the batch has other parts than tokens and a mask", "tokens alone")
    longer, kept = alone.with_tokens(_repeated(alone.value, wanted), **others), {wanted: trial.lengths[length]}
    try:
        if not trial.leaves:
            after = trial.run(longer, kept)
        else:  # a table that the shorter text has made must grow
            with trial.runner.keeping_state():
                trial.run(alone.batch, trial.lengths)
                after = trial.run(longer, kept)
    except ERRORS as error:
        if trial.leaves and _runs(trial, longer, kept):
            kept_words = (
                f"{wanted} tokens raise {type(error).__name__} after a text of {length}, and none before it: the first "
            )
            kept_words += f"text's length is kept in {', '.join(trial.leaves[:3])}"
            return trial.fault("long_breaks", OUTPUT, happened=kept_words)
        if limit is None:
            return Answer(f"{wanted} tokens raise {type(error).__name__}, and nothing declares that many", skipped=True)
        happened = f"{wanted} tokens raise {type(error).__name__}, although {by} is {limit}"
        return trial.fault("long_breaks", OUTPUT, happened=happened)
    if any(not bool(torch.isfinite(part).all()) for part in after.values()):
        happened = f"With {wanted} tokens the output holds NaN or infinity"
        return trial.fault("long_breaks", OUTPUT, happened=happened)
    beyond = f" and a window of {window}" if window and window < wanted else ""
    tried = f"{wanted} tokens ran{f', of {limit}' if limit else ''}{beyond}"
    if not trial.is_causal:
        return Answer(tried)
    moved = first_moved(after, before, trial.order, trial.floor)
    if moved is None:
        return Answer(f"{tried}, and earlier rows stayed")
    happened = (
        f"With {wanted} tokens in place of {length}, a row of {named(moved.layer)} for the first ones moved by "
        f"{share(moved.by)}. Something there depends on the length of the whole text, and no later token was seen: a scale, "
        "angles of a rotation, or distances that are counted from the end"
    )
    return trial.fault("long_breaks", moved, happened=happened)


def _runs(trial: Trial, batch: Any, lengths: Mapping[int, Tensor]) -> bool:
    try:
        trial.run(batch, lengths)
    except ERRORS:
        return False
    return True


def _limit(model: nn.Module) -> tuple[int | None, str]:
    for holder, whose in ((getattr(model, "config", None), "config."), (model, f"{type(model).__name__}.")):
        for name in NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value, whose + name
    return None, ""


def _window(model: nn.Module) -> int | None:
    value: Any = getattr(getattr(model, "config", None), "sliding_window", None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _repeated(value: Any, length: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    return torch.cat([value] * -(-length // value.shape[1]), 1)[:, :length]
