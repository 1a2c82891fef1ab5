"""What several tests share: the tracer job, the cluster of torchrun agents, the tools that must be there."""
