"""OpenAI-compatible server, offline generation and benchmarks for JetFlow."""
