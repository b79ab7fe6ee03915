"""Attributes of the user's objects: description in a journal, and restore in place."""
