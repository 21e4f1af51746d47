"""Bytes that travel between actors: versioned weight snapshots and teacher logits, in memory that readers pull from.

`region` is the memory itself, `snapshots` puts versions of the policy into it, `logits` the teacher's rows, `checksum`
proves that what was read is what was published.
"""
