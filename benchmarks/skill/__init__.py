"""Parts of `benchmark=skill`: entrants and their trainings, forecasts, tables of scores, claims."""
