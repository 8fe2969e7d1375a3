"""Parts of the loading benchmark: its data, its emulated slow storage, its entrants, and the race."""
