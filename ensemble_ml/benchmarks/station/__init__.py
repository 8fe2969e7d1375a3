"""Tools of the benchmark on real data: the station's series, and the per-point network."""
