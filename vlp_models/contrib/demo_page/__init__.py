"""`vlp demo`: a web page that captions images, answers questions and searches with the champion models."""
