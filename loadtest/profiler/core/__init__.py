"""The profiler's decisions: which rate comes next, what a burst needs, who lends and who borrows. No I/O."""
