"""Meeting: whether every rank of a process group has come to the same point, found out without a collective.

A collective that one rank does not enter hangs all others, and may meet another one of the training's. So ranks first count
themselves in the store that the process group was made with, where waiting has an end; only if all came do they go on together.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from datetime import timedelta

from torch.distributed import ProcessGroup

from ..._torch_private import default_store

PATIENCE = timedelta(seconds=30)

_opened: Counter[str] = Counter()  # meetings of each group so far, by its name: the same number on every rank


class Meeting:
    """Made once per watch, on every rank of the group."""

    def __init__(self, group: ProcessGroup) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        name = group.group_name
        self.store = PrefixStore(f"attemper/{name}/{_opened[name]}", default_store())
        _opened[name] += 1
        self.size = group.size()
        self.next = 0
        self.missed: int | None = None  # a point to which not all had come when we left it

    def all_here(self) -> bool:
        """Whether all ranks go on together from here: the same answer on each of them, and soon."""
        if self.missed is not None:
            if self.store.add(str(self.missed), 0) < self.size:
                return False  # whoever did not come then has not come since: nobody waits for them twice
            self.missed = None
        place, self.next = self.next, self.next + 1
        count, word = self.store.add(str(place), 1), f"{place}/word"
        if count < self.size:
            with suppress(RuntimeError):  # the time is up
                self.store.wait([word], PATIENCE)
        # the first word stands: of the last to come, or of the first to leave
        together = self.store.compare_set(word, "", "yes" if count == self.size else "no") == b"yes"
        if count < self.size and not together:
            self.missed = place
        if count == self.size and together and place:
            for key in (f"{place - 1}", f"{place - 1}/word"):  # everybody is past it
                self.store.delete_key(key)
        return together
