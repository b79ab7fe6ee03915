"""Lightning's loops: calls at moments without a hook, and the progress from which a resumed run continues."""
