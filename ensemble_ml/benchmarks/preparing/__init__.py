"""Parts of `benchmark=prepare`: the data it works on, its entrants, and the processes that they run in."""
