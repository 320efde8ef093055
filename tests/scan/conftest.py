"""Shared by the tests of the scan: folders to load, and the embedded model."""

import pytest

from attemper.demo import embedded
from folders import save


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
