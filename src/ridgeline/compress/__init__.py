"""Training: the recipe of the embedded model, and the distillation of its draft."""
