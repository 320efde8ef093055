"""Folders made to do harm, or damaged on their way: a sentence, within a limit of memory and time."""

import json
import resource
import shutil
import sys
import time

import pytest

from attemper.errors import InputError
from attemper.scan.input import text as tokenizing
from attemper.scan.input import trial
from attemper.scan.input.batch import make
from attemper.scan.input.model import load

CONFIGS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
DEEPER = (*CONFIGS, *tokenizing.TOKENIZER_FILES)


@pytest.fixture
def copy(folder, tmp_path):
    return lambda name="bert": shutil.copytree(folder(name), tmp_path / name)


def change(path, **entries):
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **entries}))


def scanned(folder, words="the dog sat", **options):
    return make(load(folder), texts=[words], **options)[0]


@pytest.mark.parametrize("depth", [70, 900, 100_000])
@pytest.mark.parametrize("name", DEEPER)
def test_json_that_nests_is_refused_before_anything_recurses_into_it(name, depth, copy):
    path = copy() / name
    path.write_text('{"unk_token": ' + '{"a":' * depth + "1" + "}" * depth + "}")
    with pytest.raises(InputError, match=r"is nested more than 64 levels deep|is not JSON: maximum recursion depth"):
        scanned(path.parent)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name, copy):
    path = copy() / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea\nsize 91\n")
    with pytest.raises(
        InputError, match=r"is a pointer of Git LFS, not the file.*Type git lfs install, then git -C '.*' lfs pull"
    ):
        load(path.parent)


def bomb(folder, times):
    """One letter becomes 1,000, and so on."""
    path = folder / "tokenizer.json"
    steps = [
        {"type": "Replace", "pattern": {"String": one}, "content": 1000 * other}
        for one, other in zip("dxyz"[:times], "xyzw", strict=False)
    ]
    change(path, normalizer={"type": "Sequence", "normalizers": steps})
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_tokenizer_that_takes_any_memory_is_stopped(copy, monkeypatch):
    monkeypatch.setattr(trial, "MEMORY", 2**28)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        InputError, match=r"tokenizing the text with the tokenizer of 'bert' takes more than .* of memory"
    ):
        scanned(bomb(copy(), 3))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB: a part of the limit


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_tokenizer_that_takes_any_time_is_stopped(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 0.2)
    told = []
    with pytest.raises(InputError, match=r"the work takes more than 0\.2 seconds, so it was stopped"):
        trial.attempt(lambda: time.sleep(60), "the work", told.append)
    assert told[0] == "the work"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("error", [ValueError("of its own"), InputError("too long"), KeyboardInterrupt()])
def test_an_error_of_the_trial_is_left_to_the_work_itself(error):
    def work():
        raise error

    trial.attempt(work, "the work", lambda words: None)


def test_a_text_is_cut_before_it_is_tokenized(copy, monkeypatch):
    """A tokenizer takes 60 times the size of a text in memory."""
    given, load_one = [], tokenizing.FolderTokenizer._load

    def load_counting(self):
        tokenizer = load_one(self)

        class Counting:
            def __call__(self, text, **options):
                given.append(len(text))
                return tokenizer(text, **options)

            def __getattr__(self, name):
                return getattr(tokenizer, name)

        return Counting()

    monkeypatch.setattr(tokenizing.FolderTokenizer, "_load", load_counting)
    folder = copy()
    long = "the dog sat " * 100_000
    with pytest.raises(InputError, match=r"the text has more than \d+ tokens and BertModel has positions for 64"):
        scanned(folder, long)
    found = scanned(folder, long, truncate=True)
    assert max(given) <= 64 * tokenizing.LETTERS
    assert (found.length, found.truncated) == (64, True)
    assert len(found.text.split()) == 62  # without [CLS] and [SEP]
    gaps = scanned(folder, "the" + " " * 10_000 + "dog", truncate=True)
    assert (gaps.tokens, gaps.truncated) == (["[CLS]", "the", "dog", "[SEP]"], False)
