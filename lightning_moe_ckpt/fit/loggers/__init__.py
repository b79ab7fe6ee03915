"""Loggers and metrics: each row is logged once, and an epoch's means are those of the whole epoch."""
