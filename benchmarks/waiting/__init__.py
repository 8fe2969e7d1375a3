"""Tools of the benchmark of ranks that do not wait (`ensemble_ml.benchmarks.stragglers`)."""
