"""Checks of a family or a task on eight scenes: what the pipeline relies on and no type checker finds.

`vlp try NAME` prints their results, and tests/contrib/plugin_kit/test_conformance.py runs them on every family and
task. A check is a function that returns nothing, or a detail to print, and raises a `Problem` with a sentence
(checks.py).
`families.try_family` and `tasks.try_task` run them in order.

    family  it builds, each objective trains, each task it supports trains, every weight is trained by one of them, a
            row of a batch depends on nothing else, texts may share an image, decoding equals teacher forcing, and a
            saved model loads; with `ranks`, two processes compute the gradients of one
    task    it trains, predicts, scores, and writes its official result file
"""
