

def test_backups_hold_each_row_once(mirrored, tmp_path):
    with mirrored.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(2000), keras.layers.Dense(3)]
        )
        model.compile(tfo.ShardedState(keras.optimizers.Adam(0.01)), "mse")
    backup = tfo.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[backup])
    (path,) = tmp_path.glob("*.npz")
    # Weights, m and v; entries of the archive have headers.
    assert path.stat().st_size < 1.1 * 3 * 4 * model.count_params()
    before = [v.numpy() for v in model.optimizer.variables]
    for variable in model.optimizer.variables[2:]:
        variable.assign(tf.zeros_like(variable))
    options = {"epochs": 1, "verbose": 0, "callbacks": [backup]}
    with pytest.warns(UserWarning, match="must be of an earlier epoch"):
        model.fit(X, Y, batch_size=8, **options)
    for variable, value in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
