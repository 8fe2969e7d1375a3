"""`prepare`: an archive becomes a store that holds the same values; what cannot become one is said in one line."""

import logging
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from gribfiles import GLOBE, dataset, ensemble, message, noise, write

from data_prep import open_orographies, open_pair, prepare
from ensemble_ml.config import Control, Packing, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store


@pytest.fixture
def archive(tmp_path):
    """An archive in ENS-10's layout with truth, control, rain and static fields."""
    days, names = (20010101, 20010103), ("t", "z")
    ensemble(tmp_path / "ensemble" / "pl.grib", dates=days, names=names)
    ensemble(tmp_path / "ensemble" / "cf.grib", dates=days, names=names, members=(0,), kind="cf")
    wet = [message("t2m", date=day, step=step, member=m, seed=m) for day in days for step in (0, 24) for m in (1, 2, 3)]
    wet += [
        message("tp", noise(mean=5e-3, std=1e-4), date=day, step="0-24", member=m) for day in days for m in (1, 2, 3)
    ]
    write(tmp_path / "ensemble" / "sfc.grib", wet)
    truth = [
        message(n, date=20010100 + d, member=None, level=z, seed=d)
        for d in range(1, 5)
        for n in names
        for z in (500, 850)
    ]
    truth += [message("t2m", date=20010100 + d, member=None, seed=d) for d in range(1, 5)]
    truth += [
        message("tp", noise(mean=5e-3, std=1e-4), date=20010100 + d, step="0-24", member=None) for d in range(1, 4)
    ]
    write(tmp_path / "truth" / "all.grib", truth)
    write(tmp_path / "static.grib", [message("orog", noise(mean=500)), message("lsm", noise(mean=0.5, std=0.1))])
    (tmp_path / "archive.json").write_text("{}")
    return tmp_path


def config(archive, **changes):
    keys = {"input": str(archive), "truth": str(archive), "static": str(archive / "static.grib")}
    return PrepareConfig(**keys | {"output": str(archive / "store.zarr")} | changes)


def assert_same(one, other, parts):
    for part in parts:
        for date in range(len(one.layout.init_time)):
            found, expected = one.read(part, date), other.read(part, date)
            np.testing.assert_array_equal(found.pressure, expected.pressure)
            np.testing.assert_array_equal(found.surface, expected.surface)
            for here, there in zip(one.present(part, date), other.present(part, date), strict=True):
                np.testing.assert_array_equal(here, there)


def test_a_store_holds_what_the_archive_holds(archive):
    store = open_store(prepare(config(archive)))
    assert store.packing is Packing.uint16 and store.quantisation_error == {}
    assert_same(store, open_pair(archive, archive), Part)
    assert sorted(store.static()) == ["lsm", "orog"]
    assert store.lead_bounds == {"tp": [None, [0, 24]]}
    assert store.provenance["truth"] == [str(archive)] and store.provenance["fingerprint"]


def test_orographies_of_model_and_truth(archive):
    store = open_store(prepare(config(archive)))
    write(archive / "model.grib", [message("orog", noise(mean=300), seed=7)])
    write(archive / "mask.grib", [message("lsm", noise(mean=0.5, std=0.1))])
    model, static = str(archive / "model.grib"), str(archive / "static.grib")
    of_model, of_truth = open_orographies(model, None, store)
    assert abs(of_model.mean() - 300) < 20 < of_truth.mean() - of_model.mean()
    for given in ((model, static, store), (model, static, open_pair(archive, archive))):
        for one, other in zip(open_orographies(*given), (of_model, of_truth), strict=True):
            np.testing.assert_array_equal(one, other)
    assert open_orographies(None, None, store) is None
    bare = open_store(prepare(config(archive, static=None, output=str(archive / "bare.zarr"))))
    with pytest.raises(UserError, match=r"truth_orography: not given, and .*bare.zarr has none; give a file"):
        open_orographies(model, None, bare)
    with pytest.raises(UserError, match=r"orography=.*mask.grib: holds no orography"):
        open_orographies(str(archive / "mask.grib"), static, store)


def test_float32_packing(archive):
    store = open_store(prepare(config(archive, packing=Packing.float32)))
    assert store.packing is Packing.float32
    assert_same(store, open_pair(archive, archive), Part)


def test_control_as_a_member(archive):
    (archive / "ensemble" / "sfc.grib").unlink()
    store = open_store(prepare(config(archive, control=Control.include)))
    assert store.layout.realization == (0, 1, 2, 3) and not store.has(Part.CONTROL)


def test_what_to_keep(archive):
    kept = {"variables": ["t", "tp"], "levels": [850], "leads": [24], "dates": ["2001-01-03"]}
    store = open_store(prepare(config(archive, **kept)))
    lay = store.layout
    assert (lay.names, lay.levels, lay.lead_hours, len(lay.init_time)) == (("t", "tp"), (850,), (24,), 1)
    whole = open_pair(archive, archive)
    np.testing.assert_array_equal(store.read(Part.TRUTH, 0).pressure, whole.read(Part.TRUTH, 1).pressure[:, 1:, :1, 1:])


def test_no_level_keeps_what_has_none(archive):
    layout = open_store(prepare(config(archive, levels=[]))).layout
    assert layout.levels == () and layout.variables == () and layout.surface


def test_two_runs_make_the_same_store(archive):
    stores = [open_store(prepare(config(archive, output=str(archive / name)))) for name in ("a.zarr", "b.zarr")]
    assert stores[0].fingerprint() == stores[1].fingerprint()


def test_differences_of_sums_are_packed_within_the_error_that_is_logged(tmp_path, caplog):
    steps = (("0-24", 1e-3), ("0-48", 4e-3))
    path = write(
        tmp_path / "a.grib",
        [message("tp", noise(mean=v, std=v / 10, seed=m), step=step, member=m) for m in (1, 2) for step, v in steps],
    )
    with caplog.at_level(logging.INFO, "data_prep"):
        store = open_store(prepare(PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr"))))
    bound = store.quantisation_error["tp"]
    found, expected = store.read(Part.FORECAST, 0).surface, open_pair(path).read(Part.FORECAST, 0).surface
    np.testing.assert_array_equal(found[:, 0], expected[:, 0])  # 0-24 h is the archive's own field
    assert 0 < np.abs(found - expected).max() <= bound < 1e-6
    assert any(f"tp: packed into 16 bits, error at most {bound:.3g} m" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("packing", Packing)
def test_netcdf_is_packed_within_the_bound_or_kept(tmp_path, packing):
    dataset().to_netcdf(tmp_path / "a.nc")
    path = prepare(PrepareConfig(input=str(tmp_path / "a.nc"), output=str(tmp_path / "s.zarr"), packing=packing))
    store = open_store(path)
    found, expected = (
        store.read(Part.FORECAST, 1).pressure,
        open_pair(tmp_path / "a.nc").read(Part.FORECAST, 1).pressure,
    )
    if packing is Packing.float32:
        np.testing.assert_array_equal(found, expected)
    else:
        assert 0 < np.abs(found - expected).max() <= store.quantisation_error["t"] < 1e-3


def test_the_store_opens_in_xarray(archive):
    data = xr.open_dataset(prepare(config(archive)), engine="ensemble_ml")
    np.testing.assert_array_equal(
        data["t"][0, 1, 1].values, open_pair(archive).read(Part.FORECAST, 0).pressure[1, 1, 0]
    )


class TestRefusals:
    def refused(self, settings, text):
        with pytest.raises(UserError, match=text) as caught:
            prepare(settings)
        assert "\n" not in str(caught.value)
        folder = [path.name for path in Path(settings.output).parent.iterdir()]
        assert not [name for name in folder if "partial" in name]

    def test_output_that_exists(self, archive):
        first = prepare(config(archive, variables=["t"]))
        self.refused(
            config(archive), "output=.*store.zarr: exists already; choose another folder, or add overwrite=true"
        )
        assert open_store(first).layout.names == ("t",)
        assert "z" in open_store(prepare(config(archive, overwrite=True))).layout.names

    def test_an_archive_in_the_store_that_is_overwritten(self, tmp_path):
        store = prepare(PrepareConfig(input=str(ensemble(tmp_path / "a.grib")), output=str(tmp_path / "s.zarr")))
        path = ensemble(store / "raw" / "b.grib", names=("t", "z"))
        for settings in ({"input": str(path)}, {"input": str(tmp_path / "a.grib"), "truth": str(store / "raw")}):
            wanted = PrepareConfig(output=str(store), overwrite=True, **settings)
            self.refused(wanted, "lies in the output, which overwrite=true removes")
        assert path.exists()

    def test_a_member_missing_on_one_date(self, tmp_path):
        gone = [(20010102, 3, step, "t", level) for step in (0, 24) for level in (500, 850)]
        path = ensemble(tmp_path / "a.grib", leave_out=gone)
        settings = PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr"))
        self.refused(settings, r"member 3 at 2001-01-02T00 lacks t at 500 hPa, lead 0 h \(4 fields\); .*dates=")
        settings.dates = ["2001-01-01"]
        assert open_store(prepare(settings)).layout.realization == (1, 2, 3)

    def test_a_level_missing_for_one_member_on_one_date(self, tmp_path):
        path = ensemble(tmp_path / "a.grib", leave_out=[(20010101, 2, 24, "t", 850)])
        settings = PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr"))
        self.refused(
            settings, "1 field of 1 init time missing: member 2 at 2001-01-01T00 lacks t at 850 hPa, lead 24 h; other"
        )

    def test_a_control_missing_on_one_date(self, archive):
        ensemble(archive / "ensemble" / "cf.grib", dates=(20010101,), names=("t", "z"), members=(0,), kind="cf")
        self.refused(config(archive), "the control at 2001-01-03T00 lacks t at 500 hPa, lead 0 h")

    def test_truth_absent_for_a_date(self, archive):
        made = [message("t", date=20010100 + d, member=None, level=z) for d in (1, 2, 3) for z in (500, 850)]
        write(archive / "truth" / "all.grib", made)
        text = (
            "truth .*: 2 fields of 1 init time missing: lacks t at 500 hPa at 2001-01-04T00, which verifies the init "
            r"time 2001-01-03T00 at lead 24 h \(2 fields\); complete it, choose init times with dates=..., set gaps="
        )
        self.refused(config(archive), text)
        assert not open_store(prepare(config(archive, truth=None))).has(Part.TRUTH)

    def test_truth_at_other_times(self, archive):
        write(archive / "truth" / "all.grib", [message("t", date=19900101, member=None)])
        periods = r"the forecast is valid 2001-01-01 to 2001-01-04 \(00 UTC\), the truth 1990-01-01 to 1990-01-01"
        self.refused(config(archive), rf"truth .*: {periods} \(00 UTC\); give the truth of those times, or none")

    def test_truth_at_other_hours(self, archive):
        made = [message("t", date=20010100 + d, time=600, member=None) for d in range(1, 5)]
        write(archive / "truth" / "all.grib", made)
        self.refused(config(archive), r"2001-01-04 \(00 UTC\), the truth 2001-01-01 to 2001-01-04 \(06 UTC\); give")

    def test_truth_of_other_variables(self, archive):
        made = [message("q", date=20010100 + d, member=None) for d in range(1, 5)]
        write(archive / "truth" / "all.grib", made)
        self.refused(config(archive), "truth .*: has no field at any valid time of the forecast")

    def test_a_variable_without_truth_is_masked_and_said(self, archive, caplog):
        made = [message("t", date=20010100 + d, member=None, level=z) for d in range(1, 5) for z in (500, 850)]
        write(archive / "truth" / "all.grib", made)
        with caplog.at_level(logging.WARNING, "data_prep"):
            store = open_store(prepare(config(archive)))
        assert store.present(Part.TRUTH, 0)[0][0, 0].tolist() == [[True, True], [False, False]]
        assert [r.getMessage().split(": ")[1][:1] for r in caplog.records] == ["z", "t", "t"]

    def test_values_that_are_no_numbers(self, tmp_path):
        data = dataset()
        data["t"].values[1, 0, 0, 0, 0, 0] = np.nan
        data.to_netcdf(tmp_path / "a.nc")
        settings = PrepareConfig(input=str(tmp_path / "a.nc"), output=str(tmp_path / "s.zarr"))
        self.refused(
            settings,
            "t at 850 hPa, member 1, 2001-01-03T00, lead 0 h: 1 of 84 values are NaN, infinite or beyond 1e.15",
        )

    def test_a_truncated_file(self, archive):
        path = archive / "ensemble" / "pl.grib"
        path.write_bytes(path.read_bytes()[:-50])
        self.refused(config(archive), "pl.grib: message 48 at byte .* truncated")

    def test_a_static_file_on_another_grid(self, archive):
        grid = GLOBE[0], np.arange(0.0, 360.0, 15.0)
        write(archive / "static.grib", [message("orog", grid=grid)])
        self.refused(config(archive), r"static=.*: grid 7 x 24 points.* differs from the forecast's")

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"input": "nowhere.grib"}, "nowhere.grib: no such file or folder"),
            ({"input": "???"}, "input: is not given"),
            ({"truth": "nowhere"}, "nowhere: no such file or folder; give the truth archive's path"),
            ({"variables": ["temprature"]}, "variable temprature: unknown; did you mean"),
            ({"variables": ["q"]}, "variables=q: .* has none of it"),
            ({"dates": ["2007"]}, "dates 2007: no init time lies there"),
        ],
    )
    def test_settings(self, archive, changes, text):
        self.refused(config(archive, **changes), text)

    def test_a_store_is_no_archive(self, archive):
        store = prepare(config(archive))
        self.refused(config(archive, input=str(store), output=str(archive / "b.zarr")), "is a tensor store already")
