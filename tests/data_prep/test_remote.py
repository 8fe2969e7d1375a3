"""Archives by URL, from a server on this machine: read as the files are, or refused in one line."""

import asyncio
import json
import time
from dataclasses import replace

import numpy as np
import public_archives
import public_grib
import pytest
import xarray as xr
from gribfiles import ensemble, message, noise, write

from benchmarks.remote.server import CHANGED, RESET, TRUNCATED, Plan, serving
from data_prep import build_job, grib_io, open_archive, prepare
from data_prep.build_job import Job
from data_prep.grib_io import Stamp
from data_prep.prepare import _with_whole_paths
from ensemble_ml import cli
from ensemble_ml.config import Control, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store, remote
from ensemble_ml.store.archive_names import NAMES, RULES, STORES
from ensemble_ml.store.remote import is_grib, is_remote, open_remote, reopen, url_of

pytest.importorskip("obstore", reason="URLs need the extra `remote`")


@pytest.fixture
def plan():
    """Return what the server does beside serving files."""
    return Plan()


@pytest.fixture
def served(tmp_path, plan):
    """Return the URL of `tmp_path`, which a thread serves."""
    with serving(tmp_path, plan) as url:
        yield url


def assert_same(one, other):
    assert one.layout.names == other.layout.names and one.lead_bounds == other.lead_bounds
    for date in range(len(one.layout.init_time)):
        found, expected = one.read(Part.FORECAST, date), other.read(Part.FORECAST, date)
        np.testing.assert_array_equal(found.pressure, expected.pressure)
        np.testing.assert_array_equal(found.surface, expected.surface)


def test_short_names():
    assert all(is_remote(name) and url_of(name).startswith(("gs://", "https://")) for name in NAMES)
    assert not is_remote("/tmp/a.zarr") and not is_remote("ens10.zarr") and url_of("s3://a/b.zarr/") == "s3://a/b.zarr"


def test_a_file_that_comes_later_is_found(tmp_path, served):
    path = f"{served}/a.grib2"
    assert not is_grib(path)
    (tmp_path / "a.grib2").write_bytes(b"GRIB" + bytes(600))
    assert is_grib(path)


def test_version_2(tmp_path, served):
    path, _ = public_archives.weatherbench(tmp_path, degrees=30, dates=1, members=2, leads=(24,))
    assert_same(open_archive(f"{served}/{path.name}"), open_archive(path))


def test_shards_of_version_3(tmp_path, served):
    path = public_archives.dynamical(tmp_path, "ifs", leads=(0, 3))
    assert_same(open_archive(f"{served}/{path.name}/"), open_archive(path))


@pytest.mark.parametrize("version", [2, 3])
def test_init_times_that_were_appended(tmp_path, served, version):
    """Their first time is 0, the fill value, so zarr writes no chunk for it."""
    path = public_archives.dynamical(tmp_path, "ifs", leads=(0, 3))
    data = xr.open_zarr(path, decode_timedelta=False)[["temperature_2m"]].isel(init_time=[0])
    whole = tmp_path / "a.zarr"
    data = data.reset_coords(drop=True).load().drop_encoding()
    data.to_zarr(whole, zarr_format=version, consolidated=True)
    for days in (1, 2):
        later = data.assign_coords(init_time=data.init_time + np.timedelta64(days, "D"))
        later.to_zarr(whole, append_dim="init_time", consolidated=True)
    chunks = sorted(one.name for one in (whole / "init_time").rglob("*") if one.name.isdigit())
    assert chunks == ["1", "2"]
    assert_same(open_archive(f"{served}/{whole.name}"), open_archive(whole))
    next(one for one in (whole / "init_time").rglob("1")).unlink()
    with pytest.raises(UserError, match=r"/[01] is not there \(404\), but init_time has 3 values; try again"):
        open_archive(f"{served}/{whole.name}")


@pytest.mark.parametrize("version", [2, 3])
def test_a_store_without_consolidated_metadata(tmp_path, served, version, monkeypatch):
    monkeypatch.setattr(remote, "_RETRIES", 0)
    data = xr.open_zarr(public_archives.dynamical(tmp_path, "ifs", leads=(0, 3)))[["temperature_2m"]].load()
    data.drop_encoding().to_zarr(tmp_path / "a.zarr", zarr_format=version, consolidated=False)
    with pytest.raises(UserError, match=rf"^{served}/a.zarr: .* \(it has no consolidated metadata, and the server"):
        open_archive(f"{served}/a.zarr")


def test_only_what_is_asked_for_is_fetched(tmp_path, served, plan):
    path = public_archives.dynamical(tmp_path, "ifs", leads=(0, 3))
    open_archive(f"{served}/{path.name}")
    assert not [one for one in plan.asked if "/temperature_2m/c/" in one]


def test_metadata_and_coordinates_are_asked_for_at_once(tmp_path, served, plan):
    """Opening takes as long as two answers, whatever the number of coordinates; each is fetched once."""
    path, _ = public_archives.weatherbench(tmp_path, degrees=30, dates=1, members=2, leads=(24,))
    expected = open_archive(path)
    plan.seconds = 0.3
    url = f"{served}/{path.name}"
    reopen(url)
    open_remote(url)
    asked = {f"/{path.name}/{name}/0" for name in ("time", "number", "prediction_timedelta", "level")}
    deadline = time.monotonic() + 10
    while not asked <= set(plan.asked) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert asked <= set(plan.asked) and len(plan.asked) == 4 + 6
    plan.asked.clear()
    plan.seconds = 0.0
    assert open_archive(url).layout.init_time.tolist() == expected.layout.init_time.tolist()
    assert len(plan.asked) == len(set(plan.asked))


def test_metadata_that_are_forgotten_during_a_request_are_requested_again(monkeypatch):
    from obstore.store import MemoryStore

    from ensemble_ml.store import remote_zarr

    store, versions = remote_zarr.RemoteStore(MemoryStore(), "memory://"), iter((b"old", b"new"))

    async def fetched(*_):
        content = next(versions)
        if content == b"old":
            store.forget_documents()
        return content, {"e_tag": None, "last_modified": None, "size": 3}

    async def read():
        return [await store.content("zarr.json") for _ in range(3)]

    monkeypatch.setattr(remote_zarr, "fetched", fetched)
    assert asyncio.run(read()) == [b"old", b"new", b"new"]


def test_init_times_under_way(tmp_path, served, monkeypatch):
    """Small ones are as many as fill the link while others are written; of large ones there are two."""
    path, _ = public_archives.weatherbench(tmp_path, degrees=30, dates=1, members=2, leads=(24,))
    how = {"output": str(tmp_path / "s.zarr"), "variables": ["t2m", "msl"]}
    assert Job(PrepareConfig(input=str(path), **how)).dates_ahead == 0
    job = Job(PrepareConfig(input=f"{served}/{path.name}", **how))
    assert job.dates_ahead == 8  # of two slices each
    monkeypatch.setattr(build_job, "_BYTES_AHEAD", 1)
    assert job.dates_ahead == 2


def test_inspect_and_prepare(tmp_path, served, capfd):
    path = public_archives.dynamical(tmp_path, "ifs", leads=(0, 3))
    url = f"{served}/{path.name}"
    assert cli.main(["inspect", url, "format=json"]) == 0
    assert json.loads(capfd.readouterr().out)["archive"] == [url]
    how = {"input": url, "output": str(tmp_path / "s.zarr"), "variables": ["t2m", "tp"], "workers": 1}
    store = open_store(prepare(PrepareConfig(**how)))
    assert store.provenance["input"] == [url]
    assert store.layout.names == ("t2m", "tp") and store.lead_bounds == {"tp": [None, [0, 3]]}


def test_a_failure_on_the_way_is_tried_again(tmp_path, served, plan):
    path, _ = public_archives.weatherbench(tmp_path, degrees=30, dates=1, members=2, leads=(24,))
    plan.answers = {"2m_temperature/0": [503, TRUNCATED, 500]}
    found = open_archive(f"{served}/{path.name}", variables=["t2m"]).read(Part.FORECAST, 0).surface
    np.testing.assert_array_equal(found, open_archive(path, variables=["t2m"]).read(Part.FORECAST, 0).surface)


@pytest.mark.parametrize(
    ("answers", "text"),
    [({"": 404}, r"neither a Zarr store nor a file of GRIB or NetCDF is there \(404\)"),
     ({"": 403}, r"access is refused \(403\); only public objects can be read")],
)  # fmt: skip
def test_what_is_not_there_or_not_for_all(served, plan, answers, text):
    plan.answers = answers
    with pytest.raises(UserError, match=rf"^{served}/a.zarr: {text}") as raised:
        open_archive(f"{served}/a.zarr")
    assert "\n" not in str(raised.value)


def test_nobody_answers(monkeypatch):
    monkeypatch.setattr(remote, "_RETRIES", 0)  # each waits longer than the one before
    with pytest.raises(UserError, match=r"cannot be reached .*; check the URL and the network") as raised:
        open_archive("http://127.0.0.1:1/a.zarr")
    assert "\n" not in str(raised.value)


def test_a_chunk_that_is_cut_short(tmp_path, served):
    path, _ = public_archives.weatherbench(tmp_path, degrees=30, dates=1, members=2, leads=(24,))
    chunk = next((path / "2m_temperature").glob("0*"))
    chunk.write_bytes(chunk.read_bytes()[:50])
    source = open_archive(f"{served}/{path.name}", variables=["t2m"])
    with pytest.raises(UserError, match=rf"^{served}/{path.name}: 2m_temperature cannot be read \(") as raised:
        source.read(Part.FORECAST, 0)
    assert "\n" not in str(raised.value)


class TestGrib:
    """Files of ECMWF's open data, of which one alone would be read at once if they were not made to look large."""

    @pytest.fixture
    def names(self, tmp_path, monkeypatch):
        """Return the names of GRIB files below `tmp_path`."""
        monkeypatch.setattr(grib_io, "_WHOLE", 0)
        path = public_grib.ecmwf_open_data(tmp_path / "a")
        return [str(file.relative_to(tmp_path)) for file in sorted(path.rglob("*.grib2"))]

    def urls(self, served, names):
        return [f"{served}/{name}" for name in names]

    def test_ecmwfs_index(self, tmp_path, served, plan, names):
        """Each message is asked for once for its header, and once for its values."""
        source = open_archive(self.urls(served, names))
        messages = len(source.catalogue.records)
        assert len(plan.asked) <= messages + 3 * len(names) + 3
        plan.asked.clear()
        assert_same(source, open_archive([tmp_path / name for name in names]))
        assert len(plan.asked) <= messages

    def test_noaas_inventory(self, tmp_path, served, plan, monkeypatch):
        monkeypatch.setattr(grib_io, "_WHOLE", 0)
        path, _ = public_grib.gefs(tmp_path, degrees=30, dates=1, members=2, leads=(24,))
        names = [str(file.relative_to(tmp_path)) for file in sorted(path.rglob("*.f024"))]
        assert_same(open_archive(self.urls(served, names)), open_archive([tmp_path / name for name in names]))
        assert any(one.endswith(".idx") for one in plan.asked)

    @pytest.mark.parametrize("content", [None, "no index", '{"_offset": 7}\n{"_offset": 99}', "{}"])
    def test_what_is_read_does_not_depend_on_the_index(self, tmp_path, served, names, content):
        for name in names:
            index = (tmp_path / name).with_suffix(".index")
            index.unlink() if content is None else index.write_text(content)
        assert_same(open_archive(self.urls(served, names)), open_archive([tmp_path / name for name in names]))

    def test_prepare(self, tmp_path, served, names):
        how = {"output": str(tmp_path / "a.zarr"), "workers": 1}
        far = open_store(prepare(PrepareConfig(input=self.urls(served, names), **how)))
        how["output"] = str(tmp_path / "b.zarr")
        near = open_store(prepare(PrepareConfig(input=[str(tmp_path / name) for name in names], **how)))
        assert far.fingerprint() == near.fingerprint()

    @pytest.mark.parametrize("fault", [RESET, TRUNCATED, 429, 500])
    def test_a_failure_on_the_way_is_tried_again(self, tmp_path, served, plan, names, fault):
        source = open_archive(self.urls(served, names))
        plan.answers = {names[0]: [fault]}
        assert_same(source, open_archive([tmp_path / name for name in names]))

    @pytest.mark.parametrize(
        ("fault", "text"),
        [(CHANGED, "changed while it was read"), (404, "is not there any more"), (403, "access is refused")],
    )
    def test_a_file_that_changes_or_goes(self, served, plan, names, fault, text):
        source = open_archive(self.urls(served, names))
        plan.answers = {names[0]: fault}
        with pytest.raises(UserError, match=text) as raised:
            source.read(Part.FORECAST, 0)
        assert "\n" not in str(raised.value)

    def test_a_scan_that_fails_leaves_no_requests(self, served, plan, names, monkeypatch):
        url = self.urls(served, names)[0]
        file, asked, ask = remote.RemoteFile.open(url), [], remote.RemoteFile.ask
        monkeypatch.setattr(remote.RemoteFile, "ask", lambda *args: asked.append(ask(*args)) or asked[-1])
        with pytest.raises(KeyError), grib_io.remote_grib(url, Stamp(file.size, file.tag)) as grib:
            headers = grib.content()
            plan.seconds = 1.0
            headers.stretch(0, 10)
            raise KeyError
        assert len(asked) > 1 and all(one.done() for one in asked)


class TestNamesOfManyFiles:
    """Short names whose files lie on this machine, where the rule's own root stands for them."""

    def opened(self, monkeypatch, name, folder, how, **changes):
        """Return an archive by its name, and by its folder, with the same settings."""
        rule = name.partition("/")[0]
        monkeypatch.setitem(RULES, rule, replace(RULES[rule], **changes))
        return open_archive(name, **how), open_archive(folder, **how)

    @pytest.mark.parametrize("since_50r1", [False, True])
    def test_ecmwfs_open_data(self, tmp_path, served, plan, monkeypatch, since_50r1):
        folder = public_grib.ecmwf_open_data(tmp_path, since_50r1=since_50r1)
        name = f"opendata:ifs/202{6 if since_50r1 else 5}-11-01T00"
        how = {"leads": [3, 6], "variables": ["t", "t2m", "tp"], "control": Control.include}
        one, other = self.opened(monkeypatch, name, folder, how, root=served)
        assert_same(one, other)
        assert one.layout.realization == (0, 1, 2)
        assert not [asked for asked in plan.asked if "-0h-" in asked]  # a lead that nobody asked for

    def test_gefs(self, tmp_path, served, monkeypatch):
        folder, _ = public_grib.gefs(tmp_path, degrees=30, dates=1, members=2)
        how = {"leads": [24, 48], "variables": ["t", "z", "t2m"]}
        changes = {"root": f"{served}/ensemble", "first": "2020-01-01", "members": ("c00", "p01", "p02")}
        assert_same(*self.opened(monkeypatch, "gefs:operational/2020-01-01T00", folder, how, **changes))

    def test_gefs_reforecast(self, tmp_path, served, monkeypatch):
        folder = public_grib.gefs_reforecast(tmp_path / "2000")
        files = [str(one) for one in folder.rglob("*.grib2") if "abv700mb" not in one.name]
        how = {"levels": [850], "variables": ["t", "t2m", "tp"]}
        changes = {"root": served, "members": ("c00", "p01", "p02")}
        assert_same(*self.opened(monkeypatch, "gefs:reforecast/2000-01-05", files, how, **changes))

    def test_mogreps(self, tmp_path, served, monkeypatch):
        folder = public_archives.mogreps(tmp_path / "2026" / "09" / "16")
        name, variables = "mogreps:global/2026-09-16T00", ["t", "z", "t2m", "msl", "ws10"]
        how = {"leads": [3, 6], "variables": variables}
        one, other = self.opened(monkeypatch, name, folder, how, root=served)
        assert_same(one, other)
        assert set(one.layout.names) == set(variables)

    def test_ens10(self, tmp_path, served, monkeypatch):
        path = public_grib.ens10(tmp_path) / "output.19980101"
        path = path.rename(tmp_path / "output.sfc.20180101")
        how = {"variables": ["t2m", "msl"]}
        assert_same(*self.opened(monkeypatch, "ens10:hindcasts/2018-01-01", path, how, root=served))

    def test_euppbench(self, tmp_path, served, monkeypatch):
        folder = public_archives.euppbench(tmp_path, years=2)
        stores = tuple(f"{served}/{one.name}" for one in sorted(folder.glob("*.zarr")))
        monkeypatch.setitem(STORES, "euppbench:reforecasts", stores)
        one = open_archive("euppbench:reforecasts")
        assert_same(one, open_archive(folder))
        assert len(stores) == 3 and {"t2m", "z", "tp"} <= set(one.layout.names)

    def test_a_store_remembers_the_name(self, tmp_path, served, monkeypatch):
        public_grib.ecmwf_open_data(tmp_path)
        monkeypatch.setitem(RULES, "opendata:ifs", replace(RULES["opendata:ifs"], root=served))
        name = "opendata:ifs/2025-11-01T00"
        how = {"output": str(tmp_path / "a.zarr"), "workers": 1, "variables": ["t2m"], "leads": [3]}
        assert open_store(prepare(PrepareConfig(input=name, **how))).provenance["input"] == [name]

    def test_a_file_that_is_not_there(self, tmp_path, served, monkeypatch):
        monkeypatch.setitem(RULES, "opendata:ifs", replace(RULES["opendata:ifs"], root=served))
        with pytest.raises(UserError, match=rf"^{served}/20251101/00z/ifs/0p25/enfo/.*-3h-enfo-ef.grib2: .*\(404\)"):
            open_archive("opendata:ifs/2025-11-01T00", leads=[3])


def test_static_fields_by_url(tmp_path, served):
    path = ensemble(tmp_path / "a.grib")
    write(tmp_path / "static.grib", [message("lsm", noise(mean=0.5, std=0.1))])
    how = {"static": f"{served}/static.grib", "output": str(tmp_path / "s.zarr")}
    assert list(open_store(prepare(PrepareConfig(input=str(path), **how))).static()) == ["lsm"]


def test_a_grib_file_with_zarr_in_its_name(tmp_path, served):
    path = ensemble(tmp_path / "zarr_a.grib2")
    assert_same(open_archive(f"{served}/zarr_a.grib2"), open_archive(path))


def test_a_url_as_browsers_write_it(tmp_path, served):
    ensemble(tmp_path / "a b+100%.grib2")
    assert is_grib(f"{served}/a%20b%2B100%25.grib2") and is_grib(f"{served}/a b+100%.grib2")


def test_signed_urls_are_refused(served):
    """Their signature would not be sent, and the server would refuse access."""
    with pytest.raises(UserError, match=rf"^{served}/a.grib2: a URL is read without the part behind its \?; download"):
        open_archive(f"{served}/a.grib2?signature=abc")


def test_a_url_whose_grid_is_wanted_stays_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = PrepareConfig(input="a.grib", output="s.zarr", regrid="https://host/grid.nc")
    assert _with_whole_paths(config).regrid == "https://host/grid.nc"
    assert _with_whole_paths(replace(config, regrid="grid.nc")).regrid == str(tmp_path / "grid.nc")
