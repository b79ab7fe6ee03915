"""Data loaders: their position, their workers, and the random state of fetches."""
