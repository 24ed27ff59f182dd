"""Models that have GPU memory to spare, as programs that serve and lend (AQUA 2, Figure 3). See README.md."""
