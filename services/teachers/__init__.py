"""Outside models that say what they would have done: asked over HTTP, paid within a budget, merged into preferences.

```
  TraceState ──▶ replay_trace ──▶ ChatClient ──▶ post_chat ──▶ N chat-completions servers
                                    │  ▲ reserve before, settle after
                                    ▼  │
                                  Ledger (file) ──▶ Budget
  TeacherCallResult ──▶ extract_preference_pairs ──▶ PreferencePair ──▶ save_pairs
```

`local_server` is not imported here: it is a program of its own (`python -m services.teachers.local_server`).
"""

from services.teachers.budget import Budget, BudgetExceeded, cost_usd, worst_case_usd
from services.teachers.client import ChatClient
from services.teachers.config import TeacherConfig, TeachersConfig, default_teachers, missing_api_keys
from services.teachers.ledger import Entry, Ledger, LedgerError
from services.teachers.pairs import extract_preference_pairs, normalize, save_pairs
from services.teachers.replay import replay_trace

__all__ = [
    "Budget",
    "BudgetExceeded",
    "ChatClient",
    "Entry",
    "Ledger",
    "LedgerError",
    "TeacherConfig",
    "TeachersConfig",
    "cost_usd",
    "default_teachers",
    "extract_preference_pairs",
    "missing_api_keys",
    "normalize",
    "replay_trace",
    "save_pairs",
    "worst_case_usd",
]
