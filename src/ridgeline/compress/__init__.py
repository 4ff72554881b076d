"""Training: a model, the loop, its optimizer, losses of prediction and of distillation."""
