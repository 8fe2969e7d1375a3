"""What several benchmarks use: sections, jobs of several ranks, hosts and the links between them."""
