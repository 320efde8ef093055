"""A public name, parameter or option that differs from the last release (api.txt) has an entry in the changelog."""

import pytest

pytest.importorskip("attemper_lab", reason="needs attemper_lab, whose names are public too")
from scripts import api, release

BEFORE = {
    "attemper": ["--version, -V"],
    "attemper scan": ["--deep", "--output, -o FILE"],
    "attemper.Scan": ["document: Document"],
    "attemper.Scan.write": ["path: str | Path"],
    "attemper.watch": ["model: nn.Module", "*", "every: int = 1", "-> Watch"],
}


def changed(**now):
    return api.differences(BEFORE, {**BEFORE, **{name.replace("_", "."): parts for name, parts in now.items()}})


def test_what_differs_from_the_last_release_is_in_the_changelog():
    found = api.differences(api.parsed(api.TARGET.read_text(encoding="utf-8")), api.interface())
    said = api.untold(found, release.unreleased())
    assert said == [], "\n".join([*said, "In the commit of a release type make api instead."])


def test_the_file_says_all_that_was_written():
    now = api.interface()
    assert api.parsed(api.text_of(now)) == now
    assert now["attemper.merge"] == ["parts: Iterable[Attended] | Iterable[Vitals]", "-> Attended | Vitals"]
    assert "--output, -o FILE" in now["attemper scan"]
    assert {"attemper.testing.assert_causal", "attemper.extension.calls.band", "attemper.kernels.why"} <= now.keys()
    assert now["attemper.integrations.LightningCallback"][0] == "every: int | None = None"
    assert now["attemper.Record.read"] == ["path: str | Path", "-> Record"]


def test_a_changed_parameter_is_named_and_an_entry_tells_it():
    parts = ["model: nn.Module", "*", "every: int = 2", "rows: int", "-> Watch"]
    (found,) = changed(attemper_watch=parts)
    assert found.words == {"watch", "every", "rows"}
    assert found.sentence == "attemper.watch changed: −every: int = 1; +every: int = 2; +rows: int"
    said = api.untold([found], "- `watch()` takes `rows=`.\n- Another, with `every=`.\n")
    assert said == [
        f"{found.sentence}. Write an entry under [Unreleased] in CHANGELOG.md with the words every, rows, watch."
    ]
    assert api.untold([found], "- `watch(every=)` is 2,\n  and it takes `rows`.\n") == []


def test_results_order_and_bases_are_part_of_it():
    (found,) = changed(attemper_watch=["model: nn.Module", "*", "every: int = 1", "-> None"])
    assert found.words == {"watch"}
    (found,) = changed(attemper_watch=["*", "model: nn.Module", "every: int = 1", "-> Watch"])
    assert found == ("attemper.watch changed: another order", {"watch"})


def test_a_class_or_a_command_that_comes_or_goes_counts_once():
    without = {name: parts for name, parts in BEFORE.items() if not name.startswith("attemper.Scan")}
    assert api.differences(BEFORE, without) == [("attemper.Scan is gone", {"Scan"})]
    assert api.differences(without, BEFORE) == [("attemper.Scan is new", {"Scan"})]
    only = {name: parts for name, parts in BEFORE.items() if name != "attemper.Scan.write"}
    assert api.differences(BEFORE, only) == [("attemper.Scan.write is gone", {"write"})]


def test_an_option_is_told_as_it_is_typed():
    (found,) = api.differences(BEFORE, {**BEFORE, "attemper scan": ["--deep", "--out FILE"]})
    assert found.words == {"scan", "--output", "--out"}
    assert api.untold([found], "- `attemper scan --out` in place of `--output`.\n") == []
    assert len(api.untold([found], "- `attemper scan --output` is gone.\n")) == 1


def test_the_changelog_ends_where_the_last_release_begins(tmp_path, monkeypatch):
    text = (
        "# Changes\n\n## [Unreleased]\n\n- new\n\n## [0.2.0] - DATE\n\n- nearly\n\n## [0.1.0] - 2026-12-01\n\n- old\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(text)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert [word in release.unreleased() for word in ("new", "nearly", "old")] == [True, True, False]
