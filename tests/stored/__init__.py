"""Runs as storage holds them, written without training: a few bytes per generation."""
