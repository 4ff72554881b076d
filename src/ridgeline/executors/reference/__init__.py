"""The oracle: plain PyTorch, in any floating-point type, one request after another where that is
simplest. Every feature lands here first, and other executors are tested against it."""
