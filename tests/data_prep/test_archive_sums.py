"""Sums of an archive: from the start, over intervals, and what they are brought to."""

import numpy as np
import pytest
from gribfiles import decoded, message, noise, write

from data_prep import find_gaps, open_archive
from ensemble_ml.store import Part, Selection


class TestSums:
    def rain(self, tmp_path, steps=("0-24", "0-48"), first=1e-3):
        rain = [
            message("tp", np.full((7, 12), first * (number + 1)) + noise(mean=0, std=1e-5), step=step, member=member)
            for member in (1, 2)
            for number, step in enumerate(steps)
        ]
        start = [message("tp", np.zeros((7, 12)), step=0, member=member) for member in (1, 2)]
        return write(tmp_path / "a.grib", start + rain + [message("t2m", step=0, member=member) for member in (1, 2)])

    def test_sums_from_the_start_become_sums_between_leads(self, tmp_path):
        path = self.rain(tmp_path)
        source = open_archive(path)
        assert source.layout.lead_hours == (0, 24, 48)
        assert source.lead_bounds == {"tp": [None, [0, 24], [24, 48]]}
        rain = source.read(Part.FORECAST, 0).surface[0, :, 1]
        sums = {
            keys["endStep"]: values for keys, values in decoded(path) if keys["paramId"] == 228 and keys["number"] == 1
        }
        assert np.isnan(rain[0]).all() and not source.present(Part.FORECAST, 0)[1][:, 0, 1].any()
        np.testing.assert_array_equal(rain[1], sums[24])
        np.testing.assert_allclose(rain[2], sums[48] - sums[24], atol=1e-10)

    @pytest.mark.parametrize("packing", ["grid_simple", "grid_ccsds"])
    @pytest.mark.parametrize("bits", [12, 16, 24])
    def test_what_packing_makes_of_a_dry_interval_is_no_rain(self, tmp_path, bits, packing):
        """A sum that did not change is packed with other steps at another lead."""
        first = np.random.default_rng(0).gamma(0.5, 8e-3, (7, 12))
        second = first.copy()
        second[:3] += 0.2
        told = {"bitsPerValue": bits, "packingType": packing}
        fields = [message("tp", sums, step=step, **told) for step, sums in (("0-24", first), ("0-48", second))]
        path = write(tmp_path / "a.grib", fields)
        sums = [values for _, values in decoded(path)]
        assert (sums[1][3:] > sums[0][3:]).any()
        rain = open_archive(path).read(Part.FORECAST, 0).surface[0, -1, 0]
        assert (rain[3:] == 0).all()
        np.testing.assert_allclose(rain[:3], 0.2, rtol=0.01)

    def test_a_selected_lead_keeps_the_interval_of_the_archive(self, tmp_path):
        path = self.rain(tmp_path)
        whole = open_archive(path).read(Part.FORECAST, 0).surface[:, 2, 1]
        part = open_archive(path, leads=[48], variables=["tp"])
        assert part.lead_bounds == {"tp": [[24, 48]]}
        np.testing.assert_array_equal(part.read(Part.FORECAST, 0).surface[:, 0, 0], whole)

    def test_leads_that_cut_intervals_out_are_told_of(self, tmp_path):
        steps = range(6, 49, 6)
        rain = [
            message("tp", np.full((7, 12), step * 1e-3), step=f"0-{step}", member=m) for m in (1, 2) for step in steps
        ]
        gusts = [message("fg10", step=f"{step - 6}-{step}", member=m) for m in (1, 2) for step in steps]
        path = write(tmp_path / "a.grib", rain + gusts)
        said = {"fg10": "maxima over 18-24, 42-48 h", "tp": "sums over 18-24, 42-48 h"}
        assert open_archive(path, leads=[24, 48]).cut == said
        assert open_archive(path).cut == {} and open_archive(path, leads=[6, 12]).cut == {}
        assert open_archive(path, leads=[12], variables=["tp"]).cut == {"tp": "sums over 6-12 h"}

    def test_sums_are_cut_at_the_hours_that_are_wanted(self, tmp_path):
        steps = range(6, 49, 6)
        rain = [message("tp", np.full((7, 12), step * 1e-3), step=f"0-{step}") for step in steps]
        path = write(tmp_path / "a.grib", [*rain, *(message("t2m", step=step) for step in (0, *steps))])
        source = open_archive(path, cuts={"tp": [0, 24, 48]})
        assert source.layout.lead_hours == (0, *steps)
        assert source.lead_bounds["tp"][source.layout.lead_hours.index(24) :: 4] == [[0, 24], [24, 48]]
        found = source.read(Part.FORECAST, 0, Selection(lead_hours=(24, 48), surface=("tp",))).surface
        np.testing.assert_allclose(found, 24e-3, rtol=1e-3)
        kept = open_archive(path, cuts={"tp": [18, 24, 42, 48]}, leads=[24, 48])
        assert kept.lead_bounds == {"tp": [[18, 24], [42, 48]]}
        assert kept.lead_bounds == open_archive(path, leads=[24, 48]).lead_bounds

    def test_sums_do_not_fall_below_zero(self, tmp_path):
        source = open_archive(self.rain(tmp_path, first=1e-5))
        assert source.read(Part.FORECAST, 0, Selection(lead_hours=(48,), surface=("tp",))).surface.min() >= 0

    def with_control(self, tmp_path, steps):
        """Members at 24 and 48 h, and a control with steps of its own."""
        self.rain(tmp_path)
        rain = [message("tp", np.full((7, 12), 1e-4 * n), step=step, member=0, kind="cf")
                for n, step in enumerate(steps)]  # fmt: skip
        return write(tmp_path / "b.grib", [*rain, message("t2m", step=0, member=0, kind="cf")])

    def test_members_decide_on_intervals_where_the_control_has_finer_steps(self, tmp_path):
        self.with_control(tmp_path, [f"0-{hour}" for hour in (6, 12, 18, 24, 30, 36, 42, 48)])
        source = open_archive(tmp_path)
        assert source.layout.lead_hours == (0, 24, 48)
        assert source.lead_bounds == {"tp": [None, [0, 24], [24, 48]]}
        assert source.present(Part.FORECAST, 0)[1][:, 1:, 1].all() and find_gaps(source) == []
        assert find_gaps(source, Part.CONTROL) == []
        np.testing.assert_allclose(source.read(Part.CONTROL, 0).surface[0, 2, 1], 4e-4, rtol=1e-3)

    def test_a_control_over_other_hours_than_the_members_lacks_the_field(self, tmp_path):
        self.with_control(tmp_path, ["18-24", "42-48"])
        source = open_archive(tmp_path)
        assert source.lead_bounds == {"tp": [None, [0, 24], [24, 48]]} and find_gaps(source) == []
        assert not source.present(Part.CONTROL, 0)[1][:, :, 1].any()
        [gap] = find_gaps(source, Part.CONTROL)
        why = "the archive's sums do not give its interval"
        assert str(gap) == f"the control at 2001-01-01T00 lacks tp, lead 24 h ({why}) (2 fields)"

    def test_a_sum_that_lost_its_earlier_part_everywhere_is_a_gap(self, tmp_path):
        first = [message("tp", np.full((7, 12), 1e-3), step="0-24", date=20010101)]
        later = [message("tp", np.full((7, 12), 2e-3), step="0-48", date=20010102)]
        source = open_archive(write(tmp_path / "a.grib", first + later))
        assert [gap.text for gap in find_gaps(source)] == [
            "member 1 at 2001-01-01T00 lacks tp, lead 48 h (the archive's sums do not give its interval)",
            "member 1 at 2001-01-02T00 lacks tp, lead 24 h",
        ]

    def test_sums_over_intervals_are_taken_as_they_are(self, tmp_path):
        source = open_archive(self.rain(tmp_path, steps=("0-24", "24-48")))
        assert source.lead_bounds == {"tp": [None, [0, 24], [24, 48]]}
        assert source.gather(Part.FORECAST, 0).loose == {}


def test_a_control_keeps_its_gust_at_the_start_as_members_do(tmp_path):
    """There it is that of the moment; later, the largest of the day."""
    steps = (0, "0-24")
    members = [message("fg10", step=step, member=m, seed=m) for m in (1, 2) for step in steps]
    control = [message("fg10", step=step, member=0, kind="cf", seed=7) for step in steps]
    path = write(tmp_path / "a.grib", [*members, *control])
    source = open_archive(path)
    assert source.lead_bounds == {"fg10": [None, [0, 24]]}
    assert source.present(Part.CONTROL, 0)[1].all() and source.present(Part.FORECAST, 0)[1].all()
    wanted = [values for keys, values in decoded(path) if keys["number"] == 0]
    np.testing.assert_array_equal(source.read(Part.CONTROL, 0).surface[0, :, 0], wanted)
