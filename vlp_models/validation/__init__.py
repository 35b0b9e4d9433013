"""Validation at the door: which rules hold for which table, and the columns they look at.

Plain Python: the suites that check them are Great Expectations' (validation/suites.py).
"""
