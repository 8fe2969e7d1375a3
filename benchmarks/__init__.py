"""Benchmarks, one folder each, which run what users run beside its peers and write claims with what was measured.

`ensemble-ml benchmark benchmark=NAME` calls `run` of `benchmarks.NAME.benchmark`. They belong to a checkout of the
source and to no wheel.
"""
