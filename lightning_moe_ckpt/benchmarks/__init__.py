"""Measurements of this package's costs and gains, each on this machine, side by side with the alternatives.

Internal: may change in any version.
"""
