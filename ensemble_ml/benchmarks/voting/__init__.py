"""Tools of the benchmark of compressed Lion: a rank's work, simulation, quality."""
