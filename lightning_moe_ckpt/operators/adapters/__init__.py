"""operators/adapters."""
