"""Time to solution by the rules of MLPerf HPC."""
