"""Points without a value: kept as a mask beside the integers, NaN when read, left out of every statistic."""

import numpy as np
import pytest
import xarray as xr
import zarr
from synthetic import make_layout

from ensemble_ml.config import Packing
from ensemble_ml.errors import UserError
from ensemble_ml.store import PackedBlock, Part, Selection, StoreWriter, decode, open_store, quantise

MEMBERS, SHAPE = 3, (40, 96)  # 40 rows: chunks of one level are the whole grid, of eleven are 16 rows


def make(path, packing, layout=None):
    """Two dates; on the second, t2m and t at the first level have masked points, in one member more than in others."""
    layout = layout or make_layout(dates=2, members=MEMBERS, levels=tuple(range(100, 1200, 100)), shape=SHAPE)
    rng = np.random.default_rng(1)
    held = []
    with StoreWriter(path, layout, parts=[Part.FORECAST], packing=packing) as writer:
        for date in range(2):
            lead = len(layout.lead_hours)
            pressure = rng.normal(250, 5, (MEMBERS, lead, 2, 11, *SHAPE)).astype(np.float32)
            surface = rng.normal(280, 5, (MEMBERS, lead, 1, *SHAPE)).astype(np.float32)
            masks = np.zeros(pressure.shape, bool), np.zeros(surface.shape, bool)
            if date:
                masks[0][:, :, 0, 0, :10], masks[1][:, :, 0, 5:9, 7:] = True, True
                masks[1][1, :, 0, 30:, 3] = True
            blocks = []
            for values, mask in zip((pressure, surface), masks, strict=True):
                values[mask] = np.nan
                blocks.append(quantise(values, mask=mask if mask.any() else None))
            held.append([decode(block) for block in blocks])
            writer.write(Part.FORECAST, date, *blocks)
    return open_store(path), held


@pytest.mark.parametrize("packing", Packing)
def test_masked_points_are_nan_and_all_others_exact(tmp_path, packing):
    store, held = make(tmp_path / "s.zarr", packing)
    assert store.masked == ("t", "t2m")
    for date, (pressure, surface) in enumerate(held):
        fields = store.read(Part.FORECAST, date)
        np.testing.assert_array_equal(fields.pressure, pressure)
        np.testing.assert_array_equal(fields.surface, surface)
        assert all(there.all() for there in store.present(Part.FORECAST, date))  # a masked field is there
    some = store.read(Part.FORECAST, 1, Selection(realization=(2,), levels=(500, 100), rows=(7, 36)))
    np.testing.assert_array_equal(some.pressure, held[1][0][[1]][:, :, :, [4, 0], 7:36])


@pytest.mark.parametrize("packing", Packing)
def test_mean_spread_and_statistics_leave_masked_points_out(tmp_path, packing):
    store, held = make(tmp_path / "s.zarr", packing)
    for date, values in enumerate(held):
        for part, expected in ((Part.MEAN, np.mean), (Part.SPREAD, lambda x, **k: np.std(x, ddof=1, **k))):
            fields = store.read(part, date)
            for ours, kind in zip((fields.pressure, fields.surface), values, strict=True):
                np.testing.assert_allclose(ours[0], expected(kind.astype(float), axis=0), rtol=1e-5, atol=1e-5)
    moments = store.statistics([2001]).surface
    every = np.stack([surface for _, surface in held])[:, :, 1, 0].astype(float)
    assert moments.count[1, 0] == np.isfinite(every).sum()
    assert moments.mean[1, 0] == pytest.approx(np.nanmean(every), rel=1e-9)
    assert moments.std[1, 0] == pytest.approx(np.nanstd(every), rel=1e-6)
    assert moments.minimum[1, 0] == np.nanmin(every) and moments.maximum[1, 0] == np.nanmax(every)


def test_only_what_is_masked_is_stored(tmp_path):
    store, _ = make(tmp_path / "s.zarr", Packing.uint16)
    folder = tmp_path / "s.zarr"
    for name in ("forecast_pressure_mask", "forecast_surface_mask"):
        shards = sorted(path.name for path in (folder / name).glob("c.*"))
        assert [name[:3] for name in shards] == ["c.1"]  # the first date has no mask
        mask = zarr.open_array(folder / name, mode="r")
        assert mask.dtype == np.uint8 and not mask[0].any()
    flags = zarr.open_array(folder / "forecast_pressure_mask", mode="r")[1]
    np.testing.assert_array_equal(flags == 1, np.isnan(store.read(Part.FORECAST, 1).pressure))
    size = (folder / "forecast_pressure_mask" / "c.1.0.0.0.0.0.0").stat().st_size
    assert size < 16 * MEMBERS * 3 * 2 * 3 + 4 + 3 * MEMBERS * 400  # index, and the first block of t alone
    plain, _ = make(tmp_path / "f.zarr", Packing.float32)
    assert plain.masked == store.masked and not list((tmp_path / "f.zarr").glob("*_mask"))


def test_a_store_without_masks_has_no_array_of_them(tmp_path):
    layout = make_layout(dates=1, members=2, shape=(7, 12))
    with StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.TRUTH]) as writer:
        ones = np.ones((1, 3, 2, 2, 7, 12), np.float32)
        writer.write(Part.TRUTH, 0, PackedBlock.plain(ones, mask=np.zeros(ones.shape, bool)), None)
    assert open_store(tmp_path / "s.zarr").masked == () and not list((tmp_path / "s.zarr").glob("*_mask"))


def test_xarray_shows_nan(tmp_path):
    _, held = make(tmp_path / "s.zarr", Packing.uint16)
    with xr.open_dataset(tmp_path / "s.zarr", engine="ensemble_ml") as shown:
        np.testing.assert_array_equal(shown["t2m"].isel(init_time=1).values, held[1][1][:, :, 0])
        assert not [name for name in shown.variables if "mask" in name]


def test_what_is_not_a_number_without_being_masked_is_refused():
    values = np.ones((2, 3, 4), np.float32)
    values[1, 0, 0] = np.nan
    mask = np.zeros(values.shape, bool)
    with pytest.raises(UserError, match="1 of 12 values are not numbers"):
        quantise(values, mask=mask)
    mask[1] = True  # all of a field
    assert np.isnan(decode(quantise(values, mask=mask))[1]).all()
    with pytest.raises(ValueError, match="mask is bool of shape"):
        PackedBlock.plain(values, mask=mask[:1])
