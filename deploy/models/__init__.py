"""The demo model's recipe: corpus, tokenizer, training and description."""
