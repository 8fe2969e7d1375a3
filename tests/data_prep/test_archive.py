"""Archives behind the face of a source: names, axes, control, ragged leads, intervals; GRIB, NetCDF and Zarr alike."""

import json
import logging
from functools import partial

import numpy as np
import pytest
from gribfiles import REGION, decoded, ensemble, message, noise, write

from data_prep import find_gaps, open_archive, open_pair
from data_prep.files import archive_files
from data_prep.selecting import slices_of
from ensemble_ml.config import Control
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, Selection


class TestGrib:
    def test_layout_and_values(self, tmp_path):
        path = ensemble(tmp_path / "a.grib", names=("t", "z", "t2m"), levels=(850, 500))
        source = open_archive(path)
        lay = source.layout
        assert lay.init_time.astype("datetime64[D]").astype(str).tolist() == ["2001-01-01", "2001-01-02"]
        assert (lay.realization, lay.lead_hours, lay.levels) == ((1, 2, 3), (0, 24), (500, 850))
        assert (lay.variables, lay.surface) == (("t", "z"), ("t2m",))
        fields = [source.read(Part.FORECAST, date) for date in range(2)]
        assert fields[0].pressure.shape == (3, 2, 2, 2, 7, 12) and fields[0].surface.shape == (3, 2, 1, 7, 12)
        for keys, values in decoded(path):
            date, member, lead = keys["dataDate"] - 20010101, keys["number"] - 1, keys["endStep"] // 24
            if keys["paramId"] == 167:
                found = fields[date].surface[member, lead, 0]
            else:
                found = fields[date].pressure[member, lead, 130 - keys["paramId"], lay.levels.index(keys["level"])]
            np.testing.assert_array_equal(found, values)

    def test_selection_by_coordinate(self, tmp_path):
        source = open_archive(ensemble(tmp_path / "a.grib", names=("t", "z", "t2m", "msl")))
        whole = source.read(Part.FORECAST, 1)
        some = source.read(Part.FORECAST, 1, Selection((3, 1), (24,), ("z",), (850,), ("msl",), (2, 5)))
        np.testing.assert_array_equal(some.pressure, whole.pressure[[2, 0]][:, 1:, 1:, 1:, 2:5])
        np.testing.assert_array_equal(some.surface, whole.surface[[2, 0]][:, 1:, 1:, 2:5])
        for selection, text in (
            (Selection(realization=(9,)), "realization=9: .* has 1, 2, 3"),
            (Selection(levels=(10,)), "levels=10"),
            (Selection(variables=("q",)), "variables=q"),
            (Selection(rows=(5, 9)), "no rows 5 to 9"),
            (Selection(realization=(3, 3)), r"realization=\[3, 3\]: holds a value twice; give each once"),
        ):
            with pytest.raises(UserError, match=text):
                source.read(Part.FORECAST, 0, selection)

    def test_one_member_has_no_mean(self, tmp_path):
        source = open_archive(ensemble(tmp_path / "a.grib", members=(1,)))
        assert source.has(Part.FORECAST) and not source.has(Part.MEAN) and not source.has(Part.SPREAD)

    def test_mean_and_spread_are_those_of_all_members(self, tmp_path):
        source = open_archive(ensemble(tmp_path / "a.grib", names=("t", "t2m")))
        members = source.read(Part.FORECAST, 0)
        for part, moment in ((Part.MEAN, np.mean), (Part.SPREAD, lambda x, axis: np.std(x, axis, ddof=1))):
            found = source.read(part, 0)
            np.testing.assert_allclose(found.pressure[0], moment(members.pressure.astype(float), axis=0), rtol=1e-6)
            np.testing.assert_allclose(found.surface[0], moment(members.surface.astype(float), axis=0), rtol=1e-6)
            assert source.has(part) and all(there.all() for there in source.present(part, 0))

    def test_order_of_files_and_messages_means_nothing(self, tmp_path):
        path = ensemble(tmp_path / "a.grib")
        parts = [message for message in path.read_bytes().split(b"7777") if message]
        for number, part in enumerate(parts[::-1]):
            write(tmp_path / "many" / f"{number}.grib", [part + b"7777"])
        one, many = open_archive(path), open_archive(tmp_path / "many")
        np.testing.assert_array_equal(one.read(Part.FORECAST, 1).pressure, many.read(Part.FORECAST, 1).pressure)

    def test_ens10_layout_of_one_calendar_date_a_file(self, tmp_path):
        for day in (101, 105):
            years = (20010000 + day, 20020000 + day)
            ensemble(tmp_path / f"pl_{day:04d}.grib", dates=years, names=("t",))
            ensemble(tmp_path / f"sfc_{day:04d}.grib", dates=years, names=("t2m",))
        source = open_archive(tmp_path)
        starts = source.layout.init_time.astype("datetime64[D]").astype(str).tolist()
        assert starts == ["2001-01-01", "2001-01-05", "2002-01-01", "2002-01-05"]
        assert find_gaps(source) == [] and source.layout.names == ("t", "t2m")

    def test_what_to_keep(self, tmp_path):
        path = ensemble(tmp_path / "a.grib", names=("t", "z", "t2m"))
        kept = open_archive(path, variables=["z", "t2m"], levels=[850], leads=[24], dates=["2001-01-02"]).layout
        assert (kept.names, kept.levels, kept.lead_hours, len(kept.init_time)) == (("z", "t2m"), (850,), (24,), 1)
        for wrong, text in (
            ({"variables": ["tt"]}, "variable tt: unknown"),
            ({"variables": ["q"]}, "variables=q: .* it has t, z, t2m"),
            ({"levels": [700]}, "levels=700: .* it has 500, 850"),
            ({"leads": [48]}, "leads=48: .* it has 0, 24"),
            ({"dates": ["1999"]}, "dates 1999: no init time"),
        ):
            with pytest.raises(UserError, match=text):
                open_archive(path, **wrong)


class TestControl:
    @pytest.fixture
    def path(self, tmp_path):
        perturbed = [message("t", member=number, seed=number) for number in (1, 2)]
        return write(tmp_path / "a.grib", [*perturbed, message("t", member=0, kind="cf", seed=9)])

    def test_it_is_kept_apart(self, path):
        source = open_archive(path)
        assert source.layout.realization == (1, 2) and source.has(Part.CONTROL)
        control = source.read(Part.CONTROL, 0).pressure
        assert control.shape[0] == 1
        np.testing.assert_array_equal(control[0, 0, 0, 0], list(decoded(path))[2][1])

    def test_it_can_be_counted_as_a_member(self, path):
        source = open_archive(path, control=Control.include)
        assert source.layout.realization == (0, 1, 2) and not source.has(Part.CONTROL)
        np.testing.assert_array_equal(source.read(Part.FORECAST, 0).pressure[0, 0, 0, 0], list(decoded(path))[2][1])
        with pytest.raises(UserError, match="has no control"):
            source.read(Part.CONTROL, 0)

    def test_it_may_stand_alone_only_as_a_member(self, tmp_path):
        path = write(tmp_path / "a.grib", [message("t", member=0, kind="cf")])
        with pytest.raises(UserError, match=r"no member of an ensemble is left; .*control=include"):
            open_archive(path)
        assert open_archive(path, control=Control.include).layout.realization == (0,)

    def test_its_number_may_be_taken(self, tmp_path):
        path = write(tmp_path / "a.grib", [message("t", member=0), message("t", member=0, kind="cf")])
        assert open_archive(path).has(Part.CONTROL)
        with pytest.raises(UserError, match=r"control=include: .* has a perturbed member 0 beside it"):
            open_archive(path, control=Control.include)


class TestMissing:
    def test_ragged_by_design_is_masked(self, tmp_path):
        upper = ensemble(tmp_path / "a.grib", steps=(78,), levels=(850,), names=("t",))
        gusts = ensemble(tmp_path / "b.grib", steps=("69-72", "75-78"), names=("fg10",))
        source = open_archive([upper, gusts])
        assert find_gaps(source) == []
        assert source.layout.lead_hours == (72, 78)
        assert source.lead_bounds == {"fg10": [[69, 72], [75, 78]]}
        pressure, surface = source.present(Part.FORECAST, 0)
        assert not pressure[:, 0].any() and pressure[:, 1].all() and surface.all()
        values = source.read(Part.FORECAST, 0).pressure
        assert np.isnan(values[:, 0]).all() and np.isfinite(values[:, 1]).all()

    def test_what_has_none_of_the_leads_is_left_out(self, tmp_path):
        upper = ensemble(tmp_path / "a.grib", steps=(78,), levels=(850,), names=("t",))
        gusts = ensemble(tmp_path / "b.grib", steps=("69-72", "75-78"), names=("fg10",))
        assert open_archive([upper, gusts], leads=[72]).layout.names == ("fg10",)
        with pytest.raises(UserError, match=r"variables=t: .* has none of it at leads=\[72\] h"):
            open_archive([upper, gusts], leads=[72], variables=["t", "fg10"])

    def test_a_gap_is_named(self, tmp_path):
        gone = [(20010102, 2, 24, "t", 500)]
        source = open_archive(ensemble(tmp_path / "a.grib", leave_out=gone))
        assert [str(gap) for gap in find_gaps(source)] == ["member 2 at 2001-01-02T00 lacks t at 500 hPa, lead 24 h"]
        assert not source.present(Part.FORECAST, 1)[0][1, 1, 0, 0]
        assert np.isnan(source.read(Part.FORECAST, 1).pressure[1, 1, 0, 0]).all()
        assert np.isnan(source.read(Part.SPREAD, 1).pressure).sum() == 0  # of the members that are there

    def test_the_same_field_twice(self, tmp_path):
        one, two = ensemble(tmp_path / "a.grib"), ensemble(tmp_path / "b.grib", dates=(20010102,))
        with pytest.raises(
            UserError, match=r"t at 500 hPa, member 1, 2001-01-02T00, lead 0 h: stands twice in .*a.grib and .*b"
        ):
            open_archive([one, two])
        assert open_archive([one, one]).layout.realization == (1, 2, 3)  # one path said twice is one file

    def test_ranges_of_two_kinds_at_one_lead(self, tmp_path):
        path = write(tmp_path / "a.grib", [message("fg10", step="69-72"), message(123, step="66-72")])
        with pytest.raises(UserError, match="fg10: steps 66-72 and 69-72 end at the same lead"):
            open_archive(path)


class TestFiles:
    def test_a_simulated_archive_stands_for_its_parts(self, tmp_path):
        ensemble(tmp_path / "ensemble" / "pl_0101.grib")
        write(tmp_path / "truth" / "pl_0101.grib", [message("t", member=None)])
        (tmp_path / "archive.json").write_text(json.dumps({"format": 1}))
        assert open_archive(tmp_path).layout.realization == (1, 2, 3)
        assert archive_files(tmp_path, role="truth") == [str(tmp_path / "truth" / "pl_0101.grib")]

    def test_globs_and_lists(self, tmp_path):
        a, b = ensemble(tmp_path / "a.grib"), ensemble(tmp_path / "b.grib", dates=(20010105,))
        assert len(open_archive(str(tmp_path / "*.grib")).layout.init_time) == 3
        assert len(open_archive([str(a), str(b)]).layout.init_time) == 3

    @pytest.mark.parametrize(
        ("name", "content", "text"),
        [
            ("a.grib", None, "a.grib: no such file or folder"),
            ("a.grib", b"", "a.grib: is empty"),
            ("a.grib", b"hello world", "a.grib: neither GRIB nor NetCDF nor Zarr"),
            ("a.nc", b"\x89HDF\r\n\x1a\nrubbish", "a.nc: cannot be opened as NetCDF or Zarr"),
            ("*.grib", None, "no such file or folder"),
        ],
    )
    def test_what_is_no_archive(self, tmp_path, name, content, text):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=text) as caught:
            open_archive(tmp_path / name)
        assert "\n" not in str(caught.value)

    def test_an_empty_folder(self, tmp_path):
        with pytest.raises(UserError, match="holds no archive file"):
            open_archive(tmp_path)

    def test_two_grids(self, tmp_path):
        ensemble(tmp_path / "a.grib")
        ensemble(tmp_path / "b.grib", grid=REGION, names=("z",))
        with pytest.raises(UserError, match=r"b.grib: grid 4 x 7 points.* differs from that of .*a.grib"):
            open_archive(tmp_path)

    def test_nothing_that_is_known(self, tmp_path):
        with pytest.raises(UserError, match=r"holds no field that the registry knows; it has 78 \("):
            open_archive(write(tmp_path / "a.grib", [message(78)]))

    def test_unknown_variables_are_counted_in_one_line(self, tmp_path, caplog):
        with caplog.at_level(logging.INFO, "data_prep"):
            open_archive(write(tmp_path / "a.grib", [message("t"), message(78), message(78, member=2)]))
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1 and "2 fields of variables that the registry does not know" in lines[0]

    def test_fingerprint_follows_the_content(self, tmp_path):
        first = open_archive(ensemble(tmp_path / "x" / "a.grib")).fingerprint()
        assert open_archive(ensemble(tmp_path / "y" / "a.grib")).fingerprint() == first
        assert open_archive(ensemble(tmp_path / "z" / "a.grib", bits=12)).fingerprint() != first

    def test_static_fields(self, tmp_path):
        path = ensemble(tmp_path / "a.grib")
        static = write(
            tmp_path / "static.grib", [message("orog", noise(mean=500)), message("lsm", noise(mean=0.5, std=0.1))]
        )
        found = open_pair(path, None, static).static()
        assert sorted(found) == ["lsm", "orog"] and found["orog"].dtype == np.float32
        np.testing.assert_array_equal(found["orog"], next(decoded(static))[1])
        assert open_pair(path).static() == {}
        assert sorted(open_archive([path, static]).static()) == ["lsm", "orog"]
        with pytest.raises(UserError, match=r"static=.*b.grib: grid 4 x 7 .* differs from the forecast's, 7 x 12"):
            open_pair(path, None, write(tmp_path / "b.grib", [message("orog", grid=REGION)]))
        with pytest.raises(UserError, match="holds no static field"):
            open_pair(path, None, path)


class TestSlices:
    def test_slices_together_are_the_whole(self, tmp_path):
        path = ensemble(tmp_path / "a.grib", names=("t", "z", "t2m"), leave_out=[(20010101, 2, 24, "t", 500)])
        truth = write(
            tmp_path / "t.grib", [message(n, date=20010102, level=z, member=None) for n in "tz" for z in (500, 850)]
        )
        pair = open_pair(path, truth)
        ways = partial(pair.forecast.gather, Part.FORECAST), pair.truth.gather
        for part, gather in zip((Part.FORECAST, Part.TRUTH), ways, strict=True):
            whole, seen = pair.read(part, 0), 0
            for selection in slices_of(pair.layout):
                gathered = gather(0, selection)
                lead = pair.layout.lead_hours.index(*selection.lead_hours)
                found = gathered.decoded()[bool(selection.surface)]
                if selection.surface:
                    expected = whole.surface[:, [lead]]
                else:
                    variable = pair.layout.variables.index(*selection.variables)
                    expected = whole.pressure[:, [lead]][:, :, [variable]]
                np.testing.assert_array_equal(found, expected)
                seen += found.size
            assert seen == whole.pressure.size + whole.surface.size


@pytest.mark.parametrize("edition", [1, 2])
def test_means_and_spreads_of_an_ensemble_are_no_members(tmp_path, edition):
    members = [message("t", member=m, edition=edition, seed=m) for m in (1, 2, 3)]
    if edition == 1:
        derived = [message("t", member=0, kind=kind, seed=9) for kind in ("em", "es")]
    else:
        derived = [
            message("t", member=None, edition=2, productDefinitionTemplateNumber=2, derivedForecast=n, seed=9)
            for n in (0, 4)
        ]
    source = open_archive(write(tmp_path / "a.grib", [*derived, *members]))
    assert source.layout.realization == (1, 2, 3)


def test_a_folder_that_is_a_link_is_looked_into(tmp_path):
    ensemble(tmp_path / "far" / "b.grib", dates=(20020101,))
    ensemble(tmp_path / "in" / "a.grib", dates=(20010101,))
    (tmp_path / "in" / "2002").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "round").symlink_to(tmp_path / "in")
    assert len(open_archive(tmp_path / "in").layout.init_time) == 2


def test_a_file_that_took_the_place_of_another_is_read(tmp_path):
    path = ensemble(tmp_path / "a.grib", dates=(20010101,))
    open_archive(path).read(Part.FORECAST, 0)
    ensemble(tmp_path / "new.grib", dates=(20030101, 20030102)).replace(path)
    source = open_archive(path)
    assert len(source.layout.init_time) == 2
    source.read(Part.FORECAST, 1)
