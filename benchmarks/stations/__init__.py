"""Tools of the benchmark on real data: the series of a station, and the network for a single point."""
