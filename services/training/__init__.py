"""One optimizer step from a batch: micro-batches, three channels, and the hinted teacher."""
