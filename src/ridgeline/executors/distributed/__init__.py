"""One model on several processes: `DistributedExecutor` sends every plan to all ranks, and each
runs it with its part of the model (docs/distributed.md)."""
