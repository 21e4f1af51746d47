"""From a task to a tensor: the way of a rollout, without actors, sockets or a model.

```
 tasks.py ──▶ buffer.py: claim ─▶ put ─▶ take ─▶ trained          samples.py ──▶ collate.py
 (stream)      leases.py    who may produce which member, until when   (arrays)     (tensors)
               state.py     every task and batch; changes only by the events of events.py
               late.py      what teachers say of rollouts, whenever they say it
               journal.py   the events on disk, so that a killed buffer is the same buffer
               staleness.py, advantages.py, validation.py, refusals.py   the rules, as pure functions
```

Only collate.py imports torch: the actor that keeps the buffer stays light.
"""
