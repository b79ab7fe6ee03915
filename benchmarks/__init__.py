"""Proof of what the papers say and of what this project chose: run from a checkout, no part of the package."""
