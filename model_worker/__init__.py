"""The worker: one device, its model, its KV blocks, and the scheduler that fills its steps."""
