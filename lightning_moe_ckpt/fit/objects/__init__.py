"""Attributes of the user's objects, whatever owns them: description in a journal, and restore in place."""
