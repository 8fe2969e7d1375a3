"""Notices that are logged once."""

from gribfiles import surface

from data_prep import open_archive
from data_prep.notices import once


def test_notices_of_several_files_that_are_opened_at_once(tmp_path, caplog):
    data, logged, encoding = surface(), set(), {name: {"_FillValue": 0.0} for name in ("t2m", "skt")}
    paths = [tmp_path / f"{number}.zarr" for number in range(2)]
    for number, path in enumerate(paths):
        data.isel(time=[number]).to_zarr(path, encoding=encoding, zarr_format=2)
    caplog.set_level("INFO")
    for _ in range(2):
        with once(logged):
            open_archive(paths)
    notices = [line for line in caplog.messages if "zeros are values" in line]
    assert len(notices) == len(set(notices)) > 0, caplog.messages
