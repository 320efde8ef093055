"""Shared by the tests of the scan: folders to load, the embedded model, the command in this process."""

import pytest

from attemper import cli
from attemper.demo import embedded
from folders import save
from watched import state


@pytest.fixture
def nothing_is_left_behind():
    before = state()
    yield
    assert state() == before


@pytest.fixture(scope="session")
def minilm():
    """The embedded model and its tokenizer; it is part of what the tests install."""
    return embedded()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a model of the zoo, by name."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = save(tmp_path_factory.mktemp(name) / f"tiny-{name}", name)
        return made[name]

    return of


@pytest.fixture
def attemper_command(capsys):
    """Runs the command in this process; gives exit code, stdout and stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in arguments])
        return ended.value.code or 0, *capsys.readouterr()

    return call
