"""The data of the demo."""

import socket

import pytest


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Return a folder with the dataset, made without the network."""
    # Some tests of this folder do without the demo's dependencies.
    from tf_optimizers.demo.data import prepare

    folder = tmp_path_factory.mktemp("data")

    def refuse(*_):
        raise OSError("The demo's data must not need the network.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        prepare(folder)
    return folder
