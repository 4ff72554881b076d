"""Several models in one server, which share its memory."""
