"""Shared by the tests of integrations/."""

import socket

import pytest


@pytest.fixture
def free_port():
    """A port of this machine that nobody uses, for processes to meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
