"""Recovery without a new process: of all ranks together, and of one pipeline stage alone."""
