"""A store that another test has made is the store that this one would make."""

import numpy as np
import pytest
import stores
import synthetic

from ensemble_ml.store import Part

SMALL = {"dates": 2, "members": 3, "shape": (9, 16)}


def test_a_store_is_made_once_and_each_test_has_its_own(tmp_path, monkeypatch):
    made, make = [], synthetic.make_store
    monkeypatch.setattr(stores, "_kept", tmp_path / "kept")
    monkeypatch.setattr(synthetic, "make_store", lambda path, **given: made.append(given) or make(path, **given))
    first, second = (stores.make_store(tmp_path / f"{name}.zarr", **SMALL) for name in "ab")
    assert made == [SMALL] and first.fingerprint() == second.fingerprint() and first.path != second.path
    for part in (Part.FORECAST, Part.TRUTH):
        np.testing.assert_array_equal(first.read(part, 1).pressure, second.read(part, 1).pressure)
    (tmp_path / "a.zarr" / "zarr.json").unlink()  # as a test that damages its store
    assert stores.make_store(tmp_path / "c.zarr", **SMALL).fingerprint() == second.fingerprint()
    other = stores.make_store(tmp_path / "d.zarr", **SMALL, seed=1)
    assert len(made) == 2 and other.fingerprint() != second.fingerprint()
    monkeypatch.setitem(synthetic.SCALES, "t2m", (300.0, 1.0))
    stores.make_store(tmp_path / "e.zarr", **SMALL)
    assert len(made) == 3


def test_what_exists_is_not_written_over(tmp_path):
    stores.make_store(tmp_path / "a.zarr", **SMALL)
    with pytest.raises(FileExistsError):
        stores.make_store(tmp_path / "a.zarr", **SMALL)
