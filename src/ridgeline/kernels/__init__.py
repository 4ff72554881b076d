"""The op set, once per backend. ``reference`` is plain PyTorch and defines what is right."""
