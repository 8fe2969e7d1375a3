"""`inspect` says of an archive what `prepare` takes, and what it leaves out, before anything is built."""

import json

import pytest
from gribfiles import dataset, ensemble, message, write

from data_prep import prepare
from data_prep.inspect import describe_archive
from ensemble_ml import cli
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store

UNKNOWN = 33  # density of snow, which the registry does not know


@pytest.fixture
def archive(tmp_path):
    """Two start dates of three members, a control with a lead more, sums, a deterministic run, and a stray file."""
    folder = tmp_path / "arc"
    ensemble(folder / "a.grib", names=("t", "t2m"))
    ensemble(folder / "b.grib", names=("tp",), steps=(0, "0-24"))
    ensemble(folder / "c.grib", members=(0,), kind="cf", steps=(0, 24, 48))
    write(folder / "oper.grib", [message("t", member=None, dataType="fc", step=24)])
    write(folder / "odd.grib", [message(UNKNOWN, date=20010101, member=m) for m in (1, 2)])
    (folder / "notes.txt").write_text("of somebody")
    return folder


def test_what_prepare_takes_is_what_it_then_takes(archive, tmp_path):
    found = describe_archive(str(archive))
    store = open_store(prepare(PrepareConfig(input=str(archive), output=str(tmp_path / "s.zarr"))))
    lay = store.layout
    assert found["dates"]["count"] == len(lay.init_time) == 2
    assert (found["dates"]["first"], found["dates"]["last"]) == ("2001-01-01T00:00", "2001-01-02T00:00")
    assert found["dates"]["by_year"] == {"2001": 2}
    for name, value in (("members", lay.realization), ("lead_hours", lay.lead_hours), ("variables", lay.variables),
                        ("levels", lay.levels), ("surface", lay.surface)):  # fmt: skip
        assert found[name] == list(value), name
    assert found["grid"] == lay.grid.describe() and found["control"] and store.has(Part.CONTROL)
    assert found["lead_bounds"] == {"tp": [None, [0, 24]]} == store.lead_bounds
    assert found["gaps"] == {"fields": 0, "dates": 0, "all": []}
    # per date: 3 members x 2 leads x (t at 2 levels, t2m), a sum for each member, and 2 leads x 2 levels of the control
    assert found["fields"] == 2 * (3 * 2 * 3 + 3 + 2 * 2)


def test_what_is_left_out_has_its_reason(archive):
    found = describe_archive(str(archive))
    (unknown,) = (label for label in found["left_out"] if label.split(" (")[0] not in ("t", "tp"))
    assert found["left_out"] == {
        unknown: 2,
        "t (without a member number)": 1,
        "t (of the control, where no member has it, or over other hours than the members')": 4,
        "tp (a sum at the start of the forecast, which is zero)": 6,
    }
    assert {one["path"]: one["fields"] for one in found["files"]} == {
        str(archive / name): fields
        for name, fields in (("a.grib", 36), ("b.grib", 6), ("c.grib", 8), ("odd.grib", 0), ("oper.grib", 0))
    }
    assert all(one["bytes"] == (archive / one["path"]).stat().st_size for one in found["files"])
    assert found["other_files"] == [str(archive / "notes.txt")]


def test_gaps_are_named(tmp_path):
    gone = [(20010102, 2, 24, "t", 500)]
    ensemble(tmp_path / "a.grib", leave_out=gone)
    assert describe_archive(str(tmp_path / "a.grib"))["gaps"] == {
        "fields": 1, "dates": 1, "all": ["member 2 at 2001-01-02T00 lacks t at 500 hPa, lead 24 h"]
    }  # fmt: skip


def test_the_page_and_the_object(archive, capsys):
    assert cli.main(["inspect", str(archive)]) == 0
    text = capsys.readouterr().out
    for line in (
        f"{archive}: archive, 5 files, ", "What prepare takes: 50 fields", "2, 2001-01-01T00:00 to 2001-01-02T00:00",
        "control          kept apart (control=include makes it a member)", "intervals        tp 0-24 h", "Gaps: none",
        "Left out: 13 fields", "  t (without a member number) ", "Files that nothing is taken from: 2",
        f"Beside them, no files of the archive: 1\n  {archive / 'notes.txt'}",
    ):  # fmt: skip
        assert line in text, line
    assert cli.main(["inspect", str(archive), "format=json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe_archive(str(archive))


@pytest.mark.parametrize("given", ["a.nc", "*.nc", "b.zarr", ".", ["a.nc", "c.nc"]])
def test_other_formats_patterns_and_lists(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    data = dataset()
    data.to_netcdf("a.nc")
    data.assign_coords(time=data.time.values + (data.time.values[1] - data.time.values[0]) * 2).to_netcdf("c.nc")
    dates = 2 if given in ("a.nc", "b.zarr") else 4
    if given in ("b.zarr", "."):
        moved = data.assign_coords(time=data.time.values + (data.time.values[1] - data.time.values[0]) * 4)
        moved.to_zarr("b.zarr")
        dates = 2 if given == "b.zarr" else 6
    found = describe_archive(given)
    assert found["dates"]["count"] == dates and found["variables"] == ["t"] and found["levels"] == [500, 850]
    assert found["fields"] == dates * 3 * 2 * 2 and found["left_out"] == {} and found["other_files"] == []
    assert len(found["files"]) == {"a.nc": 1, "*.nc": 2, "b.zarr": 1, ".": 3}.get(str(given), 2)


def test_what_is_no_archive_is_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="no such file or folder; give the forecast archive's path, a folder or a glob"):
        describe_archive(str(tmp_path / "nothing"))
    ensemble(tmp_path / "a.grib")
    assert cli.main(["inspect", str(tmp_path / "a.grib"), "verify=true"]) == cli.STATUS_USER
    assert "verify=true: is for tensor stores, and" in capsys.readouterr().err
