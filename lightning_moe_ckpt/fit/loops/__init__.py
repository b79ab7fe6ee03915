"""Lightning's loops: calls at moments without a hook, and progress for a resumed run."""
