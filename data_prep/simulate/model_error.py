"""The error of the forecast model, in one place.

It was tuned on the limits of realism (`data_prep.simulate.realism`) alone, and was frozen before any training.

The values were found on one window of 12 init times (January and February of a model year that no archive contains), at
48 h and T31:

    changed                                              norm    spread/skill   bias^2, %     correlation
    trcnv 7, entmax 0.45, trlsc 5, cds 1.1e-3,           0.40 K  1.15, 1.16     3.0, 2.4      0.41, 0.48
      cdl 2.7e-3, epslw 0.06, trshc 7
    the values below                                     0.35 K  0.90, 0.85     5.1, 6.2      0.36, 0.45

The norm is that of the analysis error (`data_prep.simulate.breeding`). The other columns give z500, then t850: `bias^2`
is the share of the mean squared error that is squared bias, without sampling noise, and the correlation is that of
spread and absolute error. The model of the first row is too good: its ensemble is over-dispersive. At T21 the
truncation dominates: bias^2 is 13 % with either set of values, and perturbations of 0.35 K are far too small.
"""

from __future__ import annotations

MODEL_ERROR: dict[str, dict[str, float]] = {
    "convection": {
        "trcnv": 9.0,  # hours in which deep convection relaxes a column (nature: 6)
        "entmax": 0.35,  # largest entrainment, as a share of cloud-base mass flux (0.5)
        "smf": 0.65,  # secondary over primary mass flux (0.8)
    },
    "condensation": {"trlsc": 7.0},  # hours in which large-scale condensation removes supersaturation (4)
    "surface_flux": {
        "cds": 1.3e-3,  # drag coefficient over sea (1.0e-3)
        "cdl": 3.2e-3,  # drag coefficient over land (2.4e-3)
    },
    "mod_radcon": {"epslw": 0.08},  # share of the longwave spectrum that only the boundary layer sees (0.05)
    "vertical_diffusion": {
        "trshc": 9.0,  # relaxation time of shallow convection, hours (6)
        "trvdi": 36.0,  # relaxation time of moisture diffusion, hours (24)
    },
}
"""Changed values of SPEEDY's parameters, by group; everything else is as in the nature run."""
