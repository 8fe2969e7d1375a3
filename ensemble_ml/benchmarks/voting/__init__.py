"""Tools of the benchmark of compressed Lion: hosts and links, a rank's work, simulation, quality."""
