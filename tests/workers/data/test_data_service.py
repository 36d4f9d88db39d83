"""A service of `tf.data` prepares the batches of two workers."""

import pytest
import real_workers
import tensorflow as tf


@pytest.mark.long
def test_two_workers_train_on_data_of_a_service(tmp_path, monkeypatch):
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.removeprefix("grpc://")
    server = service.WorkerServer(service.WorkerConfig(address))
    monkeypatch.setenv("SERVICE", dispatcher.target)
    first, second = real_workers.results("data_service", tmp_path, 2)
    assert first == second
    assert first["served"] == first["local"]
    before, after = first["shared"][1]
    assert after < before
    del server
