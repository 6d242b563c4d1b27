"""The forward pass of few tokens, compiled: kernels for the CPU and the models they fit."""
