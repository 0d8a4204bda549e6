"""Text to train on: the corpus, its tokenizer, batches, token files, and n-gram models to
compare with.
"""
