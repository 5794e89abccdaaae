"""A latent that a decoder is read through when the rank of its metric is too high."""
