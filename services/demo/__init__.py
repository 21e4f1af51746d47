"""A model small enough to train here and now: tokenizer, decoder, and the warm start that teaches it to play."""
