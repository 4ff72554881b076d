"""Settings by component, and how they are read."""
