"""The workflows name only make targets, scripts and files that exist; the release's files agree with one another."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from attemper import __version__
from scripts import release

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def missing(text: str) -> list[str]:
    """What a workflow runs or uses although the repository does not have it."""
    workflow = yaml.safe_load(text)
    wrong = []
    for job in workflow["jobs"].values():
        targets = job.get("strategy", {}).get("matrix", {}).get("target", [])
        if job.get("uses", "").startswith("./") and not (ROOT / job["uses"]).is_file():
            wrong.append(job["uses"])
        for step in job.get("steps", ()):
            command = step.get("run", "").replace("${{ matrix.target }}", " && make ".join(targets))
            wrong += [f"make {name}" for name in re.findall(r"\bmake ([\w-]+)", command) if name not in TARGETS]
            wrong += [
                path for path in re.findall(r"\b(?:scripts|tests)/[\w./-]+", command) if not (ROOT / path).exists()
            ]
            uses = step.get("uses", "")
            if uses and not re.fullmatch(r"[\w.-]+/[\w./-]+@[\w./]+", uses):
                wrong.append(uses)
    return wrong


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists(path):
    text = path.read_text(encoding="utf-8")
    assert missing(text) == []
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}, "a workflow starts with the least rights"


def test_a_wrong_target_and_a_wrong_script_are_seen():
    text = "jobs: {a: {steps: [{run: make tset}, {run: python scripts/realease.py}, {run: make test}]}}"
    assert missing(text) == ["make tset", "scripts/realease.py"]


def test_every_supported_python_is_tested():
    matrix = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))["jobs"]["test"][
        "strategy"
    ]["matrix"]
    classified = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert matrix["python"] == classified


def test_the_oldest_torch_and_the_packages_for_arm_are_those_of_the_project():
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8")
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert f"/torch=={oldest}.0/" in nightly
    needed = re.search(r'^PACKAGES = "(.*)"$', (ROOT / "scripts/neon.py").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert f"--yes {needed}\n" in nightly


def test_forms_for_issues_are_complete():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.stem != "config":
            assert {"name", "description", "body"} <= set(form)
            assert all({"type", "attributes"} <= set(part) and part["attributes"]["label"] for part in form["body"])


def test_a_release_is_refused_until_version_changelog_and_citation_agree():
    wrong = release.problems("v9.9.9")
    assert any("attemper.__version__" in sentence for sentence in wrong)
    assert any("CHANGELOG.md has no section for 9.9.9" in sentence for sentence in wrong)
    assert any("CITATION.cff names another version" in sentence for sentence in wrong)
    ours = release.problems(f"v{__version__}")
    assert not any("names another version" in sentence or "__version__" in sentence for sentence in ours)


def test_a_release_needs_a_date(tmp_path, monkeypatch):
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changes\n\n## [Unreleased]\n\n## [0.2.0] - DATE\n\n- new\n\n## [0.1.0] - 2026-12-01\n"
    )
    for name in ("CITATION.cff", "src/attemper/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "CITATION.cff").write_text("version: 0.2.0\n")
    (tmp_path / "src/attemper/__init__.py").write_text('__version__ = "0.2.0"\n')
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    (said,) = release.problems("v0.2.0")
    assert "has no date" in said
    text = (tmp_path / "CHANGELOG.md").read_text().replace("DATE", "2027-01-31")
    (tmp_path / "CHANGELOG.md").write_text(text)
    assert release.problems("v0.2.0") == []
    (tmp_path / "CHANGELOG.md").write_text(text.replace("[Unreleased]\n", "[Unreleased]\n\n- newer\n"))
    assert release.problems("v0.2.0") == [
        "CHANGELOG.md has entries under [Unreleased]. Move them to the section 0.2.0."
    ]
    assert release.changes("0.2.0") == "- new"


def test_the_page_about_releasing_names_what_a_person_fills_in():
    page = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")
    named = [sentence.split()[0] for sentence in release.problems("v0.0.0") if "OWNER" in sentence]
    assert [name for name in named if f"`{name}`" not in page] == []
