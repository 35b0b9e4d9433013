from tiny_tden import batch, make_batch, tiny

__all__ = ["batch", "make_batch", "tiny"]
