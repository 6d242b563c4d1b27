"""Our server beside others on one machine: the same prompts, one client, turn about.

    python -m benchmarks.peers [--workloads A,B] [--peers X,Y] [--runs N] [--vllm-python PATH] ...

docs/performance.md says how to install the others and how to read what comes out.
"""
