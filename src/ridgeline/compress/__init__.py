"""Training-side work: the embedded model's recipe, distillation, quantizing, pruning."""
