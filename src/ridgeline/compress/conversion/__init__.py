"""Changing the attention of a model: fewer KV heads, windows, KV that layers share."""
