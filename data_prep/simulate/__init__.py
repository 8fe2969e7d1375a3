"""The embedded archive: a simulated ensemble and its truth, made by jcm and written as GRIB in the layout of ENS-10."""

from data_prep.simulate.run import simulate
