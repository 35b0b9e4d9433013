"""Notify a webhook of what happened: the end of a run, the gate's decisions, a lost worker, a disk that fills up."""
