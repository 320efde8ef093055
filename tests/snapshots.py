"""Sentences that users read, one file for each area: tests/AREA/sentences.json. `make snapshots` writes them from the source.

A test compares a sentence with the file, and says of it what must stay true however it is worded. Whoever rewrites a sentence
runs `make snapshots` and reads the difference.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

import pytest

WRITING = os.environ.get("ATTEMPER_SNAPSHOTS") == "write"


class Sentences:
    """The sentences of an area, by the table and the case that they answer."""

    def __init__(self, area: str) -> None:
        self.path = Path(__file__).parent / area / "sentences.json"
        self.kept: dict[str, dict[str, str]] = (
            json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        )

    def compare(self, table: str, case: str, found: str) -> None:
        """Equal to the sentence in the file; written there instead where ATTEMPER_SNAPSHOTS=write."""
        if WRITING:
            self.kept.setdefault(table, {})[case] = found
            self.write()
        if found != self.kept.get(table, {}).get(case):
            pytest.fail(f"{table}, {case}: another sentence. Run make snapshots and read the difference.\n{found}")

    def assert_cases(self, table: str, cases: Collection[str]) -> None:
        """The file has a sentence for each case, and no other."""
        if WRITING:
            self.kept[table] = {case: said for case, said in self.kept.get(table, {}).items() if case in cases}
            self.write()
        assert set(self.kept.get(table, {})) == set(cases), "run make snapshots"

    def write(self) -> None:
        text = json.dumps(self.kept, ensure_ascii=False, indent=2, sort_keys=True)
        self.path.write_text(text + "\n", encoding="utf-8")


def assert_told(sentence: str, function: str, *names: str) -> None:
    """What every error says: the function that was called, one of the arguments that were wrong, and whole sentences."""
    assert sentence.startswith(f"{function}(): "), sentence
    assert any(name in sentence for name in names), f"none of {names}: {sentence}"
    assert sentence.endswith("."), sentence
