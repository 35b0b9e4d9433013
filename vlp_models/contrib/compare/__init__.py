"""Compare models by the scores of their test items, from any program's result files: `vlp compare`.

Needs neither a project nor torch. comparison.py has the function behind the command.
"""
