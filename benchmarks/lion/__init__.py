"""Tools of the benchmark of compressed Lion: the work of a rank, simulated votes, and the quality of trainings."""
