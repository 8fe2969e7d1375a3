"""Parts of `benchmark=prepare`: its data, its entrants, and the processes in which they run."""
