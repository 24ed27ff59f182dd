"""Runs into reports: statistics (summary.py), plots (plots.py), Markdown and HTML (render.py)."""
