"""Tell a webhook what happened: the end of a run, the gate's decisions, a lost worker, a disk that fills up."""
