"""Loaders of data: their position, their workers, and the random state with which batches are fetched."""
