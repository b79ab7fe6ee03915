"""Loggers and metrics: each row is logged once, and an epoch's means are the whole epoch's."""
