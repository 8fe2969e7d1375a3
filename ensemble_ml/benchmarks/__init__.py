"""Benchmarks, one module each, which run what users run beside its peers and write claims with what was measured."""
