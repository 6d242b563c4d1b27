"""The worker: one device, the model on it, its KV blocks, and the scheduler that fills its steps."""
