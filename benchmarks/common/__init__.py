"""Tools of several benchmarks: results, sections, turns, own processes, jobs of ranks, ranks as threads, hosts."""
