"""Measurements of what this package costs and gains, each on this machine, side by side with what it replaces.

Internal: may change in any version.
"""
