"""Short names that stand for the files of an ensemble: the URLs of the rules."""

import numpy as np
import pytest

from ensemble_ml.errors import UserError
from ensemble_ml.store.archive_names import RULES, urls_of_name
from ensemble_ml.store.remote import is_remote, url_of

_REFORECAST = "s3://noaa-gefs-retrospective/GEFSv12/reforecast/2000/2000010500"
_MOGREPS = "https://met-office-global-ensemble-model-data.s3.eu-west-2.amazonaws.com/global-ensemble"
_EUPPBENCH = (
    "https://object-store.os-api.cci1.ecmwf.int/eumetnet-postprocessing-benchmark-1st-phase-training-dataset/data"
    "/gridded_data"
)


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("gefs:reforecast/2000-01-05", {"variables": ["t2m"]}, [
            f"{_REFORECAST}/{one}/Days:1-10/tmp_2m_2000010500_{one}.grib2"
            for one in ("c00", "p01", "p02", "p03", "p04")
        ]),
        ("gefs:operational/2026-11-26T06", {"variables": ["t"], "leads": [24]}, [
            f"s3://noaa-gefs-pds/gefs.20261126/06/atmos/pgrb2ap5/ge{one}.t06z.pgrb2a.0p50.f024"
            for one in ("c00", *(f"p{number:02d}" for number in range(1, 31)))
        ]),
        ("opendata:ifs/2026-05-12T00", {"leads": [24]}, [
            "gs://ecmwf-open-data/20260512/00z/ifs/0p25/enfo/20260512000000-24h-enfo-ef.grib2",
        ]),
        ("opendata:ifs/2026-05-12T06", {"leads": [24]}, [
            "gs://ecmwf-open-data/20260512/06z/ifs/0p25/enfo/20260512060000-24h-enfo-ef.grib2",
            "gs://ecmwf-open-data/20260512/06z/ifs/0p25/oper/20260512060000-24h-oper-fc.grib2",
        ]),
        ("opendata:aifs/2026-11-26T12", {"leads": [6]}, [
            "gs://ecmwf-open-data/20261126/12z/aifs-ens/0p25/enfo/20261126120000-6h-enfo-cf.grib2",
            "gs://ecmwf-open-data/20261126/12z/aifs-ens/0p25/enfo/20261126120000-6h-enfo-pf.grib2",
        ]),
        ("mogreps:global/2026-11-26T18", {"variables": ["t2m", "z"], "leads": [6]}, [
            f"{_MOGREPS}/2026/11/26/T1800Z/20261127T0000Z-PT0006H00M-{one}.nc"
            for one in ("geopotential_height_on_pressure_levels", "temperature_at_screen_level")
        ]),
        ("ens10:hindcasts/2018-01-01/2018-01-07", {"variables": ["t2m"], "dates": ["1998"]}, [
            f"https://object-store.os-api.cci1.ecmwf.int/maelstrom-ap4/output.sfc.{one}" for one in (20180101, 20180104)
        ]),
        ("euppbench:reforecasts", {}, [
            f"{_EUPPBENCH}/gridded_ensemble_reforecasts_{one}.zarr"
            for one in ("surface", "surface_postprocessed", "pressure_500", "pressure_700", "pressure_850")
        ]),
    ],
)  # fmt: skip
def test_urls(name, wanted, expected):
    assert is_remote(name) and url_of(name) == name
    assert urls_of_name(name, **wanted) == expected


def stems(**wanted):
    found = urls_of_name("gefs:reforecast/2000-01-05", **wanted)
    return sorted({url.rsplit("/", 1)[1].partition("_2000")[0] for url in found})


def test_variables_and_levels_choose_files_of_the_reforecast():
    assert stems(variables=["t", "u10", "v10"], levels=[850]) == ["tmp_pres", "ugrd_hgt", "vgrd_hgt"]
    assert stems(variables=["t"], levels=[500, 850]) == ["tmp_pres", "tmp_pres_abv700mb"]
    assert stems(variables=["z"], levels=[500]) == ["hgt_pres_abv700mb"]
    assert len(stems()) == 15
    with pytest.raises(UserError, match=r"file names are known for t, z, u, v, q, t2m, .*; give URLs for others"):
        stems(variables=["sst"])


def test_leads_choose_files_and_folders():
    late = urls_of_name("gefs:reforecast/2000-01-05", variables=["t2m"], leads=[24, 264])
    assert {url.split("/")[-2] for url in late} == {"Days:1-10", "Days:10-16"} and len(late) == 10
    rain = urls_of_name("gefs:reforecast/2000-01-05", variables=["tp"], leads=[264])  # the sum of all steps
    assert {url.split("/")[-2] for url in rain} == {"Days:1-10", "Days:10-16"} and len(rain) == 10
    runs = {name: urls_of_name(f"opendata:ifs/2026-01-01T{name}") for name in ("00", "06")}
    assert {name: len(urls) for name, urls in runs.items()} == {"00": 1 + 48 + 36, "06": 1 + 48}
    # Rain of GEFS is a sum over the step, so all leads up to the last one are needed.
    counts = [len(urls_of_name("gefs:operational/2026-01-01T00", variables=[one], leads=[24])) for one in ("t", "tp")]
    assert counts == [31, 31 * 9]


def test_hindcasts_are_named_by_the_days_of_one_year():
    days = [url[-8:] for url in urls_of_name("ens10:hindcasts/2018", variables=["z", "t"])]
    assert len(days) == 105 and days[:3] == ["20180101", "20180104", "20180108"] and days[-1] == "20181231"
    assert len(urls_of_name("ens10:hindcasts/2018-02")) == 2 * 8


def test_periods_and_dates():
    year = urls_of_name("gefs:reforecast/2000", variables=["t2m"])
    assert len(year) == 366 * 5 == len(set(year))
    part = urls_of_name("gefs:reforecast/2000-12-31/2001", variables=["t2m"], dates=["2001-01", "2000-12"])
    assert len(part) == 32 * 5 and "/2000/2000123100/" in part[0] and "/2001/2001013100/" in part[-1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gefs:reforecast", r"^gefs:reforecast: names no period; give one, as in gefs:reforecast/2019-12-31T00$"),
        ("gefs:reforecast/2020", r"no init time lies there; the data span 2000-01-01T00 to 2019-12-31T00"),
        ("opendata:ifs/yesterday", r"is no date"),
        ("opendata:ifs/2026-01-01T03", r"no init time lies there"),
    ],
)
def test_what_is_no_period_of_the_archive(name, text):
    with pytest.raises(UserError, match=text):
        urls_of_name(name)
    with pytest.raises(UserError, match="has none of the leads 25, 26 h at 2026-01-01T00"):
        urls_of_name("opendata:ifs/2026-01-01T00", leads=[25, 26])


def test_an_archive_that_goes_on_ends_today():
    today = str(np.datetime64("today", "D"))
    assert all(urls_of_name(f"{name}/{today}", leads=[6]) for name, rule in RULES.items() if not rule.last)
