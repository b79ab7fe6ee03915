"""Recovery without a new process: all ranks together, or one pipeline stage alone."""
