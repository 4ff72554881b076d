"""Measurement: the machine's ceilings, and what steps of an executor reach of them."""
