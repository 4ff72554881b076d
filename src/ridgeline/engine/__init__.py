"""The loop that turns requests into plans and results into text, and its wiring."""
