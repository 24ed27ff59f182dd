"""AQUA's profiler: which rate a model keeps within an SLO, free memory there, what bursts need. See README.md."""
