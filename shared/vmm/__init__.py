"""Physical pages, and address space into which they are mapped on demand; no vLLM and no torch (README.md)."""
