"""Servers that tests talk to over loopback, each a real one in a process of its own."""
