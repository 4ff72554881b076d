"""The recipe of the embedded model: its text, its tokenizer, its training, its export."""
