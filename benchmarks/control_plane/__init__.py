"""What a prefix cache costs on the CPU: our tree beside vLLM's block pool and SGLang's radix tree.

    python -m benchmarks.control_plane [--vllm-python PATH] [--sglang-python PATH]
        [--num-blocks N] [--output FILE]

No model and no KV, only the bookkeeping. Each other cache runs in the interpreter of its own
environment, and ours beside it in that very process, in turn. Each is given prompts in the form
that it keeps them in: int32 arrays here, lists of integers there, 64-bit arrays at SGLang.
"""
