"""Text to train on: the corpus, its tokenizer, batches, and n-gram models to compare with."""
