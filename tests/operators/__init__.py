"""Operators, counts and adapters."""
