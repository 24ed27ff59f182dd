"""`make figures`: every figure from the result files alone. A module for each paper; `sheet.py` is their frame."""
