"""The ladder: what each optimization gives, predicted and measured, from eager to speculation."""
