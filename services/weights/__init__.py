"""Bytes that travel between actors: versioned weight snapshots and teacher logits, in memory that readers pull from.

    trainer: layout ─▶ shards (one writer per rank) ─▶ snapshots (versions, leases)        reader: reader
             torchstore_plane has both sides over a torchstore instead; `plane` picks by `config`

`region` is the memory itself, `delta` the changed words of a version, `checksum` proves that what was read is what was
published, `logits` are the teacher's rows.
"""
