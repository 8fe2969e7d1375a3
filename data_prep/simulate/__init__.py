"""The embedded archive: a simulated ensemble and its truth, made by jcm and written as GRIB in ENS-10's layout."""

from data_prep.simulate.run import simulate

__all__ = ["simulate"]
